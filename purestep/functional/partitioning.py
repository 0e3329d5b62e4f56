"""`partition`: several optimizers, each for the parameters that rules give it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from purestep.functional.param_rules import Groups, labelled, labelled_pairs, param_table
from purestep.functional.transforms import Leaves, Optimizer, Slots, call
from purestep.functional.wrapping import inner_implementations, keeps_ema


@dataclass(frozen=True)
class partition(Optimizer):  # noqa: N801 - written and printed as a call
    """Several optimizers by rules on parameters: each sees its own parameters only.

    The labels become a level of `opt_state`, as a chain's names do: `opt_state/hidden/momentum/...`. A parameter
    belongs to the first part with a rule that takes it; rules are globs on parameter names (`*` stays between two dots,
    `**` does not), class names of the modules that hold them (these need `module`), or functions of a `Param`.

    Reports of the parts come as `lr/<label>`, `grad_norm/<label>`, ...; `lr` is that of the first part.

    Args:
        parts: label -> (rule or rules, optimizer), in the order in which rules are tried.
        module: the model, or what `ps.shard` made of it, for rules about classes.

    Raises:
        TypeError: a part is no such pair, or its optimizer has no `init` and `update`.
        ValueError: a label that cannot be part of a leaf name, a part with `with_ema` (it goes around a partition). At
            `init`: parameters that no rule takes, or a rule that takes none; with their names.

    >>> import torch, purestep as ps
    >>> optimizer = ps.partition({"biases": ("*.bias", ps.sgd(1.0)), "rest": ("**", ps.adamw(0.1))})
    >>> params = {"layer.weight": torch.ones(1, 1), "layer.bias": torch.ones(1)}
    >>> params, opt_state = optimizer.update(dict(params), optimizer.init(params), params, step=0)
    >>> params["layer.bias"], list(opt_state), list(opt_state["rest"]["exp_avg"])
    (tensor([0.]), ['rest'], ['layer.weight'])
    """

    parts: Mapping[str, Any]
    _: KW_ONLY
    module: Any = None
    _groups: Groups = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pairs = labelled_pairs(self.parts, "partition", "optimizer")
        for label, (_, optimizer) in pairs.items():
            _check_optimizer(label, optimizer)
        table, rules = (
            param_table(self.module),
            labelled({label: pair[0] for label, pair in pairs.items()}, "partition"),
        )
        object.__setattr__(self, "module", table)
        object.__setattr__(self, "parts", pairs)
        object.__setattr__(self, "_groups", Groups(rules, table))

    def __hash__(self) -> int:
        return hash((tuple(self.parts), self._groups))

    @property
    def reports(self) -> tuple[str, ...]:
        """The metrics that the parts report."""
        names = [f"{name}/{label}" for label, (_, part) in self.parts.items() for name in getattr(part, "reports", ())]
        return (*(["lr"] if any(name.startswith("lr/") for name in names) else []), *names)

    def describe(self, params: Leaves | None = None) -> str:
        """A table of which rule took each parameter; of `params`, or of the module that was given."""
        return self._groups.describe(params)

    def implementations(self, params: Leaves) -> dict[str, str]:
        """Which of torch's implementations each part runs for its parameters."""
        groups = self._groups.split(params, params)
        found = {label: inner_implementations(part, groups[label]) for label, (_, part) in self.parts.items()}
        return {
            f"{label}/{path}" if path else label: kind for label, kinds in found.items() for path, kind in kinds.items()
        }

    def members(self, params: Leaves) -> dict[str, dict[str, Any]]:
        """The parameters of each part, by label."""
        groups = self._groups.split(params, params)
        return {label: groups[label] for label in self.parts}

    def init(self, params: Leaves) -> Slots:
        """The state of each part that keeps any, under its label."""
        self._groups.check(params, "partition", complete=True)
        groups = self._groups.split(params, params)
        slots = {
            label: getattr(part, "init_slots", part.init)(groups[label]) for label, (_, part) in self.parts.items()
        }
        return {label: kept for label, kept in slots.items() if kept}

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
            ValueError: a gradient of a parameter that no rule takes.
        """
        self._check_known(opt_state)
        by_label, leaves = self._groups.split(grads, params), self._groups.split(params, params)
        if by_label[None]:
            self._groups.check({name: params[name] for name in grads}, "partition", complete=True)
        new_params, new_state = dict(params), dict(opt_state)
        for label, (_, part) in self.parts.items():
            report: dict[str, Any] | None = None if metrics is None else {}
            update = getattr(part, "update_slots", part.update)
            changed, slots = call(
                update,
                by_label[label],
                opt_state.get(label, {}),
                leaves[label],
                step=step,
                inplace=inplace,
                metrics=report,
            )
            new_params.update(changed)
            if slots:
                new_state[label] = slots
            if metrics is not None:
                _merge(metrics, label, report or {})
        return new_params, new_state

    def _check_known(self, opt_state: Slots) -> None:
        unknown = [label for label in opt_state if label not in self.parts]
        if unknown:
            raise ValueError(
                f"opt_state has {', '.join(map(repr, unknown))}, but this partition has "
                f"{', '.join(map(repr, self.parts))}; use the one the state was made with, or "
                "ps.switch_optimizer(state, module, optimizer)"
            )


def _merge(metrics: dict[str, Any], label: str, report: Mapping[str, Any]) -> None:
    for name, value in report.items():
        metrics[f"{name}/{label}"] = value
    if "lr" in report:
        metrics.setdefault("lr", report["lr"])


def _check_optimizer(label: Any, optimizer: Any) -> None:
    if isinstance(optimizer, type) or not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise TypeError(
            f"partition, {label!r}: expected an optimizer, with methods init(params) and update(grads, opt_state, "
            f"params, *, step); got {optimizer!r}"
        )
    if keeps_ema(optimizer):
        raise ValueError(f"partition, {label!r}: with_ema goes around the partition: with_ema(partition(...), decay)")
