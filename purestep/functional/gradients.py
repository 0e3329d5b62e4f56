"""Loss and gradient as a pure function of a state, over microbatches and data-parallel ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from purestep.functional.means import Mean
from purestep.sharding.engines import Session
from purestep.sharding.loss_scale import all_finite, seed_of_backward
from purestep.sharding.pure_module import PureModule
from purestep.sharding.reduction import OnHost, ScalarSums, mean_buffers
from purestep.sharding.runtime import Runtime
from purestep.state.keys import Key
from purestep.state.placement import local_tensor

Loss = Callable[[Any, Any, Key], Any]
"""`loss(model, batch, key) -> Mean | scalar | (Mean | scalar, {name: Mean | scalar})`."""


@dataclass(frozen=True)
class Gradients:
    """What a batch says about a state. Equal on every rank, but for shards of gradients."""

    loss: Mean
    """Over all microbatches and data-parallel ranks."""
    metrics: Mapping[str, Mean]
    """The loss function's own metrics, likewise."""
    grads: Mapping[str, Tensor]
    """Gradient of `loss.value` by parameter name, placed as the parameter is. No gradient: no entry."""
    buffers: Mapping[str, Tensor]
    """Buffers after the forward passes."""
    is_empty: bool = False
    """Whether the whole batch weighed nothing: known on the host, where the step decides what to do about it."""

    is_finite: bool = True
    """Whether all gradients are, on every rank; looked at only when the loss was scaled, and known on the host."""


GradFn = Callable[..., Gradients]
"""`(params, buffers, batch, key) -> Gradients`; where the loss is scaled it takes `scale=` too."""


@dataclass(frozen=True)
class ValueAndGrad:
    """`(params, buffers, batch, key, *, scale=None) -> Gradients`; from `value_and_grad`, changed by `accumulate`."""

    module: PureModule
    loss: Loss
    microbatches: int = 1

    def __call__(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        batch: Any,
        key: Key,
        *,
        scale: Tensor | float | None = None,
    ) -> Gradients:
        """Differentiate the loss at `params` over this rank's `batch`. Collective where there are several processes.

        Args:
            params: every parameter by name.
            buffers: every persistent buffer by name.
            batch: this rank's slice of the global batch.
            key: of this step.
            scale: factor of the loss during backward, which the gradients returned do not have: what fp16 needs,
                `state.extra["loss_scale"]["scale"]`. 1.0 does without.

        Raises:
            ValueError: no `scale` though the runtime computes in fp16; the loss has no gradient; ranks report
                different metrics.
        """
        runtime = self.module.runtime
        if scale is None and runtime.config.mixed_precision == "fp16":
            raise ValueError(
                "fp16 loses small gradients unless the loss is scaled: call with "
                'scale=state.extra["loss_scale"]["scale"] (ps.init puts it there), or with scale=1.0 to do without'
            )
        windows = self._windows(batch)
        seed = _Seed(runtime, scale, num_windows=len(windows), microbatches=self.microbatches)
        with self.module.session(params, buffers) as session:
            sums: dict[str, Mean] = {}
            for i, (microbatch, counts) in enumerate(windows):
                last = i == len(windows) - 1
                own_key = key.fold_in("microbatch", i, "rank", runtime.dp_rank)
                with session.window(last=last), ambient(own_key).scope(runtime.device):
                    total, means = self._forward(session, microbatch, own_key, counts=counts)
                    total = seed.times(total, means[_LOSS].weight)
                    sums = add_means(sums, means)
                    if last:  # asked for before backward, which hides the wait for the other ranks
                        sums, read_weight = reduce_means(self.module, sums)
                        written = {name: buffer.detach() for name, buffer in session.new_buffers().items()}
                        read_buffers = mean_buffers(runtime, written, buffers)
                    session.backward(total, last=last)
            weight, new_buffers = read_weight(), read_buffers()
            grads = session.gradients()
        _scale(grads, seed.remaining_factor(weight))
        is_finite = scale is None or all_finite(runtime, grads.values())
        loss = sums.pop(_LOSS)
        return Gradients(loss, sums, grads, new_buffers, is_empty=weight == 0, is_finite=is_finite)

    def _windows(self, batch: Any) -> list[tuple[Any, bool]]:
        """(microbatch, whether it counts) pairs; as many on every rank where backward is collective."""
        if self.microbatches == 1:
            return [(batch, True)]
        parts = [(part, True) for part in split_batch(batch, self.microbatches)]
        if self.module.topology.is_sharded:
            parts += [(parts[0][0], False)] * (self.microbatches - len(parts))
        return parts

    def _forward(self, session: Session, microbatch: Any, key: Key, *, counts: bool) -> tuple[Tensor, dict[str, Mean]]:
        with nullcontext() if counts else session.discarding_buffers(), self.module.runtime.autocast():
            means = call_loss(self.loss, session.model, microbatch, key)
        if not counts:
            means = {name: Mean(mean.total * 0, mean.weight * 0) for name, mean in means.items()}
        total = means[_LOSS].total
        if not (isinstance(total, Tensor) and total.requires_grad):
            raise ValueError("the loss does not depend on any trainable parameter: its total has no gradient")
        return total, {name: Mean(_detached(mean.total), _detached(mean.weight)) for name, mean in means.items()}


_LOSS = ""  # the loss among its metrics; no metric has this name
_RESERVED = (_LOSS, "loss", "weight", "grad_norm", "lr", "skipped", "loss_scale")  # what steps report themselves


class _Seed:
    """The factor that backward starts with, and what is then left of the way to the gradient of the mean."""

    def __init__(self, runtime: Runtime, scale: Tensor | float | None, *, num_windows: int, microbatches: int):
        self._runtime = runtime
        self._scale = scale
        self._microbatches = microbatches
        # One process and one microbatch: the weight is known before backward, which then gives the mean's gradient.
        self._alone = scale is None and runtime.world_size == num_windows == 1
        self._divided = False
        self._factor: Tensor | None = None
        self._on_host: OnHost | None = None

    def times(self, total: Tensor, weight: Tensor | float) -> Tensor:
        """A microbatch's total as backward takes it; collective the first time if the loss is scaled."""
        if self._alone and total.dtype.itemsize >= 4:  # 16 bits would round the weight
            self._divided = True
            return total / weight if isinstance(weight, Tensor) or weight else total * 0
        if self._scale is None:
            return total
        if self._factor is None:
            self._factor = seed_of_backward(self._runtime, self._scale, weight, self._microbatches)
            self._on_host = OnHost(self._factor)
        return total * self._factor

    def remaining_factor(self, weight: float) -> float:
        """What to multiply the gradients with, given the weight of everything."""
        if not weight:
            return 0.0
        if self._divided:
            return 1.0
        return self._runtime.dp_size / weight / (1.0 if self._on_host is None else self._on_host.read())


def value_and_grad(module: PureModule, loss: Loss) -> ValueAndGrad:
    """The gradient of a loss as a pure function of a state.

    The loss optimized is sum(total) / sum(weight) over all microbatches and all data-parallel ranks, so its gradient
    does not depend on how samples or tokens are grouped. A batch of weight zero has loss 0 and zero gradients.

    Args:
        module: from `ps.shard`.
        loss: `loss(model, batch, key)`; `model` is the module bound to `params`, `key` is of this microbatch and rank,
            and torch's ambient RNG is seeded with a key derived from it. Returns a `Mean(total, weight)` or a scalar
            (weight 1), and optionally a dict of such metrics.

    Returns:
        `(params, buffers, batch, key) -> Gradients`.

    >>> import torch, purestep as ps
    >>> module = ps.shard(torch.nn.Linear(1, 1, bias=False))
    >>> grad_fn = ps.value_and_grad(module, lambda model, x, key: ps.Mean(model(x).sum(), x.shape[0]))
    >>> out = grad_fn({"weight": torch.ones(1, 1)}, {}, torch.tensor([[1.0], [3.0]]), ps.key(0))
    >>> float(out.loss), out.grads["weight"]
    (2.0, tensor([[2.]]))
    """
    if not isinstance(module, PureModule):
        raise TypeError(f"value_and_grad takes a module made by ps.shard, got {type(module).__name__}")
    return ValueAndGrad(module, loss)


def call_loss(loss: Loss, model: Any, batch: Any, key: Key) -> dict[str, Mean]:
    """The loss (under "") and its metrics as Means."""
    result = loss(model, batch, key)
    value, metrics = result if isinstance(result, tuple) else (result, {})
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"a loss returns a Mean or scalar, or (that, dict of metrics); got {type(metrics).__name__} as metrics"
        )
    for name in metrics:
        if name in _RESERVED:
            raise ValueError(
                f"a loss cannot name a metric {name!r}, which steps report themselves; choose another name"
            )
    return {_LOSS: Mean.of(value), **{name: Mean.of(metric) for name, metric in metrics.items()}}


def ambient(key: Key) -> Key:
    """The key of torch's own RNG while a loss runs: not the one the loss is given, whose numbers it would repeat."""
    return key.fold_in("ambient")


def add_means(sums: Mapping[str, Mean], means: Mapping[str, Mean]) -> dict[str, Mean]:
    """Add Means by name; a name that only one side has is kept."""
    return {**sums, **{name: sums[name] + mean if name in sums else mean for name, mean in means.items()}}


def reduce_means(module: PureModule, means: Mapping[str, Mean]) -> tuple[dict[str, Mean], Callable[[], float]]:
    """Start summing Means over ranks.

    Returns:
        What will be the sums, and a function that waits for them: it gives the loss's weight as a number, and raises if
        the ranks' names differ.
    """
    if module.runtime.world_size == 1:
        weight = means[_LOSS].weight
        if not isinstance(weight, Tensor):
            return dict(means), lambda: weight
        return dict(means), OnHost(weight).read
    parts = {f"{name}/{part}": getattr(mean, part) for name, mean in means.items() for part in ("total", "weight")}
    sums = ScalarSums(module.runtime, parts)
    reduced = {name: Mean(sums.values[f"{name}/total"], sums.values[f"{name}/weight"]) for name in means}
    return reduced, lambda: sums.read()[f"{_LOSS}/weight"]


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Split every tensor of a batch along its leading dim into at most `parts` runs of rows, as even as possible.

    Raises:
        ValueError: the tensors' leading dims differ, or there is no tensor to split.
        TypeError: a leaf is an array, but no tensor.
    """
    flat, structure = pytree.tree_flatten_with_path(batch)
    for path, x in flat:
        if getattr(x, "ndim", 0) and not isinstance(x, Tensor):
            raise TypeError(
                f"batch{pytree.keystr(path)} is a {type(x).__name__}, which is not split into microbatches "
                "with the tensors; make it a tensor (torch.as_tensor)"
            )
    sizes = {pytree.keystr(path) or "batch": x.shape[0] for path, x in flat if isinstance(x, Tensor) and x.ndim}
    if len(set(sizes.values())) != 1:
        found = ", ".join(f"{name}: {size}" for name, size in sizes.items()) or "no tensor with a leading dim"
        raise ValueError(
            f"to be split into {parts} microbatches, the tensors of a batch need one leading dim; got {found}"
        )
    rows = next(iter(sizes.values()))
    parts = max(1, min(parts, rows))
    bounds = [rows * i // parts for i in range(parts + 1)]
    return [
        pytree.tree_unflatten([x[start:end] if isinstance(x, Tensor) and x.ndim else x for _, x in flat], structure)
        for start, end in itertools.pairwise(bounds)
    ]


def _scale(grads: Mapping[str, Tensor], factor: float) -> None:
    """Multiply in place: the gradients are this call's own."""
    local = [local_tensor(grad) for grad in grads.values()]
    if factor == 0.0:
        torch._foreach_zero_(local)
    elif factor != 1.0 and local:
        torch._foreach_mul_(local, factor)


def _detached(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # Sums over microbatches would soon stand still in 16 bits.
    low_precision = value.is_floating_point() and value.itemsize < 4
    return value.detach().float() if low_precision else value.detach()


def with_microbatches(grad_fn: ValueAndGrad, microbatches: int) -> ValueAndGrad:
    """The same gradient, computed over `microbatches` windows."""
    return dataclasses.replace(grad_fn, microbatches=microbatches)
