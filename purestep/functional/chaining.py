"""`chain`: several transforms and an optimizer as one optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from purestep.functional.transforms import GradientTransform, Leaves, Optimizer, Slots, call
from purestep.functional.wrapping import init_ema
from purestep.state.mappings import FrozenDict


class chain(Optimizer):  # noqa: N801 - written and printed as a call
    """Gradient transforms applied in the order they are given, then an optimizer; together an optimizer.

    The names become the first level of `opt_state` and so of the leaf names in checkpoints. A part without state has
    no entry, so adding one (a clip) to a chain changes no names.

    Args:
        parts: name -> transform; the last one is the optimizer. See `purestep.functional.transforms` for the contract.

    Raises:
        ValueError: no parts, a name that cannot be part of a leaf name, an optimizer before the end or none there.
        TypeError: a part without `init` and `update`.

    >>> import torch, purestep as ps
    >>> optimizer = ps.chain(clip=ps.clip_by_global_norm(1.0), adamw=ps.adamw(1e-3))
    >>> params = {"w": torch.ones(2)}
    >>> opt_state = optimizer.init(params)
    >>> {name: list(slots) for name, slots in opt_state.items()}
    {'adamw': ['exp_avg', 'exp_avg_sq', 'step']}
    >>> metrics = {}
    >>> params, opt_state = optimizer.update({"w": torch.ones(2)}, opt_state, params, step=0, metrics=metrics)
    >>> metrics
    {'grad_norm': tensor(1.4142), 'lr': 0.001}
    """

    __slots__ = ("parts",)

    parts: FrozenDict
    """name -> transform, in the order of application."""

    def __init__(self, /, **parts: Any) -> None:
        _check_parts(parts)
        object.__setattr__(self, "parts", FrozenDict(parts))

    @property
    def reports(self) -> tuple[str, ...]:
        """The metrics that the parts report."""
        return tuple(dict.fromkeys(name for part in self.parts.values() for name in getattr(part, "reports", ())))

    def init(self, params: Leaves) -> Slots:
        """The state of each part that keeps any, under the part's name."""
        slots = {name: _init(part)(params) for name, part in self.parts.items()}
        return {name: kept for name, kept in slots.items() if kept}

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
            ValueError: `opt_state` holds the state of a part this chain does not have.
        """
        unknown = [name for name in opt_state if name not in self.parts]
        if unknown:
            raise ValueError(
                f"opt_state has {_listed(unknown)}, but this chain has {_listed(self.parts)}; use the chain the state "
                "was made with, or drop what is no longer wanted with state.replace(opt_state=...)"
            )
        new_state: dict[str, Any] = {}
        values = grads  # gradients through the transforms; parameters after the optimizer
        for name, part in self.parts.items():
            values, slots = call(
                _update(part), values, opt_state.get(name, {}), params, step=step, inplace=inplace, metrics=metrics
            )
            if slots:
                new_state[name] = slots
        return values, new_state

    def init_ema(self, params: Leaves) -> Leaves | None:
        """The averages that the optimizer at the end keeps, if any; see `with_ema`."""
        return init_ema(list(self.parts.values())[-1], params)

    def update_ema(self, ema: Leaves, params: Leaves, *, step: int, inplace: bool = False) -> Leaves:
        """The averages after an update."""
        return list(self.parts.values())[-1].update_ema(ema, params, step=step, inplace=inplace)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a chain cannot be changed; build another one (tried to set {name!r})")

    def __eq__(self, other: object) -> bool:
        return list(self.parts.items()) == list(other.parts.items()) if isinstance(other, chain) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.parts.items()))

    def __repr__(self) -> str:
        return f"chain({', '.join(f'{name}={part!r}' for name, part in self.parts.items())})"


def _init(part: Any) -> Any:
    """The `init` of a part of a chain: built-in optimizers have one that leaves their own name to the chain."""
    return getattr(part, "init_slots", part.init)


def _update(part: Any) -> Any:
    return getattr(part, "update_slots", part.update)


def _check_parts(parts: dict[str, Any]) -> None:
    if not parts:
        raise ValueError("a chain has at least an optimizer: ps.chain(adamw=ps.adamw(1e-3))")
    for name, part in parts.items():
        if not name or "/" in name or "." in name:
            raise ValueError(f"{name!r} cannot name a part of a chain: names must not be empty or hold '/' or '.'")
        if not (callable(getattr(part, "init", None)) and callable(getattr(part, "update", None))):
            raise TypeError(
                f"{name!r}: expected a gradient transform or an optimizer, with methods init(params) and "
                f"update(grads, slots, params, *, step), got {part!r}"
            )
        if isinstance(part, type):
            raise TypeError(f"{name!r}: expected an object, got the class {part.__name__}; call it first")
    *transforms, last = parts
    if _declares(parts[last], GradientTransform):
        raise ValueError(
            f"a chain ends in an optimizer, but {last!r} only transforms gradients; add one after it, e.g. "
            "adamw=ps.adamw(1e-3)"
        )
    for name in transforms:
        if _declares(parts[name], Optimizer):
            raise ValueError(f"{name!r} is an optimizer and must be the last part of the chain, not before {last!r}")


def _declares(part: Any, protocol: type) -> bool:
    """Whether the part's class inherits from `protocol`; both protocols have the same methods, so only this tells."""
    return protocol in type(part).__mro__


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
