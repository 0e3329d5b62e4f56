"""`switch_optimizer`: a state goes on under another optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from purestep.functional.wrapping import init_ema
from purestep.sharding.pure_module import PureModule
from purestep.state.placement import is_dtensor
from purestep.state.train_state import TrainState


def switch_optimizer(state: TrainState, module: PureModule, optimizer: Any) -> TrainState:
    """The state, for a run that goes on with another optimizer: an unfrozen layer, a new wrapper, another chain.

    What both optimizers keep under one name, in one shape and dtype, goes on; what is new starts as `ps.init` would
    start it, bias corrections and averages included; what the new one does not keep is dropped.

    Args:
        state: before; it stays valid, and its leaves are shared.
        module: from `ps.shard`.
        optimizer: the one to go on with.

    >>> import torch, purestep as ps
    >>> module = ps.shard(torch.nn.Linear(1, 1))
    >>> state = ps.init(module, ps.freeze(ps.adamw(0.1), "bias"), ps.key(0))
    >>> list(ps.switch_optimizer(state, module, ps.adamw(0.1)).opt_state["adamw"]["exp_avg"])
    ['weight', 'bias']
    """
    trained = {name: state.params[name] for name in module.trainable}
    ema = init_ema(optimizer, trained)
    return state.replace(
        opt_state=_kept(optimizer.init(trained), state.opt_state),
        ema=None if ema is None else _kept(ema, state.ema or {}),
    )


def _kept(fresh: Any, old: Any) -> Any:
    """`fresh`, with the leaves of `old` wherever they fit."""
    if isinstance(fresh, Mapping):
        return {
            name: _kept(value, old[name]) if isinstance(old, Mapping) and name in old else value
            for name, value in fresh.items()
        }
    return old if not isinstance(old, Mapping) and _fits(old, fresh) else fresh


def _fits(old: Any, fresh: Any) -> bool:
    placed = (getattr(leaf, "placements", None) if is_dtensor(leaf) else None for leaf in (old, fresh))
    return (old.shape, old.dtype, old.device.type, next(placed)) == (
        fresh.shape,
        fresh.dtype,
        fresh.device.type,
        next(placed),
    )
