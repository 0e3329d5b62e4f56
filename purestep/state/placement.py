"""Where a leaf's elements live: the one place that reads a DTensor's geometry."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def is_dtensor(leaf: Any) -> bool:
    """Whether `leaf` is a DTensor. Does not import `torch.distributed.tensor` for a program that never shards."""
    return type(leaf) is not Tensor and hasattr(leaf, "_local_tensor") and hasattr(leaf, "device_mesh")


def local_tensor(leaf: Tensor) -> Tensor:
    """The tensor this rank holds: the local shard of a DTensor, the tensor itself otherwise."""
    return leaf._local_tensor if is_dtensor(leaf) else leaf  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Block:
    """The part of a leaf that this rank holds: an axis-aligned block of the global tensor."""

    local: Tensor
    """The elements, shape (lengths of the block)."""
    offset: tuple[int, ...]
    """Index in the global tensor of the block's first element."""
    shape: tuple[int, ...]
    """Shape of the global tensor."""
    primary: bool
    """Whether this rank is the one that speaks for its replicas of the block."""
    shard_groups: tuple[ProcessGroup, ...]
    """Process groups over which blocks add up to the whole, one a sharded mesh axis; empty when the block is whole."""


def block_of(leaf: Tensor) -> Block:
    """This rank's block of `leaf`.

    Raises:
        ValueError: a DTensor placement other than `Replicate` and `Shard`.
    """
    shape = tuple(leaf.shape)
    if not is_dtensor(leaf):
        return Block(leaf, (0,) * leaf.ndim, shape, default_rank() == 0, ())
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    groups = shard_groups(leaf)
    mesh, placements = leaf.device_mesh, leaf.placements  # type: ignore[attr-defined]
    _, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    coordinate = mesh.get_coordinate()
    primary = all(c == 0 for c, p in zip(coordinate, placements, strict=True) if p.is_replicate())
    return Block(leaf._local_tensor, tuple(offset), shape, primary, groups)  # type: ignore[attr-defined]


def shard_groups(leaf: Tensor) -> tuple[ProcessGroup, ...]:
    """Process groups over which the blocks of `leaf` add up to the whole, one a sharded mesh axis.

    Raises:
        ValueError: a DTensor placement other than `Replicate` and `Shard`.
    """
    if not is_dtensor(leaf):
        return ()
    mesh, placements = leaf.device_mesh, leaf.placements  # type: ignore[attr-defined]
    for placement in placements:
        if not (placement.is_replicate() or placement.is_shard()):
            raise ValueError(
                f"a state holds replicated or sharded leaves, got a DTensor placed as {placement!r}; "
                "reduce partial sums first"
            )
    return tuple(mesh.get_group(axis) for axis, placement in enumerate(placements) if placement.is_shard())


def default_rank() -> int:
    """Rank in the default process group, 0 when there is none."""
    return torch.distributed.get_rank() if in_process_group() else 0


def default_world_size() -> int:
    """Size of the default process group, 1 when there is none."""
    return torch.distributed.get_world_size() if in_process_group() else 1


def in_process_group() -> bool:
    """Whether this process is one of several."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def empty_leaf(abstract: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Uninitialized storage shaped, typed and placed like `abstract` (a meta tensor or meta DTensor, say).

    An uneven shard is a leading slice of storage for the largest one, since FSDP2 computes on storage padded so.

    Args:
        abstract: any leaf; only its geometry is read.
        device: where to allocate; default the device of the mesh for a DTensor, the leaf's own otherwise.
    """
    if not is_dtensor(abstract):
        return torch.empty(abstract.shape, dtype=abstract.dtype, device=device or abstract.device)
    spec = abstract._spec  # type: ignore[attr-defined]
    return from_local(empty_shard(abstract, abstract.dtype, device or mesh_device(spec.mesh)), spec)


def empty_shard(like: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """New memory for this rank's shard of a DTensor; an uneven one is a leading slice, see `empty_leaf`."""
    mesh, shape = like.device_mesh, tuple(local_tensor(like).shape)  # type: ignore[attr-defined]
    sharded = [(axis, placement.dim) for axis, placement in enumerate(like.placements) if placement.is_shard()]  # type: ignore[attr-defined]
    if not sharded or any(dim != 0 for _, dim in sharded):
        return torch.empty(shape, dtype=dtype, device=device)
    rows = -(-like.shape[0] // math.prod(mesh.size(axis) for axis, _ in sharded))
    if rows <= shape[0]:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.zeros((rows, *shape[1:]), dtype=dtype, device=device).narrow(0, 0, shape[0])


def from_local(local: Tensor, spec: Any) -> Tensor:
    """The DTensor whose local shard is `local`, sharing its memory, without DTensor's dispatch or checks."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, spec, requires_grad=False)


def mesh_device(mesh: Any) -> torch.device:
    """The device this rank computes on in `mesh`."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def copy_block(leaf: Tensor, whole: Tensor) -> None:
    """Write into `leaf` this rank's block of `whole`, the global tensor (any device)."""
    block = block_of(leaf)
    for dim, (start, length) in enumerate(zip(block.offset, block.local.shape, strict=True)):
        whole = whole.narrow(dim, start, length)
    block.local.copy_(whole)
