"""A torch.optim class stepped by hand, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Leaves = Mapping[str, Tensor]
SHAPES = {"w": (3, 4), "b": (4,), "scalar": (), "conv": (2, 3, 3, 3)}
PRESENT = [("w",), ("w", "b"), ("b", "conv", "scalar"), tuple(SHAPES), ("conv",)]
"""Which leaves have a gradient at each step."""


def random_leaves(seed: int, dtype: torch.dtype = torch.float32, shapes: Mapping[str, tuple] = SHAPES) -> Leaves:
    generator = torch.Generator().manual_seed(seed)
    leaves = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: leaf.to(dtype) for name, leaf in leaves.items()}


def some_gradients(dtype: torch.dtype = torch.float32, shapes: Mapping[str, tuple] = SHAPES) -> list[Leaves]:
    """Gradients of five steps, each with the leaves of `PRESENT` only."""
    return [
        {name: grad for name, grad in random_leaves(step, dtype, shapes).items() if name in names}
        for step, names in enumerate(PRESENT, start=1)
    ]


def stepped(
    build: Callable[[Sequence[Any]], torch.optim.Optimizer], params: Leaves, all_grads: Sequence[Leaves], rates: Any
) -> tuple[Leaves, dict[str, dict[str, Any]], torch.optim.Optimizer]:
    """Parameters, state as {slot: {name: value}}, and the optimizer after a step for each of `all_grads`."""
    leaves = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in params.items()}
    optimizer = build(list(leaves.values()))
    for grads, rate in zip(all_grads, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, leaf in leaves.items():
            leaf.grad = grads[name].clone() if name in grads else None
        optimizer.step()
    slots: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        for slot, value in optimizer.state.get(leaf, {}).items():
            slots.setdefault(slot, {})[name] = value
    return {name: leaf.detach() for name, leaf in leaves.items()}, slots, optimizer


def run(optimizer: Any, params: Leaves, all_grads: Sequence[Leaves], **options: Any) -> tuple[Any, Any]:
    """Parameters and state after an update for each of `all_grads`."""
    opt_state = optimizer.init(params)
    for step, grads in enumerate(all_grads):
        params, opt_state = optimizer.update(grads, opt_state, params, step=step, **options)
    return params, opt_state
