"""Sums over data-parallel ranks: of scalars, as one small message, and of buffers.

Both are asked for at one moment and waited for at another. On a CPU the wait is for the slowest rank, so what can be
computed in between, such as a backward, then hides it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
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

    def read(self) -> Any:
        """The values, as `Tensor.tolist()`; waits for what produced them, but not for what was launched after."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


class Reduction:
    """A tensor being summed over all ranks in place. Every rank makes it, and waits for it, at the same points."""

    def __init__(self, runtime: Runtime, tensor: Tensor, op: str = "sum"):
        """
        Args:
            runtime: whose ranks.
            tensor: of this rank; not to be looked at before `wait`.
            op: "sum" or "max".
        """
        self._tensor = tensor
        self._work: Any = None
        if runtime.world_size > 1:
            reduce = {"sum": torch.distributed.ReduceOp.SUM, "max": torch.distributed.ReduceOp.MAX}[op]
            self._work = torch.distributed.all_reduce(tensor, op=reduce, async_op=True)
        if tensor.device.type != "cpu":  # there waiting is the device's business, and costs the host nothing
            self.wait()

    def wait(self) -> Tensor:
        """The sum."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._tensor


class ScalarSums:
    """Scalars being summed over ranks: `values` on the device, `read()` on the host."""

    def __init__(self, runtime: Runtime, values: Mapping[str, Any]):
        self._names = sorted(values)
        # Equal on all ranks if and only if its sum and its sum of squares are what they then must be.
        self._print = float(zlib.crc32(repr(self._names).encode()) % 2**20)
        self._num_ranks = runtime.world_size
        row = [self._print, self._print**2, *(values[name] for name in self._names)]
        row += [0.0] * (-len(row) % _ROUND)
        flat = _stacked(row, runtime.device)
        self.values = dict(zip(self._names, flat[2:].unbind(), strict=False))
        """By name, on the device. Sums once `read` has returned, not before."""
        self._reduction = Reduction(runtime, flat)
        self._host = OnHost(flat)

    def read(self) -> dict[str, float]:
        """The sums by name.

        Raises:
            ValueError: on every rank, if the ranks have different names.
        """
        self._reduction.wait()
        total, squares, *sums = self._host.read()
        if (total, squares) != (self._print * self._num_ranks, self._print**2 * self._num_ranks):
            raise ValueError(
                f"ranks report metrics of different names; here {', '.join(filter(None, self._names))}: a loss returns "
                "the same ones on every rank, with weight 0 where there is nothing to report"
            )
        return dict(zip(self._names, sums, strict=False))


def mean_in(dtype: torch.dtype) -> Callable[[Any, Any], torch.futures.Future[Tensor]]:
    """A communication hook for DDP that averages gradients in `dtype`: half the traffic of fp32 in 16 bits.

    torch has hooks of that kind too, but refuses the one for bf16 without NCCL.
    """

    # A lambda, because DDP compares annotations of a hook, and would not know postponed ones.
    return lambda group, bucket: _average(bucket.buffer(), group or torch.distributed.group.WORLD, dtype)


def _average(buffer: Tensor, group: Any, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    share = (buffer / group.size()).to(dtype)  # divided before it is added up, where fp16 would overflow
    work = torch.distributed.all_reduce(share, group=group, async_op=True)
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))


def mean_buffers(
    runtime: Runtime, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
) -> Callable[[], dict[str, Tensor]]:
    """Make buffers that each rank wrote by itself equal on every rank: the mean over ranks, for integers the maximum.

    The mean of BatchNorm's running statistics does not depend on which rank saw which batch; torch's own DDP keeps rank
    0's instead. What is averaged is the change, so that a buffer nobody wrote keeps its bits.

    Args:
        runtime: whose ranks.
        new: buffers after a forward, by name.
        old: the same before it, equal on every rank.

    Returns:
        A function that waits for the other ranks and gives the buffers.
    """
    if runtime.world_size == 1 or not new:
        return lambda: dict(new)
    floating = [name for name, tensor in new.items() if tensor.is_floating_point() or tensor.is_complex()]
    others = [name for name in new if name not in floating]
    pending = [_mean_change(runtime, new, old, names) for names in _by_dtype(new, floating)]
    pending += [_maximum(runtime, new, names) for names in _by_dtype(new, others)]

    def merged() -> dict[str, Tensor]:
        pieces = [piece for finish in pending for piece in finish().items()]
        return {**new, **dict(pieces)}

    return merged


def _mean_change(
    runtime: Runtime, new: Mapping[str, Tensor], old: Mapping[str, Tensor], names: list[str]
) -> Callable[[], dict[str, Tensor]]:
    dtype = new[names[0]].dtype
    wide = torch.promote_types(dtype, torch.float32)
    before, after = (torch.cat([tree[name].reshape(-1).to(wide) for name in names]) for tree in (old, new))
    # Not `after - before`: infinities (of a mask, say) would give NaN. Nor `before + 0`: it turns -0.0 into 0.0.
    reduction = Reduction(runtime, torch.where(after == before, 0, after - before))

    def finish() -> dict[str, Tensor]:
        change = reduction.wait() / runtime.world_size
        return _split(new, names, torch.where(change == 0, before, before + change).to(dtype))

    return finish


def _maximum(runtime: Runtime, new: Mapping[str, Tensor], names: list[str]) -> Callable[[], dict[str, Tensor]]:
    flat = torch.cat([new[name].reshape(-1).to(torch.int64) for name in names])
    reduction = Reduction(runtime, flat, "max")
    return lambda: _split(new, names, reduction.wait().to(new[names[0]].dtype))


def _stacked(row: list[Any], device: torch.device) -> Tensor:
    """Numbers and 0-d tensors as one vector on `device`."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if device.type == "cpu":  # where reading a value waits for nothing
        return torch.tensor([x.item() if isinstance(x, Tensor) else x for x in row], dtype=dtype)
    return torch.stack([torch.as_tensor(x, dtype=dtype, device=device).detach().reshape(()) for x in row])


def _by_dtype(buffers: Mapping[str, Tensor], names: Iterable[str]) -> list[list[str]]:
    groups: dict[torch.dtype, list[str]] = {}
    for name in names:
        groups.setdefault(buffers[name].dtype, []).append(name)
    return list(groups.values())


def _split(buffers: Mapping[str, Tensor], names: list[str], flat: Tensor) -> dict[str, Tensor]:
    pieces = flat.split([buffers[name].numel() for name in names])
    return {name: piece.view(buffers[name].shape).clone() for name, piece in zip(names, pieces, strict=True)}
