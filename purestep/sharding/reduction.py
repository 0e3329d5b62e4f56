"""Sums over data-parallel ranks: of scalars, as one small message, and of buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from purestep.sharding.runtime import Runtime


def sum_scalars(runtime: Runtime, values: Sequence[Any]) -> Tensor:
    """Sum each scalar over ranks, in float64 where the device has it.

    Returns:
        A tensor of shape (len(values),) on the runtime's device, equal on every rank.
    """
    dtype = torch.float32 if runtime.device.type == "mps" else torch.float64
    stacked = torch.stack(
        [torch.as_tensor(value, device=runtime.device).detach().to(dtype).reshape(()) for value in values]
    )
    return runtime.all_reduce(stacked)


def mean_buffers(runtime: Runtime, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make buffers that each rank wrote by itself equal on every rank: the mean over ranks, for integers the maximum.

    The mean of BatchNorm's running statistics does not depend on which rank saw which batch; torch's own DDP keeps rank
    0's instead. What is averaged is the change, so that a buffer nobody wrote keeps its bits.

    Args:
        runtime: whose ranks.
        new: buffers after a forward, by name.
        old: the same before it, equal on every rank.
    """
    merged = dict(new)
    if runtime.world_size == 1:
        return merged
    floating = [name for name, tensor in new.items() if tensor.is_floating_point() or tensor.is_complex()]
    for names in _by_dtype(new, floating):
        wide = torch.promote_types(new[names[0]].dtype, torch.float32)
        before, after = (torch.cat([tree[name].reshape(-1).to(wide) for name in names]) for tree in (old, new))
        # Not `after - before`: infinities (of a mask, say) would give NaN. Nor `before + 0`: it turns -0.0 into 0.0.
        change = runtime.all_reduce(torch.where(after == before, 0, after - before)) / runtime.world_size
        merged.update(_split(new, names, torch.where(change == 0, before, before + change).to(new[names[0]].dtype)))
    for names in _by_dtype(new, [name for name in new if name not in floating]):
        flat = torch.cat([new[name].reshape(-1).to(torch.int64) for name in names])
        merged.update(_split(new, names, runtime.all_reduce(flat, op="max").to(new[names[0]].dtype)))
    return merged


def _by_dtype(buffers: Mapping[str, Tensor], names: Iterable[str]) -> list[list[str]]:
    groups: dict[torch.dtype, list[str]] = {}
    for name in names:
        groups.setdefault(buffers[name].dtype, []).append(name)
    return list(groups.values())


def _split(buffers: Mapping[str, Tensor], names: list[str], flat: Tensor) -> dict[str, Tensor]:
    pieces = flat.split([buffers[name].numel() for name in names])
    return {name: piece.view(buffers[name].shape).clone() for name, piece in zip(names, pieces, strict=True)}
