"""`freeze`: parameters that an optimizer leaves alone."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from purestep.functional.param_rules import Groups, Rule, as_rules, param_table
from purestep.functional.transforms import Leaves, Slots, global_norm
from purestep.functional.wrapping import Init, Update, Wrapper
from purestep.state.names import some

_FROZEN = "frozen"


@dataclass(frozen=True)
class freeze(Wrapper):  # noqa: N801 - written and printed as a call
    """An optimizer that leaves some parameters alone: bit for bit as they are, without moments, and out of every norm.

    Their gradients are still computed; `ShardingSpec(freeze=...)` spares that too, and is fixed when a module is
    sharded, whereas this may change from step to step: a state goes from `freeze(optimizer, ...)` to `optimizer` and
    back. What was frozen from the start has no moments then: with `keep_state=True` it has them all the time, unused,
    or `ps.switch_optimizer` makes fresh ones.

    Args:
        optimizer: any, chains too; put freezing around the chain, so that clipping sees what is trained only.
        rules: a rule or several about what is frozen: globs on parameter names, class names of modules (these need
            `module`), or functions of a `Param`.
        module: the model, or what `ps.shard` made of it.
        keep_state: keep optimizer state for frozen parameters too, so that the names in `opt_state` do not depend on
            what is frozen.

    Raises:
        TypeError: something is neither an optimizer, nor a rule, nor a module.
        ValueError: at `init`: a rule takes no parameter, or nothing is left to train.

    >>> import torch, purestep as ps
    >>> optimizer = ps.freeze(ps.adamw(0.1), "body.*")
    >>> params = {"body.weight": torch.ones(1), "head.weight": torch.ones(1)}
    >>> new, opt_state = optimizer.update(dict(params), optimizer.init(params), params, step=0)
    >>> new["body.weight"] is params["body.weight"], list(opt_state["adamw"]["exp_avg"])
    (True, ['head.weight'])
    """

    rules: Any
    _: KW_ONLY
    module: Any = None
    keep_state: bool = False
    _groups: Groups = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        rules: tuple[Rule, ...] = as_rules(self.rules, "freeze")
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "module", param_table(self.module))
        object.__setattr__(self, "_groups", Groups(((_FROZEN, rules),), self.module))

    @property
    def reports(self) -> tuple[str, ...]:
        """The metrics that `update` writes: with `grad_norm`, of what is trained."""
        return tuple(dict.fromkeys((*super().reports, "grad_norm")))

    def describe(self, params: Leaves | None = None) -> str:
        """A table of which parameters are frozen, by which rule; of `params`, or of the module that was given."""
        return self._groups.describe(params, rest="trained")

    def implementations(self, params: Leaves) -> dict[str, str]:
        """Which of torch's implementations runs for what is trained."""
        return super().implementations(self._trained(params, params))

    def init_ema(self, params: Leaves) -> Leaves | None:
        """Averages of what is trained."""
        return super().init_ema(self._trained(params, params))

    def update_ema(self, ema: Leaves, params: Leaves, *, step: int, inplace: bool = False) -> Leaves:
        """The averages after an update."""
        return super().update_ema(ema, self._trained(params, params), step=step, inplace=inplace)

    def wrapped_init(self, init: Init, params: Leaves) -> Slots:
        """The state of what is trained; of everything with `keep_state`."""
        self._groups.check(params, "freeze")
        trained = self._trained(params, params)
        if not trained:
            raise ValueError(f"nothing to train: freeze takes every parameter ({some(params)})")
        return init(params if self.keep_state else trained)

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
        """The update of what is trained."""
        grads = self._trained(grads, params)
        if metrics is not None and "grad_norm" not in super().reports:
            metrics.setdefault("grad_norm", global_norm(grads))
        new, opt_state = update(
            grads, opt_state, self._trained(params, params), step=step, inplace=inplace, metrics=metrics
        )
        return {**params, **new}, opt_state

    def _trained(self, leaves: Leaves, like: Leaves) -> dict[str, Any]:
        return self._groups.split(leaves, like)[None]
