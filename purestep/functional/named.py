"""What the optimizers that come with purestep have in common: a learning rate, a name, checks of their arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from purestep.functional.schedules import Schedule
from purestep.functional.shards import geometry, match
from purestep.functional.transforms import Leaves, Optimizer, Slots
from purestep.state.names import some


@dataclass(frozen=True)
class NamedOptimizer(Optimizer):
    """An optimizer with a learning rate, which can stand alone or in a chain.

    `init` and `update` are the optimizer on its own: its state sits under its name, `{"adamw": {"exp_avg": {...}}}`.
    `init_slots` and `update_slots` are the same without that level; a chain calls these and puts its own name there.
    """

    reports: ClassVar[tuple[str, ...]] = ("lr",)

    lr: float | Schedule

    def __post_init__(self) -> None:
        if not callable(self.lr):
            self.check("lr", not_negative(self.lr), "a finite number of at least 0, or a schedule")

    @property
    def name(self) -> str:
        """What it is called in `opt_state` and in messages."""
        return type(self).__name__

    def init(self, params: Leaves) -> Slots:
        """The state before the first update, under this optimizer's name; see `GradientTransform.init`."""
        slots = self.init_slots(params)
        return {self.name: slots} if slots else {}

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
        """New parameters and state; see `Optimizer.update`. Reports `lr`.

        Raises:
            ValueError: a gradient without a parameter, or unlike it in shape, dtype, device or placement; a parameter
                without state; an implementation that does not support a parameter.
        """
        slots = opt_state.get(self.name, {})
        params, slots = self.update_slots(grads, slots, params, step=step, inplace=inplace, metrics=metrics)
        return params, {self.name: slots} if slots else {}

    def init_slots(self, params: Leaves) -> Slots:
        """`init` without the level of the name."""
        raise NotImplementedError

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
        """`update` without the level of the name."""
        raise NotImplementedError

    def check(self, name: str, ok: bool, expected: str) -> None:
        """Raise a `ValueError` about the argument `name` unless `ok`."""
        if not ok:
            raise ValueError(f"{self.name}: {name} must be {expected}, got {getattr(self, name)!r}")

    def check_not_negative(self, *names: str) -> None:
        """Raise a `ValueError` unless each of these arguments is a finite number of at least 0."""
        for name in names:
            self.check(name, not_negative(getattr(self, name)), "a finite number of at least 0")

    def check_gradients(self, grads: Leaves, params: Leaves) -> None:
        """Raise unless every gradient has a parameter like it."""
        if not grads.keys() <= params.keys():
            unknown = [name for name in grads if name not in params]
            raise ValueError(f"gradients for unknown parameters {some(unknown)}; the parameters are {some(params)}")
        theirs, ours = list(grads.values()), [params[name] for name in grads]
        if not match(theirs, ours):
            for name, grad, leaf in zip(grads, theirs, ours, strict=True):
                if geometry(grad) != geometry(leaf):
                    raise ValueError(
                        f"the gradient of {name!r} must be like its parameter: expected {_described(leaf)}; "
                        f"got {_described(grad)}"
                    )

    def check_slot(self, slot: str, slots: Slots, names: Leaves | Sequence[str]) -> None:
        """Raise unless the slot has an entry for each name."""
        kept = slots.get(slot, {})
        missing = [name for name in names if name not in kept]
        if missing:
            raise ValueError(
                f"{self.name} has no {slot!r} for {some(missing)}: the state was made without "
                "these parameters, or for another optimizer; opt_state must come from this optimizer's init, "
                "given every parameter that gets a gradient"
            )


def not_negative(value: Any) -> bool:
    """Whether `value` is a finite number of at least 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _described(leaf: Tensor) -> str:
    shape, dtype, device, placements = geometry(leaf)
    where = f", placed as {placements}" if placements is not None else ""
    return f"shape {tuple(shape)}, {dtype} on {device}{where}"
