"""Gradient accumulation: the same gradient from smaller microbatches."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from purestep.functional.gradients import GradFn, Gradients, ValueAndGrad, add_means, split_batch, with_microbatches
from purestep.functional.shards import with_local
from purestep.state.keys import Key
from purestep.state.placement import local_tensor


def accumulate(grad_fn: GradFn, steps: int) -> GradFn:
    """Compute `grad_fn` over a batch in `steps` microbatches of rows: same type, same gradient, less memory.

    Weighted by what each microbatch's loss says it weighs, so uneven microbatches, or fewer rows than `steps`, give the
    gradient of the whole batch. Microbatch i sees `key.fold_in("microbatch", i)`.

    Args:
        grad_fn: from `value_and_grad`, or any function of its type.
        steps: microbatches a batch, on each rank.

    Raises:
        ValueError: `steps` is below 1, or the batch's tensors have different leading dims.

    >>> import torch, purestep as ps
    >>> module = ps.shard(torch.nn.Linear(1, 1, bias=False))
    >>> grad_fn = ps.value_and_grad(module, lambda model, x, key: ps.Mean(model(x).sum(), x.shape[0]))
    >>> x = torch.tensor([[1.0], [2.0], [3.0], [10.0]])
    >>> ps.accumulate(grad_fn, 3)({"weight": torch.ones(1, 1)}, {}, x, ps.key(0)).grads["weight"]
    tensor([[4.]])
    """
    if steps < 1:
        raise ValueError(f"accumulate needs at least 1 microbatch, got {steps}")
    if isinstance(grad_fn, ValueAndGrad):
        return with_microbatches(grad_fn, steps * grad_fn.microbatches)
    return _accumulate_any(grad_fn, steps)


def _accumulate_any(grad_fn: GradFn, steps: int) -> GradFn:
    """For a gradient function of the user's own, whose results are means already."""

    def accumulated(
        params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any, key: Key, **scaling: Any
    ) -> Gradients:
        parts = []
        for i, microbatch in enumerate(split_batch(batch, steps)):
            part = grad_fn(params, buffers, microbatch, key.fold_in("microbatch", i), **scaling)
            parts.append(part)
            buffers = part.buffers
        loss = sum((part.loss for part in parts[1:]), parts[0].loss)
        metrics = functools.reduce(add_means, (part.metrics for part in parts))
        total = float(loss.weight)
        is_finite = all(part.is_finite for part in parts)
        return Gradients(loss, metrics, _weighted(parts, total), buffers, is_empty=total == 0, is_finite=is_finite)

    return accumulated


def _weighted(parts: list[Gradients], total: float) -> dict[str, Tensor]:
    grads: dict[str, Tensor] = {}
    for part in parts:
        share = float(part.loss.weight) / total if total else 0.0
        for name, grad in part.grads.items():
            scaled = torch.mul(local_tensor(grad), share)
            if name in grads:
                local_tensor(grads[name]).add_(scaled)
            else:
                grads[name] = with_local(grad, scaled)
    return grads
