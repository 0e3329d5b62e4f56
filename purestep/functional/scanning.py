"""`scan`: many steps as one."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from purestep.state.train_state import TrainState


def scan(
    step: Callable[[TrainState, Any], tuple[TrainState, Any]],
) -> Callable[[TrainState, Any], tuple[TrainState, Any]]:
    """Run a step over stacked batches: `(state, batches) -> (state, metrics)`, as `jax.lax.scan` does.

    Args:
        step: `(state, batch) -> (state, metrics)`; a donated one consumes the first state, and needs no memory for
            those in between.

    Returns:
        A function of a state and a tree like a batch, whose tensors have one more leading dim, of size n; values that
        are no tensors go to each step as they are. It returns the state after n steps, and the metrics of all of them:
        numbers and tensors stacked along a new leading dim, of size n, anything else as a tuple.

    Raises:
        ValueError: no tensor in the batches, different leading dims, or n = 0; when called.

    >>> import torch, purestep as ps
    >>> module, optimizer = ps.shard(torch.nn.Linear(1, 1, bias=False)), ps.sgd(0.1)
    >>> step = ps.train_step(module, lambda model, x, key: ps.Mean(model(x).sum(), len(x)), optimizer)
    >>> state = ps.init(module, optimizer, ps.key(0)).replace(params={"weight": torch.ones(1, 1)})
    >>> state, metrics = ps.scan(step)(state, torch.ones(3, 2, 1))
    >>> state.step, metrics["loss"]
    (3, tensor([1.0000, 0.9000, 0.8000]...))
    """
    if not callable(step):
        raise TypeError(f"ps.scan takes a step, a function of a state and a batch, got {step!r}")

    def scanned(state: TrainState, batches: Any) -> tuple[TrainState, Any]:
        flat, structure = pytree.tree_flatten(batches)
        metrics = []
        for i in range(_length(batches)):
            batch = pytree.tree_unflatten([x[i] if isinstance(x, Tensor) else x for x in flat], structure)
            state, report = step(state, batch)
            metrics.append(report)
        return state, pytree.tree_map(lambda *values: _stacked(values), *metrics)

    return scanned


def _length(batches: Any) -> int:
    flat, _ = pytree.tree_flatten_with_path(batches)
    sizes = {pytree.keystr(path) or "batches": tuple(x.shape) for path, x in flat if isinstance(x, Tensor)}
    lengths = {shape[:1] for shape in sizes.values()}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        found = ", ".join(f"{name}: {shape}" for name, shape in sizes.items()) or "no tensor"
        raise ValueError(
            f"to scan over batches, their tensors need one leading dim, the number of steps, of at least 1; got {found}"
        )
    return lengths.pop()[0]


def _stacked(values: Sequence[Any]) -> Any:
    if all(isinstance(value, numbers.Real) for value in values):
        return torch.tensor(values, dtype=torch.float64 if any(isinstance(value, float) for value in values) else None)
    if all(isinstance(value, Tensor | numbers.Real) for value in values):
        like = next(value for value in values if isinstance(value, Tensor))
        return torch.stack([torch.as_tensor(value, dtype=like.dtype, device=like.device) for value in values])
    return tuple(values)
