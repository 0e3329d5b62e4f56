"""Blocks of leaves in motion: whole leaves gathered to one rank, and a rank's block put together from stored ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from purestep.state.placement import block_of, default_rank, empty_shard, is_dtensor, local_tensor, mesh_device

T = TypeVar("T")
_CARRIERS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


def gather_to(owner: int, leaf: Tensor) -> list[Tensor] | None:
    """The whole of `leaf` on rank `owner`, as tensors whose elements follow each other; None on the other ranks.

    Collective over the ranks that shard the leaf together with `owner`; its replicas elsewhere send nothing.
    """
    if not is_dtensor(leaf):
        return [leaf] if default_rank() == owner else None
    axes = [axis for axis, placement in enumerate(leaf.placements) if placement.is_shard()]  # type: ignore[attr-defined]
    if not axes or leaf.numel() == 0:
        return [local_tensor(leaf).new_empty(0) if axes else local_tensor(leaf)] if default_rank() == owner else None
    if len(axes) > 1:
        whole = whole_tensor(leaf)
        return [whole] if default_rank() == owner else None
    return _gather_axis(owner, leaf, axes[0])


def flat_bytes(tensor: Tensor) -> Tensor:
    """The elements' bytes in row-major order, shape (bytes,); a view where the layout allows it."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # of one element, or none: any stride is contiguous then, but cannot be viewed as bytes
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def whole_tensor(leaf: Tensor) -> Tensor:
    """The global tensor of a DTensor, on every rank. Collective.

    Its bits are carried by dtypes that every backend can send: gloo has no float8 and no unsigned integers.
    """
    local, carrier = local_tensor(leaf).detach(), _CARRIERS.get(leaf.element_size())
    if carrier is None:
        return leaf.detach().full_tensor()  # type: ignore[attr-defined]
    from torch.distributed.tensor import DTensor

    bits = DTensor.from_local(
        local.resolve_conj().resolve_neg().view(carrier),
        leaf.device_mesh,  # type: ignore[attr-defined]
        leaf.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=leaf.shape,
        stride=leaf.stride(),
    )
    return bits.full_tensor().view(leaf.dtype)


def _gather_axis(owner: int, leaf: Tensor, axis: int) -> list[Tensor] | None:
    mesh, dim = leaf.device_mesh, leaf.placements[axis].dim  # type: ignore[attr-defined]
    group = mesh.get_group(axis)
    ranks = torch.distributed.get_process_group_ranks(group)
    if owner not in ranks:
        return None
    shapes = [_shard_shape(tuple(leaf.shape), dim, mesh.size(axis), i) for i in range(mesh.size(axis))]
    row_bytes = leaf.element_size()
    sent = _padded(flat_bytes(local_tensor(leaf)), math.prod(shapes[0]) * row_bytes)
    received = [torch.empty_like(sent) for _ in ranks] if default_rank() == owner else None
    torch.distributed.gather(sent, received, dst=owner, group=group)
    if received is None:
        return None
    coordinate = mesh.get_coordinate()
    line = mesh.mesh[tuple(slice(None) if i == axis else c for i, c in enumerate(coordinate))].tolist()
    pieces = [
        received[ranks.index(rank)][: math.prod(shape) * row_bytes].view(leaf.dtype).view(shape)
        for rank, shape in zip(line, shapes, strict=True)
    ]
    if math.prod(leaf.shape[:dim]) == 1:
        return pieces
    return [torch.cat([piece.view(torch.uint8) for piece in pieces], dim).view(leaf.dtype)]  # float8 has no cat


def _shard_shape(shape: tuple[int, ...], dim: int, num_shards: int, index: int) -> tuple[int, ...]:
    """Shape of one shard: DTensor splits as `torch.chunk` does, so the last ones may be short or empty."""
    size = -(-shape[dim] // num_shards)
    length = max(0, min(shape[dim] - index * size, size))
    return (*shape[:dim], length, *shape[dim + 1 :])


def _padded(data: Tensor, size: int) -> Tensor:
    if data.numel() == size:
        return data
    padded = data.new_zeros(size)
    padded[: data.numel()] = data
    return padded


@dataclass(frozen=True)
class Target:
    """A new leaf, and the block of it that this rank has to fill."""

    leaf: Tensor
    local: Tensor
    offset: tuple[int, ...]


def allocate(like: Tensor, device: torch.device | str | None, dtype: torch.dtype | None = None) -> Target:
    """A new, unfilled leaf of the shape, dtype and placement of `like`, which may be a meta tensor.

    A sharded leaf goes to its mesh's device. A plain one goes to `device`; by default to where `like` is, and to the
    CPU if that is a meta tensor. `dtype` replaces that of `like`.
    """
    dtype = dtype or like.dtype
    if not is_dtensor(like):
        if device is None:
            device = "cpu" if like.is_meta else like.device
        leaf = torch.empty(like.shape, dtype=dtype, device=device)
        return Target(leaf, leaf, (0,) * like.ndim)
    from torch.distributed.tensor import DTensor

    block = block_of(like)
    where = mesh_device(like.device_mesh) if block.local.is_meta else block.local.device  # type: ignore[attr-defined]
    local = empty_shard(like, dtype, where)
    leaf = DTensor.from_local(
        local,
        like.device_mesh,  # type: ignore[attr-defined]
        like.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=tuple(math.prod(like.shape[i + 1 :]) for i in range(like.ndim)),
    )
    return Target(leaf, local, block.offset)


def fill(
    target: Target,
    stored: Iterable[tuple[T, tuple[int, ...], tuple[int, ...]]],
    fetch: Callable[[T, tuple[slice, ...]], Tensor],
) -> None:
    """Fill the target's block from the stored blocks that overlap it.

    Args:
        target: what to fill.
        stored: (block, its offset, its shape) of each.
        fetch: gives a part of a block, cut out by one slice a dim.

    Raises:
        ValueError: the stored blocks do not cover the target's.
    """
    filled = 0
    for block, offset, shape in stored:
        starts = [max(a, b) for a, b in zip(offset, target.offset, strict=True)]
        stops = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, target.offset, target.local.shape, strict=True)]
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            continue
        ours, theirs = (
            tuple(slice(start - o, stop - o) for start, stop, o in zip(starts, stops, base, strict=True))
            for base in (target.offset, offset)
        )
        part = fetch(block, theirs)
        target.local[ours].copy_(part)
        filled += part.numel()
    if filled != target.local.numel():
        raise ValueError(f"{filled} of {target.local.numel()} elements are stored")
