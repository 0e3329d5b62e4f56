"""Rules about parameters: globs on their names, classes of the modules that hold them, or functions of both.

What partitions, decay masks, freezing, clipping and monitors by group have in common: an ordered table of rules, of
which the first that takes a parameter decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from purestep.sharding.leaves import Leaf, leaves_of
from purestep.sharding.pure_module import PureModule
from purestep.sharding.rules import near, pattern
from purestep.state.mappings import FrozenDict
from purestep.state.names import some

_NO_CLASS = {"Module", "object", "Generic", "FSDPModule"}  # what every module is says nothing


@dataclass(frozen=True)
class Param:
    """What a rule sees of a parameter."""

    name: str
    """Its name in the state."""
    shape: tuple[int, ...]
    """Of the whole parameter, not of a shard."""
    names: tuple[str, ...] = ()
    """All its names, if it is tied; else just `name`."""
    classes: tuple[str, ...] = ()
    """Class names of the modules that hold it, own and inherited, nearest first; empty where no module was given. The
    module around a ParameterList or ParameterDict counts as holding what is in it."""

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)


Rule = str | Callable[[Param], bool]
"""A glob on parameter names (`*` stays between two dots, `**` does not), the name of a class of modules (own or
inherited), or a function `Param -> bool`."""


@dataclass(frozen=True)
class ParamTable:
    """The parameters of a module, and what holds them."""

    params: tuple[Param, ...]

    def __repr__(self) -> str:
        return f"<{len(self.params)} parameters>"


def param_table(module: Any) -> ParamTable | None:
    """The parameters of an `nn.Module` or `PureModule`; None for None.

    Raises:
        TypeError: it is something else.
    """
    if module is None or isinstance(module, ParamTable):
        return module
    if isinstance(module, PureModule):
        root, leaves = module.module, module.leaves.params
    elif isinstance(module, nn.Module):
        root, leaves = module, leaves_of(module).params
    else:
        raise TypeError(f"rules about parameters take an nn.Module or what ps.shard made of it, got {module!r}")
    return ParamTable(tuple(_param_of(root, leaf) for leaf in leaves.values()))


def as_rules(rules: Any, where: str) -> tuple[Rule, ...]:
    """One rule or several as a tuple.

    Raises:
        TypeError: one is neither a string nor a function.
        ValueError: there is none.
    """
    listed = (rules,) if isinstance(rules, str) or callable(rules) else tuple(rules)
    for rule in listed:
        if not isinstance(rule, str) and not callable(rule):
            raise TypeError(
                f"{where}: a rule is a glob on parameter names, the name of a class of modules, or a function of a "
                f"Param; got {rule!r}"
            )
    if not listed:
        raise ValueError(f"{where}: no rules given")
    return listed


def rule_name(rule: Rule) -> str:
    """How a rule is called in tables and messages."""
    if isinstance(rule, str):
        return repr(rule)
    return getattr(rule, "__name__", type(rule).__name__).replace("_", " ")


@dataclass(frozen=True)
class Groups:
    """Labels and their rules, in order: a parameter gets the label of the first rule that takes it."""

    rules: tuple[tuple[str, tuple[Rule, ...]], ...]
    """(label, rules) pairs."""
    table: ParamTable | None = None
    """Of the module the parameters are of, for rules about classes."""
    _known: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    def split(self, leaves: Mapping[str, Any], like: Mapping[str, Tensor]) -> dict[str | None, dict[str, Any]]:
        """`leaves` by label, every label present, in the order of the rules; under None what no rule takes.

        Args:
            leaves: anything by parameter name.
            like: the parameters, whose shapes a rule may ask for.
        """
        parts: dict[str | None, dict[str, Any]] = {label: {} for label, _ in self.rules}
        parts[None] = {}
        for name, leaf in leaves.items():
            parts[self._decision(name, like[name])[0]][name] = leaf
        return parts

    def check(self, leaves: Mapping[str, Tensor], where: str, *, complete: bool = False) -> None:
        """Raise unless every rule takes a parameter and, if `complete`, every parameter is taken.

        Raises:
            ValueError: with the dead rules, and what they may have meant; or with the parameters that none takes.
        """
        found = {name: self._decision(name, leaf) for name, leaf in leaves.items()}
        used = {(label, number) for label, number in found.values()}
        dead = [
            (label, rule)
            for label, rules in self.rules
            for number, rule in enumerate(rules)
            if (label, number) not in used
        ]
        if dead:
            raise ValueError(f"{where}: " + "; ".join(self._obituary(label, rule, leaves) for label, rule in dead))
        if complete and (unmatched := [name for name, (label, _) in found.items() if label is None]):
            raise ValueError(
                f"{where}: no rule takes {some(unmatched)}; add one that does, or the rule '**', which takes whatever "
                "is left, to the last part"
            )

    def describe(self, leaves: Mapping[str, Tensor] | None = None, rest: str = "-") -> str:
        """A table of what each rule took: parameter, shape, class, label, rule.

        Args:
            leaves: the parameters; default those of the module that was given.
            rest: the label of what no rule took.
        """
        params = self.table.params if self.table is not None else ()
        if leaves is not None:
            params = tuple(self._param(name, leaf) for name, leaf in leaves.items())
        rows = [("parameter", "shape", "held by", "group", "rule")]
        for param in params:
            label, number = self._first(param)
            rule = "-" if label is None else rule_name(dict(self.rules)[label][number])
            held_by = param.classes[0] if param.classes else "-"
            rows.append((param.name, "x".join(map(str, param.shape)) or "scalar", held_by, label or rest, rule))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def _decision(self, name: str, leaf: Tensor) -> tuple[str | None, int]:
        """(label, which of its rules)."""
        key = (name, tuple(leaf.shape)) if self._asks_for_shapes else name
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._first(self._param(name, leaf))
        return known

    @functools.cached_property
    def _asks_for_shapes(self) -> bool:
        return any(callable(rule) for _, rules in self.rules for rule in rules)

    @functools.cached_property
    def _by_name(self) -> dict[str, Param]:
        return {} if self.table is None else {param.name: param for param in self.table.params}

    def _first(self, param: Param) -> tuple[str | None, int]:
        for label, rules in self.rules:
            for number, rule in enumerate(rules):
                if takes(rule, param):
                    return label, number
        return None, 0

    def _param(self, name: str, leaf: Tensor) -> Param:
        return self._by_name.get(name) or Param(name, tuple(leaf.shape), (name,))

    def _obituary(self, label: str, rule: Rule, leaves: Mapping[str, Tensor]) -> str:
        params = [self._param(name, leaf) for name, leaf in leaves.items()]
        text = f"the rule {rule_name(rule)} of {label!r} takes no parameter"
        if taken := [param.name for param in params if takes(rule, param)]:
            return f"{text}, since earlier rules take {some(taken, 3)}"
        if not isinstance(rule, str):
            return text
        classes = {name for param in params for name in param.classes}
        hint = near(rule, [*leaves, *classes, *_globs(leaves)])
        if not hint and self.table is None and rule.isidentifier() and rule[0].isupper():
            hint = "; a rule about classes of modules needs the model: module=model"
        return f"{text}{hint or f'; the parameters are {some(leaves)}'}"


def takes(rule: Rule, param: Param) -> bool:
    """Whether a rule takes a parameter."""
    if not isinstance(rule, str):
        return bool(rule(param))
    glob = pattern(rule)
    return rule in param.classes or any(glob.fullmatch(name) for name in param.names or (param.name,))


def _globs(names: Iterable[str]) -> Iterable[str]:
    """Globs that somebody may have meant: everything below a module, everything of one last name."""
    for name in names:
        path, _, attribute = name.rpartition(".")
        yield f"**.{attribute}"
        while path:
            yield f"{path}.**"
            path = path.rpartition(".")[0]


def _param_of(root: nn.Module, leaf: Leaf) -> Param:
    classes: dict[str, None] = {}
    for slot in leaf.slots:
        for module in _holders(root, slot.path, slot.module):
            classes.update(dict.fromkeys(cls.__name__ for cls in type(module).__mro__))
    kept = tuple(name for name in classes if name not in _NO_CLASS)
    return Param(leaf.name, tuple(leaf.shape), tuple(slot.name for slot in leaf.slots), kept)


def _holders(root: nn.Module, path: str, module: nn.Module) -> Iterable[nn.Module]:
    """The module at `path` and, while it is a mere list of parameters, the one around it."""
    yield module
    while isinstance(module, nn.ParameterList | nn.ParameterDict) and path:
        path = path.rpartition(".")[0]
        module = root.get_submodule(path)
        yield module


def labelled(parts: Any, where: str) -> tuple[tuple[str, tuple[Rule, ...]], ...]:
    """(label, rules) pairs of a mapping {label: rule or rules}.

    Raises:
        ValueError: there is none, or a label cannot be part of a leaf's name.
        TypeError: no mapping, or a rule is neither a string nor a function.
    """
    if not isinstance(parts, Mapping):
        raise TypeError(f"{where} takes a mapping from labels, got {parts!r}")
    if not parts:
        raise ValueError(f"{where} takes at least one label")
    for label in parts:
        if not isinstance(label, str) or not label or "/" in label or "." in label:
            raise ValueError(f"{where}: {label!r} cannot be a label: names must not be empty or hold '/' or '.'")
    return tuple((label, as_rules(rules, f"{where}, {label!r}")) for label, rules in parts.items())


def labelled_pairs(parts: Any, where: str, what: str) -> FrozenDict:
    """A mapping {label: (rule or rules, something)} as it is, checked and read-only.

    Raises:
        TypeError: no mapping, or a value is no such pair.
    """
    if not isinstance(parts, Mapping):
        raise TypeError(f"{where} takes a mapping from labels to (rule or rules, {what}), got {parts!r}")
    for label, pair in parts.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"{where}, {label!r}: expected (rule or rules, {what}), got {pair!r}")
    return FrozenDict({label: tuple(pair) for label, pair in parts.items()})
