"""Steps: a state and a batch in, a state and metrics out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from purestep.functional.accumulation import accumulate as accumulate_gradients
from purestep.functional.averaging import updated_ema
from purestep.functional.gradients import Loss, ambient, call_loss, reduce_means, value_and_grad
from purestep.functional.means import Mean
from purestep.functional.transforms import call_update, global_norm
from purestep.sharding.loss_scale import NAME as LOSS_SCALE
from purestep.sharding.loss_scale import next_loss_scale
from purestep.sharding.pure_module import PureModule
from purestep.state.train_state import TrainState, hand_over, make_state

Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]


def train_step(module: PureModule, loss: Loss, optimizer: Any, *, accumulate: int = 1, donate: bool = False) -> Step:
    """One optimizer update as a pure function `(state, batch) -> (state, metrics)`.

    Random numbers come from `state.key.fold_in(state.step)`. A batch of weight zero leaves parameters, optimizer and
    buffers as they are. So does, in fp16, one whose gradients are not finite; `state.extra["loss_scale"]` then halves.

    Args:
        module: from `ps.shard`.
        loss: see `value_and_grad`.
        optimizer: from `chain`, `adamw`, ...; anything with `init` and `update`.
        accumulate: microbatches the rank's batch is computed in.
        donate: write into the old state's storage; the old state is then consumed, and using it raises
            `ConsumedStateError`.

    Returns:
        The step. Its batch is this rank's slice of the global batch; its metrics are plain 0-d values, equal on every
        rank: `loss`, `weight` (tokens, say, over all ranks), `grad_norm` (before clipping), `lr`, and the loss's own;
        in fp16 also `skipped` (1 if nothing was updated) and `loss_scale` (the one this step used).
        Where there are several processes the step is collective.

    >>> import torch, purestep as ps
    >>> module = ps.shard(torch.nn.Linear(1, 1, bias=False))
    >>> optimizer = ps.sgd(0.1)
    >>> step = ps.train_step(module, lambda model, x, key: ps.Mean(model(x).sum(), len(x)), optimizer)
    >>> state = ps.init(module, optimizer, ps.key(0)).replace(params={"weight": torch.ones(1, 1)})
    >>> new, metrics = step(state, torch.tensor([[1.0], [3.0]]))
    >>> new.step, round(new.params["weight"].item(), 6), float(metrics["grad_norm"])
    (1, 0.8, 2.0)
    """
    grad_fn = value_and_grad(module, loss)
    if accumulate != 1:
        grad_fn = accumulate_gradients(grad_fn, accumulate)  # type: ignore[assignment]
    reports_norm = "grad_norm" in getattr(optimizer, "reports", ())

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        scaling = _scaling(module, state)
        out = grad_fn(state.params, state.buffers, batch, state.key.fold_in(state.step), **scaling)
        params, opt_state, buffers, extra = state.params, state.opt_state, out.buffers, state.extra
        ema = state.ema
        report: dict[str, Any] = {}
        if out.is_empty:
            report["grad_norm"], buffers = 0.0, state.buffers
        elif not out.is_finite:
            report["grad_norm"], buffers = global_norm(out.grads), state.buffers
        else:
            if not reports_norm:
                report["grad_norm"] = global_norm(out.grads)
            params, opt_state = call_update(
                optimizer, out.grads, opt_state, params, step=state.step, inplace=donate, metrics=report
            )
            if report.get("skipped"):
                buffers = state.buffers
            else:
                ema = updated_ema(optimizer, ema, params, step=state.step, inplace=donate)
        if scaling:
            report.setdefault("skipped", float(not out.is_finite))  # unless the optimizer has a guard of its own
            report["loss_scale"] = scaling["scale"]
            if not out.is_empty:
                config = module.runtime.config.loss_scale
                adjusted = next_loss_scale(extra[LOSS_SCALE], is_finite=out.is_finite, config=config)
                extra = {**extra, LOSS_SCALE: adjusted}
        new = make_state(
            step=state.step + 1,
            params=params,
            buffers=buffers,
            opt_state=opt_state,
            key=state.key,
            ema=ema,
            extra=extra,
        )
        metrics = {"loss": out.loss.value, "weight": out.loss.weight, **_values(out.metrics), **report}
        return hand_over(state, new, f"train_step, step {state.step}") if donate else new, metrics

    return step


def eval_step(module: PureModule, loss: Loss) -> Callable[[TrainState, Any], dict[str, Mean]]:
    """A loss and its metrics without gradients, in eval mode, as a pure function `(state, batch) -> {name: Mean}`.

    The Means are sums over ranks already; add them over batches for the mean over a data set. The loss is under "loss".

    Args:
        module: from `ps.shard`.
        loss: see `value_and_grad`.

    >>> import torch, purestep as ps
    >>> module = ps.shard(torch.nn.Linear(1, 1, bias=False))
    >>> evaluate = ps.eval_step(module, lambda model, x, key: ps.Mean(model(x).sum(), len(x)))
    >>> state = ps.init(module, ps.sgd(0.1), ps.key(0)).replace(params={"weight": torch.ones(1, 1)})
    >>> batches = [torch.tensor([[1.0], [3.0]]), torch.tensor([[8.0]])]
    >>> float(sum(evaluate(state, x)["loss"] for x in batches))
    4.0
    """

    def step(state: TrainState, batch: Any) -> dict[str, Mean]:
        runtime = module.runtime
        key = state.key.fold_in(state.step, "eval", runtime.dp_rank)
        scope = ambient(key).scope(runtime.device)
        with module.evaluation(state.params, state.buffers) as session, scope, runtime.autocast():
            means = call_loss(loss, session.model, batch, key)
        sums, wait = reduce_means(module, means)
        wait()
        return {name or "loss": mean for name, mean in sums.items()}

    return step


def _values(metrics: Any) -> dict[str, Tensor | float]:
    return {name: mean.value for name, mean in metrics.items()}


def _scaling(module: PureModule, state: TrainState) -> dict[str, Any]:
    """The loss scale of a step, as arguments for its gradient function; none unless it computes in fp16."""
    if module.runtime.config.mixed_precision != "fp16":
        return {}
    if LOSS_SCALE not in state.extra:
        raise ValueError(
            'fp16 needs a loss scale, and this state has no extra["loss_scale"]: ps.init(module, ...) puts it there; '
            "into a state made otherwise put it with "
            'state.replace(extra={**state.extra, "loss_scale": ps.initial_loss_scale()})'
        )
    return {"scale": state.extra[LOSS_SCALE]["scale"]}
