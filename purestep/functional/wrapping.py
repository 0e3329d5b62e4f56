"""What optimizers around another optimizer have in common: names in the state, and what is passed on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from purestep.functional.transforms import Leaves, Optimizer, Slots, call

Init = Callable[[Leaves], Slots]


@dataclass(frozen=True)
class Update:
    """The update of an inner optimizer: called with every argument of `Optimizer.update`."""

    optimizer: Any
    as_part: bool
    """Whether it is a part of a chain, which has a name for it already."""

    def __call__(self, grads: Leaves, opt_state: Slots, params: Leaves, **arguments: Any) -> tuple[Leaves, Slots]:
        """New parameters and state."""
        optimizer = self.optimizer
        update = getattr(optimizer, "update_slots", optimizer.update) if self.as_part else optimizer.update
        return call(update, grads, opt_state, params, **arguments)

    def of(self, optimizer: Any) -> Update:
        """The same of another optimizer."""
        return Update(optimizer, self.as_part)


@dataclass(frozen=True)
class Wrapper(Optimizer):
    """An optimizer around another one.

    The leaves of the inner optimizer keep their names, so that wrapping changes none of them. What a wrapper keeps
    itself is beside them, under the wrapper's name: `opt_state/adamw/...`, `opt_state/skip_nonfinite/in_a_row`; as a
    part of a chain, `opt_state/main/exp_avg/...`, `opt_state/main/skip_nonfinite/in_a_row`.
    """

    optimizer: Any

    def __post_init__(self) -> None:
        name = type(self).__name__
        if isinstance(self.optimizer, type) or not all(
            callable(getattr(self.optimizer, method, None)) for method in ("init", "update")
        ):
            raise TypeError(
                f"{name} goes around an optimizer, with methods init(params) and update(grads, opt_state, params, *, "
                f"step); got {self.optimizer!r}"
            )

    @property
    def reports(self) -> tuple[str, ...]:
        """The metrics that `update` writes."""
        return tuple(getattr(self.optimizer, "reports", ()))

    def init(self, params: Leaves) -> Slots:
        """The state before the first update; see `Optimizer.init`."""
        return self.wrapped_init(self.optimizer.init, params)

    def init_slots(self, params: Leaves) -> Slots:
        """`init` as a part of a chain, which gives the inner optimizer its name."""
        return self.wrapped_init(getattr(self.optimizer, "init_slots", self.optimizer.init), params)

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
        """New parameters and state; see `Optimizer.update`."""
        inner = Update(self.optimizer, as_part=False)
        return self.wrapped_update(inner, grads, opt_state, params, step=step, inplace=inplace, metrics=metrics)

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
        inner = Update(self.optimizer, as_part=True)
        return self.wrapped_update(inner, grads, slots, params, step=step, inplace=inplace, metrics=metrics)

    def implementations(self, params: Leaves) -> dict[str, str]:
        """Which of torch's implementations the inner optimizer runs; see `purestep.functional.implementations`."""
        return inner_implementations(self.optimizer, params)

    def init_ema(self, params: Leaves) -> Leaves | None:
        """The averaged parameters before the first update, or None if the inner optimizer keeps none."""
        return init_ema(self.optimizer, params)

    def update_ema(self, ema: Leaves, params: Leaves, *, step: int, inplace: bool = False) -> Leaves:
        """The averages after an update that gave `params`."""
        return self.optimizer.update_ema(ema, params, step=step, inplace=inplace)

    def wrapped_init(self, init: Init, params: Leaves) -> Slots:
        """The state, given the inner optimizer's `init`."""
        return init(params)

    def wrapped_update(
        self,
        update: Update,
        grads: Leaves,
        opt_state: Slots,
        params: Leaves,
        *,
        step: int,
        inplace: bool,
        metrics: dict[str, Any] | None,
    ) -> tuple[Leaves, Slots]:
        """The update, given the inner optimizer's, which takes every argument of `Optimizer.update`."""
        return update(grads, opt_state, params, step=step, inplace=inplace, metrics=metrics)

    def with_own(self, opt_state: Slots, own: Mapping[str, Any], name: str | None = None) -> Slots:
        """The inner optimizer's state, and this wrapper's beside it."""
        name = name or type(self).__name__
        if name in opt_state:
            raise ValueError(f"{name} around {name}: their states would have one name; one of them is enough")
        return {**opt_state, name: own}

    def own(self, opt_state: Slots, name: str | None = None) -> tuple[Slots, Slots]:
        """(the inner optimizer's state, this wrapper's).

        Raises:
            ValueError: there is no state of this wrapper.
        """
        name = name or type(self).__name__
        if name not in opt_state:
            raise ValueError(
                f"{name} has no state in opt_state, which has {', '.join(map(repr, opt_state)) or 'nothing'}: it was "
                "made by another optimizer; ps.switch_optimizer(state, module, optimizer) gives it what is missing"
            )
        return {key: slots for key, slots in opt_state.items() if key != name}, opt_state[name]


def inner_implementations(optimizer: Any, params: Leaves) -> dict[str, str]:
    """What an optimizer inside another says about its implementation; "" is the optimizer itself."""
    from purestep.functional.implementations import part_of  # which needs chains, and chains need this module

    return {path.removeprefix("/"): kind for path, kind in part_of("", optimizer, params)}


def init_ema(optimizer: Any, params: Leaves) -> Leaves | None:
    """The averages that an optimizer keeps of `params`; None if it keeps none."""
    method = getattr(optimizer, "init_ema", None)
    return None if method is None else method(params)


def keeps_ema(optimizer: Any) -> bool:
    """Whether an optimizer averages the parameters."""
    return init_ema(optimizer, {}) is not None
