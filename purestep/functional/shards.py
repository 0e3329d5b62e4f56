"""Lists of leaves as the tensors this rank holds, and back."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from purestep.state.placement import from_local, is_dtensor, local_tensor
from purestep.state.train_state import clone_leaf

# Functions in C, for loops over thousands of leaves.
_dtype, _device = operator.attrgetter("dtype"), operator.attrgetter("device")


def are_plain(leaves: Iterable[Tensor]) -> bool:
    """Whether every leaf is a `torch.Tensor` itself: one look at the types, which spares a call a leaf."""
    return set(map(type, leaves)) <= {Tensor}


def local_tensors(leaves: Iterable[Tensor]) -> list[Tensor]:
    """The local tensor of each leaf."""
    leaves = list(leaves)
    if are_plain(leaves):
        return leaves
    if len(set(map(type, leaves))) == 1 and is_dtensor(leaves[0]):
        return [leaf._local_tensor for leaf in leaves]  # type: ignore[attr-defined]
    return [local_tensor(leaf) for leaf in leaves]


def with_local(leaf: Tensor, local: Tensor) -> Tensor:
    """A leaf placed like `leaf`, made of `local` on this rank."""
    return from_local(local, leaf._spec) if is_dtensor(leaf) else local  # type: ignore[attr-defined]


def copies_of(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Each leaf in storage of its own; layout, placement and the padding behind an uneven shard are kept."""
    return [leaf.clone() if type(leaf) is Tensor else clone_leaf(leaf) for leaf in leaves]


def filled_like(leaf: Tensor, value: float) -> Tensor:
    """A leaf of one value with the shape, dtype, layout, device and placement of `leaf`; meta stays meta."""
    return with_local(leaf, torch.full_like(local_tensor(leaf).detach(), value))


def geometry(leaf: Tensor) -> tuple[Any, ...]:
    """What two leaves must have in common to be combined element by element on local shards."""
    if is_dtensor(leaf):
        return leaf.shape, leaf.dtype, local_tensor(leaf).device, leaf.placements  # type: ignore[attr-defined]
    return leaf.shape, leaf.dtype, leaf.device, None


def match(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether `some` and `others` have the same geometry, one by one."""
    together = (*some, *others)
    if are_plain(together) and len(set(map(_dtype, together))) == 1 and len(set(map(_device, together))) == 1:
        return all(map(Tensor.is_same_size, some, others))
    return list(map(geometry, some)) == list(map(geometry, others))
