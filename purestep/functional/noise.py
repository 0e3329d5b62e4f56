"""`add_noise`: Gaussian noise on gradients, the same in every topology."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from purestep.functional.schedules import Schedule, value_at
from purestep.functional.shards import copies_of
from purestep.functional.transforms import GradientTransform, Leaves, Slots
from purestep.state.keys import Key
from purestep.state.placement import Block, block_of

_CHUNK = 1 << 16  # elements drawn under one key, so that a shard need not draw the whole leaf


@dataclass(frozen=True)
class add_noise(GradientTransform):  # noqa: N801 - written and printed as a call
    """Add Gaussian noise to every gradient (arXiv:1511.06807).

    The noise is a pure function of the key, the step, the parameter's name and the place of an element in it: the same
    in every topology and on every device, and after a resume. It is drawn on the host, each rank drawing what its
    shards need.

    Args:
        key: of its own, from `ps.key(seed)` or `key.fold_in("noise")`; not that of the run, from which dropout comes.
        std: standard deviation, a number of at least 0 or a schedule of the step.

    Raises:
        TypeError: `key` is no Key.
        ValueError: `std` is negative or not finite.

    >>> import torch, purestep as ps
    >>> noise, grads = ps.add_noise(ps.key(0), std=0.1), {"w": torch.zeros(3)}
    >>> one, same, other = (noise.update(grads, {}, {}, step=step)[0]["w"] for step in (4, 4, 5))
    >>> torch.equal(one, same), torch.equal(one, other)
    (True, False)
    """

    key: Key
    std: float | Schedule

    def __post_init__(self) -> None:
        if not isinstance(self.key, Key):
            raise TypeError(f"add_noise takes a Key, got {type(self.key).__name__}; make one with ps.key(seed)")
        if not callable(self.std) and not (isinstance(self.std, int | float) and 0 <= self.std < math.inf):
            raise ValueError(f"add_noise: std must be a finite number of at least 0, or a schedule, got {self.std!r}")

    def init(self, params: Leaves) -> Slots:
        """No state."""
        return {}

    def update(
        self,
        grads: Leaves,
        slots: Slots,
        params: Leaves,
        *,
        step: int,
        inplace: bool = False,
        metrics: dict[str, Any] | None = None,
    ) -> tuple[Leaves, Slots]:
        """Noisy gradients; see `GradientTransform.update`."""
        std, key = float(value_at(self.std, step)), self.key.fold_in(int(step))
        new = dict(zip(grads, list(grads.values()) if inplace else copies_of(grads.values()), strict=True))
        with torch.no_grad():
            for name, grad in new.items():
                block = block_of(grad)
                noise = noise_of(block, key.fold_in(name)).mul_(std)
                block.local.add_(noise.to(block.local.device, block.local.dtype))
        return new, slots


def noise_of(block: Block, key: Key) -> Tensor:
    """This rank's block of a leaf's standard normal noise, on the host: fp32, or complex64 for complex leaves."""
    local, total = block.local, math.prod(block.shape)
    dtype = torch.complex64 if local.is_complex() else torch.float32
    if tuple(local.shape[1:]) == block.shape[1:]:  # whole rows, one after the other
        start = block.offset[0] * math.prod(block.shape[1:]) if block.shape else 0
        return _drawn(key, start, start + local.numel(), total, dtype).view(local.shape)
    whole = _drawn(key, 0, total, total, dtype).view(block.shape)
    for dim, (start, length) in enumerate(zip(block.offset, local.shape, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole.contiguous()


def _drawn(key: Key, start: int, stop: int, total: int, dtype: torch.dtype) -> Tensor:
    """Elements start..stop of a leaf with `total` elements."""
    pieces = [torch.empty(0, dtype=dtype)]
    for first in range(start // _CHUNK * _CHUNK, stop, _CHUNK):
        # Always the whole chunk: how torch draws depends on how many numbers it is asked for.
        chunk = torch.randn(min(_CHUNK, total - first), dtype=dtype, generator=key.fold_in(first).generator())
        pieces.append(chunk[max(start - first, 0) : stop - first])
    return torch.cat(pieces)
