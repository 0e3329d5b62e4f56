"""Weight decay for some parameters only."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from purestep.functional.param_rules import Groups, Param, Rule, as_rules, param_table, rule_name, takes
from purestep.functional.transforms import Leaves, Slots
from purestep.functional.wrapping import Update, Wrapper
from purestep.state.names import some

_A_NORM = re.compile(r"norm(\d*d?)$", re.IGNORECASE)


def fewer_than_two_dims(param: Param) -> bool:
    """Scalars and vectors: biases, gains, learned temperatures."""
    return param.ndim < 2


def of_a_norm(param: Param) -> bool:
    """Held by a module whose class, or one it inherits from, is named ...Norm, ...Norm2d or the like."""
    return any(_A_NORM.search(name) for name in param.classes)


def of_an_embedding(param: Param) -> bool:
    """Held by a module whose class has "embedding" in its name, or an attribute named like `pos_embed`, `embedding`.

    A weight tied between an embedding and a head counts as one of an embedding.
    """
    attributes = [part for name in param.names or (param.name,) for part in _own_name(name)]
    return any("embedding" in name.lower() for name in param.classes) or any("embed" in part for part in attributes)


def _own_name(name: str) -> list[str]:
    """The attribute that a parameter is; with it the list it is in, if it is there under a number."""
    *path, attribute = name.lower().split(".")
    return [attribute, *(path[-1:] if attribute.isdigit() else [])]


NO_DECAY: tuple[Rule, ...] = (fewer_than_two_dims, of_a_norm, of_an_embedding)
"""What `decay_mask` spares by default."""


@dataclass(frozen=True)
class decay_mask(Wrapper):  # noqa: N801 - written and printed as a call
    """An optimizer whose weight decay spares some parameters: by default those of fewer than 2 dims, norms, embeddings.

    The same numbers, bit for bit, as torch's optimizer gives with two param groups; the same state, and names in it, as
    the optimizer alone. `print(optimizer.describe())` shows what each rule took.

    Args:
        optimizer: one with a `weight_decay`.
        module: the model, or what `ps.shard` made of it: which classes hold its parameters.
        no_decay: rules about what is spared; default `NO_DECAY`. Add to them with `(*ps.NO_DECAY, "head.*")`.
        decay: rules about what decays nevertheless; they come first.

    Raises:
        TypeError: the optimizer has no weight decay that could be taken away.
        ValueError: a rule of yours takes no parameter.

    >>> import torch, purestep as ps
    >>> model = torch.nn.Sequential(torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    >>> print(ps.decay_mask(ps.adamw(1e-3), model).describe())
    parameter  shape  held by    group     rule
    0.weight   3x2    Embedding  no decay  of an embedding
    1.weight   3x2    Linear     decay     -
    1.bias     3      Linear     no decay  fewer than two dims
    2.weight   3      LayerNorm  no decay  fewer than two dims
    2.bias     3      LayerNorm  no decay  fewer than two dims
    """

    module: Any
    _: KW_ONLY
    no_decay: tuple[Rule, ...] = NO_DECAY
    decay: tuple[Rule, ...] = ()
    _groups: Groups = field(init=False, repr=False, compare=False)
    _spared: Any = field(init=False, repr=False, compare=False)
    """The optimizer without weight decay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        table = param_table(self.module)
        if table is None:
            raise TypeError("decay_mask needs the model, to know what holds each parameter; got None")
        for name in ("no_decay", "decay"):
            rules = getattr(self, name)
            object.__setattr__(self, name, as_rules(rules, f"decay_mask, {name}") if rules else ())
        dead = [
            rule_name(rule)
            for rule in (*self.decay, *self.no_decay)
            if rule not in NO_DECAY and not any(takes(rule, param) for param in table.params)
        ]
        if dead:
            raise ValueError(
                f"decay_mask: no parameter is taken by the rule {', '.join(dead)}; the parameters are "
                f"{some(param.name for param in table.params)}"
            )
        object.__setattr__(self, "module", table)
        object.__setattr__(self, "_groups", Groups((("decay", self.decay), ("no decay", self.no_decay)), table))
        object.__setattr__(self, "_spared", without_weight_decay(self.optimizer))

    def describe(self) -> str:
        """A table of the module's parameters: which decay, and which rule says so."""
        return self._groups.describe(rest="decay")

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
        """The update of what decays, then that of what does not: neither touches what it has no gradient for."""
        groups = self._groups.split(grads, params)
        decaying = {name: grad for name, grad in grads.items() if name not in groups["no decay"]}
        params, opt_state = update(decaying, opt_state, params, step=step, inplace=inplace, metrics=metrics)
        if not groups["no decay"]:
            return params, opt_state
        spared = update.of(self._spared)
        return spared(groups["no decay"], opt_state, params, step=step, inplace=inplace, metrics=metrics)


def without_weight_decay(optimizer: Any) -> Any:
    """The same optimizer with `weight_decay=0`: by its method of this name, else by its field.

    Raises:
        TypeError: it has neither.
    """
    method = getattr(optimizer, "without_weight_decay", None)
    if method is not None:
        return method()
    fields = dataclasses.fields(optimizer) if dataclasses.is_dataclass(optimizer) else ()
    if not any(one.name == "weight_decay" for one in fields):
        raise TypeError(
            f"decay_mask takes weight decay away from an optimizer, and {type(optimizer).__name__} has none; put it "
            "around the optimizer itself, inside chains and other wrappers: ps.chain(..., adamw=ps.decay_mask(ps.adamw("
            "lr), model))"
        )
    return dataclasses.replace(optimizer, weight_decay=0.0)
