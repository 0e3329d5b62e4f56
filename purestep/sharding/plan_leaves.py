"""Tensors as a plan lists them: a module's buffers, and what an optimizer keeps, asked of its own `init`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from purestep.sharding.leaves import Leaf, ModuleLeaves
from purestep.sharding.plan import PlanLeaf, PlanParam
from purestep.state.names import join


def buffers_of(leaves: ModuleLeaves) -> tuple[PlanLeaf, ...]:
    """The buffers of a module, non-persistent ones last."""
    both = ((leaves.buffers, True), (leaves.constants, False))
    return tuple(
        _plan_leaf(name, leaf, persistent=persistent) for table, persistent in both for name, leaf in table.items()
    )


def slots_of(
    optimizer: Any, params: Iterable[PlanParam]
) -> tuple[dict[str, tuple[PlanLeaf, ...]], tuple[PlanLeaf, ...]]:
    """The leaves of `optimizer.init(params)`, called with meta tensors: no memory, no process group.

    Args:
        optimizer: anything with `init`.
        params: the trainable ones.

    Returns:
        (leaves by the name of the parameter they are kept for, those kept for none).
    """
    abstract = {p.name: torch.empty(p.shape, dtype=getattr(torch, p.dtype), device="meta") for p in params}
    by_param: dict[str, list[PlanLeaf]] = {}
    others: list[PlanLeaf] = []
    for slot, param, tensor in _leaves("", optimizer.init(abstract)):
        belongs = param in abstract
        name = slot if belongs else join(slot, param).removeprefix("/")
        leaf = _plan_leaf(name, tensor)
        (by_param.setdefault(param, []) if belongs else others).append(leaf)
    return {name: tuple(leaves) for name, leaves in by_param.items()}, tuple(others)


def _plan_leaf(name: str, leaf: Tensor | Leaf, *, persistent: bool = True) -> PlanLeaf:
    dtype = str(leaf.dtype).removeprefix("torch.")
    return PlanLeaf(name, tuple(leaf.shape), dtype, leaf.dtype.itemsize, persistent)


def _leaves(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
    """(name of the mapping around it, its key there, tensor) of everything in a tree of mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(join(prefix, key).removeprefix("/"), value)
        else:
            yield prefix, key, value
