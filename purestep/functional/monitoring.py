"""`monitor_norms`: norms of groups of gradients and parameters, as metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from purestep.functional.param_rules import Groups, labelled, param_table
from purestep.functional.transforms import GradientTransform, Leaves, Slots, global_norm
from purestep.state.mappings import FrozenDict


@dataclass(frozen=True)
class monitor_norms(GradientTransform):  # noqa: N801 - written and printed as a call
    """Report norms by group, and change nothing: the gradients as they come to its place in the chain.

    Reports `grad_norm/<label>` and, if asked, `param_norm/<label>`. Computes nothing when nobody listens.

    Args:
        groups: label -> rule or rules, in the order in which they are tried; what no rule takes is not looked at.
        module: the model, or what `ps.shard` made of it, for rules about classes of modules.
        params: also report the norms of the parameters before the update.
        prefix: in front of the names, for a second monitor in the chain.

    Raises:
        ValueError: at `init`: a rule that takes no parameter.

    >>> import torch, purestep as ps
    >>> monitor, metrics = ps.monitor_norms({"biases": "**.bias", "rest": "**"}), {}
    >>> grads = {"a.bias": torch.tensor([3.0]), "a.weight": torch.tensor([[4.0]])}
    >>> same, _ = monitor.update(grads, monitor.init(grads), grads, step=0, metrics=metrics)
    >>> same is grads, metrics
    (True, {'grad_norm/biases': tensor(3.), 'grad_norm/rest': tensor(4.)})
    """

    groups: Mapping[str, Any]
    _: KW_ONLY
    module: Any = None
    params: bool = False
    prefix: str = ""
    _groups: Groups = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        table, rules = param_table(self.module), labelled(self.groups, "monitor_norms")
        object.__setattr__(self, "module", table)
        object.__setattr__(self, "groups", FrozenDict(rules))
        object.__setattr__(self, "_groups", Groups(rules, table))

    def __hash__(self) -> int:
        return hash((self._groups, self.params, self.prefix))

    @property
    def reports(self) -> tuple[str, ...]:
        """The metrics that `update` writes."""
        kinds = ("grad_norm", "param_norm") if self.params else ("grad_norm",)
        return tuple(f"{self.prefix}{kind}/{label}" for kind in kinds for label in self.groups)

    def init(self, params: Leaves) -> Slots:
        """No state, but the rules are held against the parameters."""
        self._groups.check(params, "monitor_norms")
        return {}

    def update(
        self,
        grads: Leaves,
        slots: Slots,
        params: Leaves,
        *,
        step: int,
        inplace: bool = False,
        metrics: dict[str, Any] | None = None,
    ) -> tuple[Leaves, Slots]:
        """The gradients as they are; see `GradientTransform.update`."""
        if metrics is not None:
            self._report(metrics, "grad_norm", self._groups.split(grads, params))
            if self.params:
                self._report(metrics, "param_norm", self._groups.split(params, params))
        return grads, slots

    def _report(self, metrics: dict[str, Any], kind: str, parts: Mapping[Any, Leaves]) -> None:
        for label in self.groups:
            metrics[f"{self.prefix}{kind}/{label}"] = global_norm(parts[label])
