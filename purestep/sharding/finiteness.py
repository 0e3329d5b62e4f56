"""Whether leaves are finite: what this rank sees of it, and what all ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from purestep.state.placement import local_tensor, shard_groups


def nonfinite_here(leaves: Iterable[Tensor], device: torch.device) -> Tensor:
    """1.0 if an element that this rank holds is infinite or NaN, else 0.0: a 0-d fp32 tensor, not waited for."""
    by_dtype: dict[tuple, list[Tensor]] = {}
    for leaf in leaves:
        local = local_tensor(leaf)
        if local.numel():  # nothing has no largest element
            by_dtype.setdefault((local.dtype, local.device), []).append(local.detach())
    # The largest absolute value is found exactly, and NaN if there is one; a sum of squares could overflow.
    largest = [torch.stack(torch._foreach_norm(same, math.inf)).abs().amax() for same in by_dtype.values()]
    bad = torch.zeros((), dtype=torch.float32, device=device)
    for norm in largest:
        bad = torch.maximum(bad, (~norm.isfinite()).to(bad))
    return bad


def nonfinite_leaves(leaves: Mapping[str, Tensor]) -> list[str]:
    """Names of the leaves with an element that is infinite or NaN, on whichever rank. Collective if one is sharded."""
    found: dict[str, float] = {}
    for groups, names in _by_groups(leaves).items():
        device = local_tensor(leaves[names[0]]).device
        flags = torch.stack([nonfinite_here([leaves[name]], device) for name in names])
        found.update(zip(names, _agreed(flags, groups).tolist(), strict=True))
    return [name for name in leaves if found[name]]


def all_finite(leaves: Mapping[str, Tensor]) -> bool:
    """Whether every element is finite: one answer on all ranks. Collective if a leaf is sharded; waits for the device.

    A leaf that is not sharded is taken to be the same on every rank, as it is in a state and in reduced gradients.
    """
    flags = []
    for groups, names in _by_groups(leaves).items():
        device = local_tensor(leaves[names[0]]).device
        flags.append(_agreed(nonfinite_here([leaves[name] for name in names], device), groups).reshape(()))
    return not any(flag.item() for flag in flags)


def _by_groups(leaves: Mapping[str, Tensor]) -> dict[tuple, list[str]]:
    """Names of leaves that the same ranks share, in an order that all ranks have."""
    found: dict[tuple, list[str]] = {}
    for name, leaf in leaves.items():
        found.setdefault(shard_groups(leaf), []).append(name)
    return found


def _agreed(flags: Tensor, groups: tuple) -> Tensor:
    for group in groups:
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, group=group)
    return flags
