"""Muon for the matrices it is told to own, another optimizer for the rest."""
# ruff: noqa: N801 - an optimizer is written and printed as a call: muon(lr=0.02, ...)

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal

from torch import Tensor
from torch.optim._muon import muon as _muon_kernel

from purestep.functional.implementations import implementations
from purestep.functional.shards import filled_like
from purestep.functional.transforms import Leaves, Slots, call_update
from purestep.functional.whole_leaf import WholeLeaf
from purestep.sharding.rules import near, pattern
from purestep.state.names import some


@dataclass(frozen=True)
class muon(WholeLeaf):
    """Momentum, orthogonalized, for the hidden matrices of a model; a companion for everything else.

    The update of a matrix it owns is bit for bit that of `torch.optim.Muon`: Newton-Schulz iterations in bf16 on the
    momentum (kellerjordan.github.io/posts/muon). Sharded matrices are gathered, one at a time, and every rank computes
    the whole update; see `purestep.functional.whole_leaf`.

    Which matrices it owns is said, not guessed: an embedding and an output head are matrices too, but belong to the
    companion, as do vectors, scalars and convolutions. `str(optimizer.routing(params))` is a table of who gets what.

    Slots: momentum_buffer of the matrices it owns, and the companion's own under its name.

    Args:
        lr: learning rate of the matrices, a number or a schedule. Reported as `lr`; the companion's is not reported.
        owns: globs on parameter names. `*` stays within one segment of a name, `**` does not. Of what they match, the
            parameters with two dims are owned.
        companion: the optimizer of all other parameters: `ps.adamw(3e-4)`, a chain, ... Needed if there are any.
        weight_decay: decay rate, relative to the learning rate.
        momentum: decay rate of the momentum.
        nesterov: look ahead along the momentum.
        ns_coefficients: of the Newton-Schulz polynomial.
        eps: the least norm that is divided by.
        ns_steps: number of Newton-Schulz iterations.
        adjust_lr: how the step depends on the shape (A, B): "original" is times `max(1, A / B) ** 0.5`,
            "match_rms_adamw" times `0.2 * max(A, B) ** 0.5`, so that `adamw`'s rates fit (arXiv:2502.16982).

    Raises:
        ValueError: an argument out of range; from `init`, a glob that matches no matrix, or a parameter that nobody
            owns.

    >>> import torch, purestep as ps
    >>> optimizer = ps.muon(0.02, owns=("blocks.**",), companion=ps.adamw(3e-4))
    >>> params = {"embed.weight": torch.ones(4, 2), "blocks.0.w": torch.ones(2, 2), "blocks.0.b": torch.ones(2)}
    >>> print(optimizer.routing(params))
    muon   blocks.0.w    (2, 2)
    adamw  embed.weight  (4, 2)
    adamw  blocks.0.b    (2,)
    >>> slots = optimizer.init(params)["muon"]
    >>> list(slots), list(slots["momentum_buffer"]), list(slots["adamw"]["exp_avg"])
    (['momentum_buffer', 'adamw'], ['blocks.0.w'], ['embed.weight', 'blocks.0.b'])
    """

    _: KW_ONLY
    owns: tuple[str, ...]
    companion: Any = None
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr: Literal["original", "match_rms_adamw"] = "original"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.owns, str):
            raise TypeError(f"muon: owns is a tuple of globs, got {self.owns!r}; write ({self.owns!r},)")
        for name in ("owns", "ns_coefficients"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self.check("owns", bool(self.owns), "at least one glob on parameter names, such as ('blocks.**',)")
        if self.companion is not None and not callable(getattr(self.companion, "init", None)):
            raise TypeError(f"muon: companion must be an optimizer, such as ps.adamw(3e-4), got {self.companion!r}")
        self.check_not_negative("weight_decay", "momentum", "eps")
        self.check("ns_coefficients", len(self.ns_coefficients) == 3, "three numbers")
        self.check("ns_steps", isinstance(self.ns_steps, int) and 0 <= self.ns_steps < 100, "an integer in [0, 100)")
        choices = ("original", "match_rms_adamw")
        self.check("adjust_lr", self.adjust_lr in choices, f"one of {', '.join(choices)}")

    def routing(self, params: Leaves) -> Routing:
        """Which parameters are whose, checked; prints as a table.

        Args:
            params: the trainable parameters by name; meta tensors do.

        Raises:
            ValueError: a glob that matches no matrix, or parameters that nobody owns.
        """
        matrices = [name for name, leaf in params.items() if leaf.ndim == 2]
        for glob in self.owns:
            if not any(pattern(glob).fullmatch(name) for name in matrices):
                matched = [name for name in params if pattern(glob).fullmatch(name)]
                why = f"of what it matches ({some(matched)}) nothing has two dims" if matched else "it matches nothing"
                raise ValueError(f"muon: the rule {glob!r} owns no matrix: {why}{near(glob, params)}")
        owned = tuple(name for name in matrices if _matches(self.owns, name))
        rest = tuple(name for name in params if name not in set(owned))
        if rest and self.companion is None:
            raise ValueError(
                f"muon: nothing updates {some(rest)}, which owns={self.owns!r} does not own (only parameters with two "
                "dims can be); give a companion, such as companion=ps.adamw(3e-4)"
            )
        other = _name(self.companion) if rest else ""
        return Routing(owned, rest, other, tuple((name, tuple(params[name].shape)) for name in (*owned, *rest)))

    def init_slots(self, params: Leaves) -> Slots:
        """`init` without the level of the name."""
        routing = self.routing(params)
        slots = super().init_slots({name: params[name] for name in routing.owned})
        theirs = self.companion.init({name: params[name] for name in routing.rest}) if routing.rest else {}
        if "momentum_buffer" in theirs:
            raise ValueError("muon: no part of the companion can be called 'momentum_buffer'; rename that part")
        return {**slots, **theirs}

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
        self.check_gradients(grads, params)
        ours: dict[str, Tensor] = {}
        theirs: dict[str, Tensor] = {}
        for name, grad in grads.items():
            (ours if params[name].ndim == 2 and _matches(self.owns, name) else theirs)[name] = grad
        momenta = {slot: kept for slot, kept in slots.items() if slot == "momentum_buffer"}
        others = {slot: kept for slot, kept in slots.items() if slot != "momentum_buffer"}
        params, momenta = super().update_slots(ours, momenta, params, step=step, inplace=inplace, metrics=metrics)  # type: ignore[assignment]
        if theirs:
            params, others = call_update(self.companion, theirs, others, params, step=step, inplace=inplace)  # type: ignore[assignment]
        return params, {**momenta, **others}

    def implementations(self, params: Leaves) -> dict[str, str]:
        """Which implementation the companion runs; see `purestep.functional.implementations`."""
        rest = self.routing(params).rest
        return implementations(self.companion, {name: params[name] for name in rest}) if rest else {}

    def without_weight_decay(self) -> muon:
        """The same optimizer without weight decay, in the companion neither."""
        companion = self.companion
        if companion is not None:
            ask = getattr(companion, "without_weight_decay", None)
            companion = ask() if callable(ask) else replace(companion, weight_decay=0.0)
        return replace(self, weight_decay=0.0, companion=companion)

    def slots_of(self, leaf: Tensor) -> Sequence[str]:
        """The names of `first_slots(leaf)`."""
        return ("momentum_buffer",)

    def first_slots(self, leaf: Tensor) -> Mapping[str, Tensor]:
        """The slots of one matrix before its first update."""
        if leaf.is_complex():
            raise ValueError("muon does not support complex parameters; leave them to the companion")
        return {"momentum_buffer": filled_like(leaf, 0.0)}

    def kernel(self, params: list[Tensor], grads: list[Tensor], slots: list[dict[str, Tensor]], lr: float) -> None:
        """Call torch's kernel on whole matrices."""
        _muon_kernel(
            params,
            grads,
            [kept["momentum_buffer"] for kept in slots],
            lr=lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            nesterov=self.nesterov,
            ns_coefficients=self.ns_coefficients,
            eps=self.eps,
            ns_steps=self.ns_steps,
            adjust_lr_fn=self.adjust_lr,
            has_complex=False,
        )


@dataclass(frozen=True)
class Routing:
    """Which parameters `muon` owns, and which its companion gets."""

    owned: tuple[str, ...]
    """Names of the matrices that Muon updates."""
    rest: tuple[str, ...]
    """Names of what the companion updates."""
    companion: str
    """What the companion is called."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """(name, shape) of each, those owned first."""

    def __str__(self) -> str:
        owner = {**dict.fromkeys(self.owned, "muon"), **dict.fromkeys(self.rest, self.companion)}
        width, names = max(map(len, owner.values()), default=0), max(map(len, owner), default=0)
        return "\n".join(f"{owner[name]:{width}}  {name:{names}}  {shape}" for name, shape in self.shapes)


@functools.lru_cache(maxsize=65536)
def _matches(globs: tuple[str, ...], name: str) -> bool:
    return any(pattern(glob).fullmatch(name) for glob in globs)


def _name(optimizer: Any) -> str:
    return getattr(optimizer, "name", type(optimizer).__name__)
