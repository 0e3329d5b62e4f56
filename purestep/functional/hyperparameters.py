"""Hyperparameters as leaves of the state, to be changed between steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from purestep.functional.transforms import Leaves, Optimizer, Slots
from purestep.functional.wrapping import Update, init_ema, inner_implementations
from purestep.state.mappings import FrozenDict
from purestep.state.names import some
from purestep.state.placement import local_tensor
from purestep.state.train_state import TrainState

_NAME = "hyperparameters"


@dataclass(frozen=True, init=False)
class with_hyperparameters(Optimizer):  # noqa: N801 - written and printed as a call
    """An optimizer whose hyperparameters are values of the state: saved, resumed, and changed between steps.

    The numbers among the arguments become 0-d fp64 leaves, `opt_state/hyperparameters/lr`;
    `ps.set_hyperparameters(state, lr=...)` changes them. At each update they are read on the host and
    `make(**arguments)` is the optimizer; the results are those of that optimizer, bit for bit. The leaves are made on
    the host, where reading waits for nothing.

    Args:
        make: what builds the optimizer: `ps.adamw`, or a function of yours, chains and all.
        arguments: its keyword arguments. Numbers become leaves; anything else (schedules, strings, tuples, booleans) is
            fixed.

    Raises:
        TypeError: `make` does not take these arguments, or makes no optimizer.
        ValueError: none of the arguments is a number, or `make` refuses one.

    >>> import torch, purestep as ps
    >>> optimizer, params = ps.with_hyperparameters(ps.sgd, lr=0.5), {"w": torch.ones(1)}
    >>> opt_state = optimizer.init(params)
    >>> opt_state["hyperparameters"]
    {'lr': tensor(0.5000, dtype=torch.float64)}
    >>> opt_state = {**opt_state, "hyperparameters": {"lr": torch.tensor(0.25)}}
    >>> optimizer.update({"w": torch.ones(1)}, opt_state, params, step=0)[0]["w"]
    tensor([0.7500])
    """

    make: Callable[..., Any]
    arguments: Mapping[str, Any]
    _last: list = field(init=False, repr=False, compare=False)
    """The values of the last update and the optimizer made of them."""

    def __init__(self, make: Callable[..., Any], /, **arguments: Any) -> None:
        object.__setattr__(self, "make", make)
        object.__setattr__(self, "arguments", FrozenDict(arguments))
        object.__setattr__(self, "_last", [None, None])
        if not self._numbers:
            raise ValueError(
                f"with_hyperparameters: none of {some(arguments) or 'no arguments'} is a number; a schedule, for one, "
                "is fixed, and needs no place in the state"
            )
        made = self._first
        if isinstance(made, type) or not all(callable(getattr(made, name, None)) for name in ("init", "update")):
            raise TypeError(f"with_hyperparameters: {make!r} made no optimizer, but {made!r}")

    def __hash__(self) -> int:
        return hash((self.make, tuple(self.arguments.items())))

    @functools.cached_property
    def _first(self) -> Any:
        """The optimizer with the values it starts with."""
        return self.make(**self.arguments)

    @functools.cached_property
    def _numbers(self) -> dict[str, float]:
        return {name: value for name, value in self.arguments.items() if type(value) in (int, float)}

    @property
    def reports(self) -> tuple[str, ...]:
        """The metrics that `update` writes."""
        return tuple(getattr(self._first, "reports", ()))

    def init(self, params: Leaves) -> Slots:
        """The optimizer's state, and the hyperparameters beside it."""
        return self._with_own(self._first.init(params), params)

    def init_slots(self, params: Leaves) -> Slots:
        """`init` as a part of a chain."""
        made = self._first
        return self._with_own(getattr(made, "init_slots", made.init)(params), params)

    def update(
        self,
        grads: Leaves,
        opt_state: Slots,
        params: Leaves,
        *,
        step: int,
        inplace: bool = False,
        metrics: dict[str, Any] | None = None,
    ) -> tuple[Leaves, Slots]:
        """New parameters and state; see `Optimizer.update`.

        Raises:
            ValueError: the state does not hold exactly these hyperparameters.
        """
        return self._update(False, grads, opt_state, params, step=step, inplace=inplace, metrics=metrics)

    def update_slots(
        self,
        grads: Leaves,
        slots: Slots,
        params: Leaves,
        *,
        step: int,
        inplace: bool = False,
        metrics: dict[str, Any] | None = None,
    ) -> tuple[Leaves, Slots]:
        """`update` as a part of a chain."""
        return self._update(True, grads, slots, params, step=step, inplace=inplace, metrics=metrics)

    def implementations(self, params: Leaves) -> dict[str, str]:
        """Which of torch's implementations the optimizer runs."""
        return inner_implementations(self._first, params)

    def init_ema(self, params: Leaves) -> Leaves | None:
        """The averages that the optimizer keeps."""
        return init_ema(self._first, params)

    def update_ema(self, ema: Leaves, params: Leaves, *, step: int, inplace: bool = False) -> Leaves:
        """The averages after an update; their decay is fixed."""
        return self._first.update_ema(ema, params, step=step, inplace=inplace)

    def _update(
        self, as_part: bool, grads: Leaves, opt_state: Slots, params: Leaves, **arguments: Any
    ) -> tuple[Leaves, Slots]:
        own = opt_state.get(_NAME, {})
        if own.keys() != self._numbers.keys():
            raise ValueError(
                f"opt_state has the hyperparameters {some(own) or 'none'}, and the optimizer {some(self._numbers)}; "
                "use the one the state was made with, or ps.switch_optimizer(state, module, optimizer)"
            )
        made = self._made({name: _number(name, leaf) for name, leaf in own.items()})
        rest = {name: slots for name, slots in opt_state.items() if name != _NAME}
        params, new = Update(made, as_part)(grads, rest, params, **arguments)
        return params, {**new, _NAME: own}

    def _with_own(self, slots: Slots, params: Leaves) -> Slots:
        if _NAME in slots:
            raise ValueError("with_hyperparameters around with_hyperparameters: one of them is enough")
        device = "meta" if any(leaf.is_meta for leaf in params.values()) else "cpu"
        values = {
            name: torch.tensor(float(value), dtype=torch.float64, device=device)
            for name, value in self._numbers.items()
        }
        return {**slots, _NAME: values}

    def _made(self, values: Mapping[str, float]) -> Any:
        """The optimizer with these values; the last one is kept, since they seldom change."""
        if self._last[0] != values:
            typed = {name: type(self.arguments[name])(value) for name, value in values.items()}
            self._last[:] = dict(values), self.make(**{**self.arguments, **typed})
        return self._last[1]


def set_hyperparameters(state: TrainState, **values: float) -> TrainState:
    """A state with other hyperparameters; see `with_hyperparameters`.

    Args:
        state: of an optimizer with hyperparameters in it, at any depth of chains and wrappers.
        values: the new ones by name; the others stay.

    Raises:
        ValueError: the state has no hyperparameter of that name, or several optimizers have one.

    >>> import torch, purestep as ps
    >>> module, optimizer = ps.shard(torch.nn.Linear(1, 1)), ps.with_hyperparameters(ps.adamw, lr=0.1, weight_decay=0.0)
    >>> state = ps.set_hyperparameters(ps.init(module, optimizer, ps.key(0)), lr=0.01)
    >>> state.opt_state["hyperparameters"]["lr"].item()
    0.01
    """
    found: list[str] = []
    opt_state = _replaced(state.opt_state, values, found)
    for name in values:
        if found.count(name) != 1:
            places = "no optimizer" if name not in found else f"{found.count(name)} optimizers"
            raise ValueError(
                f"set_hyperparameters: {places} of this state have a hyperparameter {name!r}; the hyperparameters are "
                f"{some(dict.fromkeys(found)) or 'none'}"
            )
    return state.replace(opt_state=opt_state)


def _replaced(tree: Any, values: Mapping[str, float], found: list[str]) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    new = {name: _replaced(child, values, found) for name, child in tree.items() if name != _NAME}
    if isinstance(own := tree.get(_NAME), Mapping):
        found += own
        changed = {
            name: torch.full_like(leaf, float(values[name])) if name in values else leaf for name, leaf in own.items()
        }
        new[_NAME] = changed
    return new


def _number(name: str, leaf: Tensor) -> float:
    local = local_tensor(leaf)
    if local.ndim:
        raise ValueError(f"the hyperparameter {name!r} must be a 0-d tensor, got shape {tuple(local.shape)}")
    return local.item()
