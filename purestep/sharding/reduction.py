"""Sums over data-parallel ranks: of scalars, as one small message, and of buffers."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from purestep.sharding.runtime import Runtime

_ROUND = 16  # scalars a message is padded to a multiple of, so that ranks with a few names more or less still meet


class OnHost:
    """Scalars of a device on their way to the host: asked for now, waited for when they are read."""

    def __init__(self, values: Tensor):
        self._event = None
        self._values = values
        if values.device.type in ("cuda", "xpu"):
            self._values = values.to("cpu", non_blocking=True)
            self._event = torch.get_device_module(values.device).Event()
            self._event.record()

    def read(self) -> list[float]:
        """The values; waits for what produced them, but not for what was launched after."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


class ScalarSums:
    """Scalars summed over ranks: `values` on the device, `read()` on the host."""

    def __init__(self, runtime: Runtime, values: Mapping[str, Any]):
        self._names = sorted(values)
        # Equal on all ranks if and only if its sum and its sum of squares are what they then must be.
        self._print = float(zlib.crc32(repr(self._names).encode()) % 2**20)
        self._num_ranks = runtime.world_size
        dtype = torch.float32 if runtime.device.type == "mps" else torch.float64
        row = [self._print, self._print**2, *(values[name] for name in self._names)]
        row += [0.0] * (-len(row) % _ROUND)
        scalars = [torch.as_tensor(x, dtype=dtype, device=runtime.device).detach().reshape(()) for x in row]
        flat = runtime.all_reduce(torch.stack(scalars))
        self.values = dict(zip(self._names, flat[2:], strict=False))
        self._host = OnHost(flat)

    def read(self) -> dict[str, float]:
        """The sums by name.

        Raises:
            ValueError: on every rank, if the ranks have different names.
        """
        total, squares, *sums = self._host.read()
        if (total, squares) != (self._print * self._num_ranks, self._print**2 * self._num_ranks):
            raise ValueError(
                f"ranks report metrics of different names; here {', '.join(filter(None, self._names))}: a loss returns "
                "the same ones on every rank, with weight 0 where there is nothing to report"
            )
        return dict(zip(self._names, sums, strict=False))


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
