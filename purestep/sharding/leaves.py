"""The leaves of a module: which tensors it has, under which names, and where in the module tree they sit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """One place of a module tree that holds a leaf: an entry of a module's `_parameters` or `_buffers`."""

    module: nn.Module
    path: str
    attr: str

    @property
    def name(self) -> str:
        """The leaf's name at this place."""
        return f"{self.path}.{self.attr}" if self.path else self.attr


@dataclass(frozen=True)
class Leaf:
    """A parameter or buffer. A tied one has several slots; the first gives its name."""

    name: str
    slots: tuple[Slot, ...]
    shape: torch.Size
    dtype: torch.dtype
    trainable: bool = False
    is_meta: bool = False
    """Whether it had no values when the module was taken over."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()


@dataclass(frozen=True)
class ModuleLeaves:
    """Everything a module holds."""

    params: Mapping[str, Leaf]
    buffers: Mapping[str, Leaf]
    """Persistent buffers: leaves of the state."""
    constants: Mapping[str, Leaf]
    """Non-persistent buffers: they stay with the module and must not change."""


def leaves_of(model: nn.Module) -> ModuleLeaves:
    """Read the leaves of `model`, tied ones once, in `named_parameters` order."""
    params = _collect(_param_slots(model))
    buffers = _collect(_buffer_slots(model, persistent=True))
    constants = _collect(_buffer_slots(model, persistent=False))
    return ModuleLeaves(params, buffers, {name: leaf for name, leaf in constants.items() if name not in buffers})


def _param_slots(model: nn.Module) -> Iterator[tuple[Slot, Tensor]]:
    for path, module in model.named_modules():
        for attr, tensor in module._parameters.items():
            if tensor is not None:
                yield Slot(module, path, attr), tensor


def _buffer_slots(model: nn.Module, *, persistent: bool) -> Iterator[tuple[Slot, Tensor]]:
    for path, module in model.named_modules():
        for attr, tensor in module._buffers.items():
            if tensor is not None and (attr not in module._non_persistent_buffers_set) == persistent:
                yield Slot(module, path, attr), tensor


def _collect(found: Iterator[tuple[Slot, Tensor]]) -> dict[str, Leaf]:
    places: dict[int, list[Any]] = {}
    for slot, tensor in found:
        places.setdefault(id(tensor), [tensor]).append(slot)
    leaves = {}
    for tensor, *slots in places.values():
        leaves[slots[0].name] = Leaf(
            slots[0].name, tuple(slots), tensor.shape, tensor.dtype, tensor.requires_grad, tensor.is_meta
        )
    return leaves
