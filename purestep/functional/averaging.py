"""`with_ema`: an exponential moving average of the parameters, in the state's field `ema`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from purestep.functional.chaining import chain
from purestep.functional.partitioning import partition
from purestep.functional.schedules import Schedule, value_at
from purestep.functional.shards import copies_of, local_tensors
from purestep.functional.transforms import Leaves, Slots
from purestep.functional.wrapping import Wrapper, keeps_ema
from purestep.state.names import some
from purestep.state.train_state import TrainState, clone_leaf


@dataclass(frozen=True)
class with_ema(Wrapper):  # noqa: N801 - written and printed as a call
    """An optimizer that also averages the parameters: `ema = d * ema + (1 - d) * params` after every update.

    The averages are `TrainState.ema`: of what is trained, fp32 (or wider), placed as the parameters. `ps.init` makes
    them, `train_step` updates them, in place when it donates, and not when it updates nothing. `ps.eval_params(state)`
    gives the parameters to evaluate with. In a step of your own, call `optimizer.update_ema` after `optimizer.update`.

    Args:
        optimizer: any, chains too; may be the last part of a chain.
        decay: d, from 0 to below 1; a number, or a schedule of the step.
        warmup: if positive, d is at most `(1 + step) / (warmup + step)`: early averages then reach less far back, past
            the initial values. 10 is usual.

    Raises:
        TypeError: something is no optimizer.
        ValueError: `decay` or `warmup` out of range.

    >>> import torch, purestep as ps
    >>> module, optimizer = ps.shard(torch.nn.Linear(1, 1, bias=False)), ps.with_ema(ps.sgd(1.0), decay=0.5)
    >>> step = ps.train_step(module, lambda model, x, key: ps.Mean(model(x).sum(), len(x)), optimizer)
    >>> state = ps.init(module, optimizer, ps.key(0), params={"weight": torch.ones(1, 1)})
    >>> state, _ = step(state, torch.tensor([[1.0]]))
    >>> state.params["weight"], state.ema["weight"]
    (tensor([[0.]]), tensor([[0.5000]]))
    """

    decay: float | Schedule
    _: KW_ONLY
    warmup: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.decay) and not (isinstance(self.decay, int | float) and 0 <= self.decay < 1):
            raise ValueError(f"with_ema: decay must be a number in [0, 1), or a schedule, got {self.decay!r}")
        if isinstance(self.warmup, bool) or not isinstance(self.warmup, int | float) or not self.warmup >= 0:
            raise ValueError(f"with_ema: warmup must be a number of at least 0, got {self.warmup!r}")
        if keeps_ema(self.optimizer):
            raise ValueError("with_ema around with_ema: a state has one set of averages")

    def decay_at(self, step: int) -> float:
        """The factor d of the update that follows `step` others."""
        decay = value_at(self.decay, step)
        return min(decay, (1 + step) / (self.warmup + step)) if self.warmup else decay

    def init_ema(self, params: Leaves) -> Leaves:
        """The averages before the first update: copies of `params` in fp32 or wider."""
        return {name: _wide_copy(leaf) for name, leaf in params.items()}

    def update_ema(self, ema: Leaves, params: Leaves, *, step: int, inplace: bool = False) -> Leaves:
        """The averages after an update.

        Args:
            ema: from `init_ema`, or before the update.
            params: after the update; those without an average may be among them.
            step: number of updates before it.
            inplace: whether the storage of `ema` may be overwritten.

        Raises:
            ValueError: an average of a parameter that does not exist.
        """
        missing = [name for name in ema if name not in params]
        if missing:
            raise ValueError(f"averages of unknown parameters {some(missing)}; the parameters are {some(params)}")
        names = list(ema)
        averages = list(ema.values()) if inplace else copies_of(ema.values())
        if not names:
            return ema
        with torch.no_grad():
            ours = local_tensors(averages)
            theirs = local_tensors([params[name] for name in names])
            same = [leaf.to(average.dtype) for leaf, average in zip(theirs, ours, strict=True)]
            torch._foreach_lerp_(ours, same, 1.0 - self.decay_at(step))
        return dict(zip(names, averages, strict=True))


def eval_params(state: TrainState, optimizer: Any = None) -> dict[str, Tensor]:
    """The parameters to evaluate with: their averages, and the parameters themselves where there is none.

    In the dtypes of the parameters; what needs no cast shares memory with the state. To evaluate a state with them:
    `evaluate(state.replace(params=ps.eval_params(state), ema=None), batch)`; without `ema=None` the new state would
    hold the averages twice, which is refused.

    Args:
        state: with averages (see `with_ema`), or of an optimizer that evaluates elsewhere than it trains.
        optimizer: the one of the run; needed if it is, or holds, one of the latter kind (a schedule-free one), which
            knows from its own state where to evaluate.

    Raises:
        ValueError: the state has no averages, and the optimizer does not know of other parameters to evaluate with.

    >>> import torch, purestep as ps
    >>> params, ema = {"w": torch.ones(1), "frozen": torch.ones(1)}, {"w": torch.zeros(1)}
    >>> state = ps.TrainState(step=0, params=params, buffers={}, opt_state={}, key=ps.key(0), ema=ema)
    >>> ps.eval_params(state)
    {'w': tensor([0.]), 'frozen': tensor([1.])}
    """
    moved = _moved(optimizer, state.params, state.opt_state, as_part=False)
    if state.ema is None and moved is None:
        raise ValueError(
            "this state has no averaged parameters: they come from ps.with_ema(optimizer, decay); without "
            "them evaluate with state.params"
        )
    params, ema = state.params if moved is None else {**state.params, **moved}, state.ema or {}
    return {name: ema[name].to(leaf.dtype) if name in ema else leaf for name, leaf in params.items()}


def _moved(optimizer: Any, params: Leaves, slots: Slots, *, as_part: bool) -> Leaves | None:
    """Where an optimizer that evaluates elsewhere than it trains wants its parameters; None of another optimizer."""
    if isinstance(optimizer, chain):
        name, last = list(optimizer.parts.items())[-1]
        return _moved(last, params, slots.get(name, {}), as_part=True)
    if isinstance(optimizer, Wrapper):
        return _moved(optimizer.optimizer, params, slots, as_part=as_part)
    if isinstance(optimizer, partition):
        groups = optimizer.members(params)
        parts = [
            _moved(part, groups[label], slots.get(label, {}), as_part=True) or {}
            for label, (_, part) in optimizer.parts.items()
        ]
        return {name: leaf for part in parts for name, leaf in part.items()} or None
    method = getattr(optimizer, "eval_params", None)
    if method is None or not callable(getattr(getattr(optimizer, "cls", None), "eval", None)):
        return None
    return method(params, slots if as_part else slots.get(optimizer.name, {}))


def _wide_copy(leaf: Tensor) -> Tensor:
    dtype = torch.promote_types(leaf.dtype, torch.float32)
    return clone_leaf(leaf) if leaf.dtype == dtype else leaf.detach().to(dtype)


def updated_ema(optimizer: Any, ema: Leaves | None, params: Leaves, *, step: int, inplace: bool) -> Leaves | None:
    """The averages of a state after an update; as they are if the optimizer keeps none.

    Raises:
        ValueError: the optimizer averages, but the state has nothing to average into.
    """
    if not keeps_ema(optimizer):
        return ema
    if ema is None:
        raise ValueError(
            "the optimizer averages the parameters, and this state has no averages: make it with ps.init(module, "
            "optimizer, key), or give it some with ps.switch_optimizer(state, module, optimizer)"
        )
    return optimizer.update_ema(ema, params, step=step, inplace=inplace)
