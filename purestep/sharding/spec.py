"""`ShardingSpec`: ordered rules, as data, that map a module to FSDP2 units."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from purestep.sharding.config import ConfigError, FSDPConfig, Topology
from purestep.sharding.leaves import Leaf, ModuleLeaves, leaves_of
from purestep.sharding.plan import Plan, PlanParam, PlanUnit


class ShardingError(ConfigError):
    """A spec that does not fit its model; the message names the rule or the parameter, and the fix."""


@dataclass(frozen=True)
class Unit:
    """A rule: which modules become FSDP2 units, and how."""

    match: str
    """Glob on module paths, or a class name. In a glob `*` is one path segment and `**` any number of them."""
    reshard_after_forward: bool | None = None
    """Free the gathered parameters between forward and backward. None: as `FSDPConfig` says."""


@dataclass(frozen=True)
class ShardingSpec:
    """How a model maps to units of sharding and to entry points. Inert in topologies that do not shard.

    A model may carry its own as a class attribute `sharding_spec`.

    >>> spec = ShardingSpec(units=("blocks.*",), forward_methods=("encode",))
    >>> spec.units[0]
    Unit(match='blocks.*', reshard_after_forward=None)
    """

    units: tuple[Unit, ...] = ()
    """Rules; a string stands for `Unit(string)`. What no rule takes belongs to the root unit."""
    forward_methods: tuple[str, ...] = ()
    """Methods of the model, beside `forward`, that a step or an `apply` may call."""
    root: tuple[str, ...] = ()
    """Globs of repeated blocks that are meant to stay in the root unit."""

    def __post_init__(self) -> None:
        units = tuple(unit if isinstance(unit, Unit) else Unit(unit) for unit in _strings("units", self.units))
        object.__setattr__(self, "units", units)
        object.__setattr__(self, "forward_methods", tuple(_strings("forward_methods", self.forward_methods)))
        object.__setattr__(self, "root", tuple(_strings("root", self.root)))

    def resolve(self, model: nn.Module, topology: Topology, fsdp: FSDPConfig | None = None) -> Plan:
        """The plan of `model` under this spec: pure, and as good on a meta model as on a real one.

        Args:
            model: not yet sharded; on any device.
            topology: from `ParallelismConfig.resolve`.
            fsdp: knobs for what the rules leave open.

        Raises:
            ShardingError: a rule matches nothing; an unknown forward method; and, when `topology` shards, weights tied
                across units, repeated blocks that no rule takes, 0-d parameters, mixed dtypes in a unit, or units that
                cannot be hooked.
        """
        fsdp, leaves = fsdp or FSDPConfig(), leaves_of(model)
        _check_methods(model, self.forward_methods)
        rules = _match(self, model)
        owners = {name: _owners(leaf, rules) for name, leaf in leaves.params.items()}
        if topology.is_sharded:
            _check_shardable(self, model, leaves, rules, owners)
        return Plan(
            topology=topology,
            units=tuple(_plan_units(model, leaves, rules, owners, topology, fsdp)),
            forward_methods=self.forward_methods,
        )


def spec_of(model: nn.Module, spec: ShardingSpec | None = None) -> ShardingSpec:
    """`spec` if given, else the model's own `sharding_spec`, else one that makes the model a single unit."""
    if spec is None:
        spec = getattr(model, "sharding_spec", None) or ShardingSpec()
    if not isinstance(spec, ShardingSpec):
        raise TypeError(f"a sharding spec is a ShardingSpec, got {type(spec).__name__}")
    return spec


def _strings(field: str, values: Any) -> tuple:
    if isinstance(values, str | Unit):
        raise TypeError(f"ShardingSpec.{field} is a tuple of rules, got {values!r}; write ({values!r},)")
    return tuple(values)


@lru_cache(maxsize=512)
def _pattern(glob: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*|\?)", glob)
    table = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    return re.compile("".join(table.get(part, re.escape(part)) for part in parts))


def _match(spec: ShardingSpec, model: nn.Module) -> dict[str, Unit]:
    """Module path -> the first rule that takes it, children before parents."""
    modules = dict(model.named_modules())
    taken: dict[str, Unit] = {}
    for rule in spec.units:
        paths = [
            path
            for path, module in modules.items()
            if path and (_pattern(rule.match).fullmatch(path) or type(module).__name__ == rule.match)
        ]
        if not paths:
            classes = sorted({type(module).__name__ for path, module in modules.items() if path})
            raise ShardingError(
                f"unit rule {rule.match!r} matches no module of {type(model).__name__}; "
                f"module paths: {_some(path for path in modules if path)}; classes: {_some(classes)}"
            )
        for path in paths:
            taken.setdefault(path, rule)
    return {path: taken[path] for path in sorted(taken, key=lambda path: -path.count("."))}


def _owners(leaf: Leaf, rules: Mapping[str, Unit]) -> list[str]:
    """The unit of each of the leaf's slots: the innermost matched module around it, "" for the root unit."""
    return [_unit_of(slot.path, rules) for slot in leaf.slots]


def _unit_of(path: str, rules: Mapping[str, Unit]) -> str:
    return next((around for around in _around(path) if around in rules), "")


def _around(path: str) -> Iterator[str]:
    """`path` and the paths of the modules around it, innermost first, without the root."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _check_methods(model: nn.Module, methods: tuple[str, ...]) -> None:
    for name in methods:
        if not callable(getattr(model, name, None)):
            known = sorted(m for m in dir(type(model)) if not m.startswith("_") and m not in dir(nn.Module))
            raise ShardingError(
                f"forward method {name!r} is not a method of {type(model).__name__}; it has {_some(known) or 'none'}"
            )


def _check_shardable(
    spec: ShardingSpec,
    model: nn.Module,
    leaves: ModuleLeaves,
    rules: Mapping[str, Unit],
    owners: Mapping[str, list[str]],
) -> None:
    modules = dict(model.named_modules())
    for path in rules:
        if isinstance(modules[path], nn.ModuleList | nn.ModuleDict):
            raise ShardingError(
                f"unit rule {rules[path].match!r} takes {path!r}, a {type(modules[path]).__name__}, which is "
                f"never called; match its children: {path + '.*'!r}"
            )
    for name, leaf in leaves.params.items():
        if len(set(owners[name])) > 1:
            places = " and ".join(
                f"{slot.name!r} (unit {owner or 'root'!r})"
                for slot, owner in zip(leaf.slots, owners[name], strict=True)
            )
            raise ShardingError(
                f"tied weight in two units: {places} are one parameter, which a unit must own whole; "
                "leave both modules to the root unit (remove the rule that takes one), or make a module that "
                "holds both one unit"
            )
        if leaf.shape == ():
            raise ShardingError(f"parameter {name!r} is 0-d and cannot be sharded; give it shape (1,)")
    _check_shared(model, rules)
    _check_dtypes(leaves, owners)
    _check_repeated(spec, modules, rules)


def _check_shared(model: nn.Module, rules: Mapping[str, Unit]) -> None:
    """A module that stands in two places is called from both, so one unit must hold both."""
    modules = dict(model.named_modules(remove_duplicate=False))
    units = {id(modules[path]): path for path in rules}
    seen: dict[int, tuple[str, str]] = {}
    for path, module in modules.items():
        if next(module.parameters(recurse=False), None) is None:
            continue
        unit = next((units[id(modules[p])] for p in _around(path) if id(modules[p]) in units), "")
        first, first_unit = seen.setdefault(id(module), (path, unit))
        if unit != first_unit:
            raise ShardingError(
                f"one module in two units: {first!r} (unit {first_unit or 'root'!r}) and {path!r} (unit "
                f"{unit or 'root'!r}) are the same {type(module).__name__}; make it a unit of its own, or leave both "
                "places to the root unit"
            )


def _check_dtypes(leaves: ModuleLeaves, owners: Mapping[str, list[str]]) -> None:
    first: dict[str, Leaf] = {}
    for name, leaf in leaves.params.items():
        if leaf.trainable:
            other = first.setdefault(owners[name][0], leaf)
            if other.dtype != leaf.dtype:
                raise ShardingError(
                    f"unit {owners[name][0] or 'root'!r} mixes dtypes: {other.name!r} is {other.dtype}, {name!r} is "
                    f"{leaf.dtype}; give all its trainable parameters one dtype, or put {name!r} in a unit of its own"
                )


def _check_repeated(spec: ShardingSpec, modules: Mapping[str, nn.Module], rules: Mapping[str, Unit]) -> None:
    """A list of blocks that the rules take only partly, or not at all, is almost always a mistake in a glob."""
    if not rules:
        return
    for path, container in modules.items():
        if not isinstance(container, nn.ModuleList | nn.Sequential) or _unit_of(path, rules):
            continue
        # By name, which counts a block that stands in several places once.
        blocks = {f"{path}.{name}" if path else name: child for name, child in container.named_children()}
        by_class: dict[type, list[str]] = {}
        for child_path, child in blocks.items():
            if any(True for _ in child.parameters()) and _is_block(child):
                by_class.setdefault(type(child), []).append(child_path)
        for cls, paths in by_class.items():
            loose = [p for p in paths if not _unit_of(p, rules) and not _has_unit(p, rules)]
            declared = [p for p in loose if any(_pattern(glob).fullmatch(a) for glob in spec.root for a in _around(p))]
            if len(paths) > 1 and len(loose) > len(declared):
                raise ShardingError(
                    f"repeated blocks in no unit: {_some(p for p in loose if p not in declared)} "
                    f"({cls.__name__}) would be "
                    f"gathered all at once with the root; add a rule such as {path + '.*' if path else '*'!r}, "
                    "or declare them with ShardingSpec(root=...)"
                )


def _is_block(module: nn.Module) -> bool:
    """Whether a list of such modules is a list of blocks, rather than a list of lists or a small network of layers."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    return any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn.")


def _has_unit(path: str, rules: Mapping[str, Unit]) -> bool:
    return any(unit.startswith(path + ".") for unit in rules)


def _plan_units(
    model: nn.Module,
    leaves: ModuleLeaves,
    rules: Mapping[str, Unit],
    owners: Mapping[str, list[str]],
    topology: Topology,
    fsdp: FSDPConfig,
) -> Iterator[PlanUnit]:
    modules = dict(model.named_modules())
    order = [path for path in modules if path in rules] + [""]
    for path in order:
        params = tuple(
            PlanParam(
                name, tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."), leaf.dtype.itemsize, leaf.trainable
            )
            for name, leaf in leaves.params.items()
            if owners[name][0] == path
        )
        # Backward starts where forward ended, at the root: freeing it in between would only gather it twice.
        reshard = False if path == "" else rules[path].reshard_after_forward
        yield PlanUnit(
            path=path,
            module_class=type(modules[path]).__name__,
            params=params,
            reshard_after_forward=fsdp.reshard_after_forward if reshard is None else reshard,
            shards=topology.shard,
        )


def _some(names: Iterator[str] | list[str], limit: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f", ... ({len(names)} in all)" if len(names) > limit else "")
