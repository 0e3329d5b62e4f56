"""Flags for a `ShardingSpec` in a config, which tyro alone would make a subcommand of."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from purestep.sharding.rules import AUTO, ShardingSpec

if TYPE_CHECKING:
    from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

HELP = {
    "units": "Globs on module paths, or class names, of the modules to shard and gather one by one. auto: as without "
    "this flag. Settings of single units go into the file for --config.",
    "forward_methods": "Methods of the model, beside forward, that a step may call. Without --sharding.units, this and "
    "the flags below add to what the program, the model or its blocks say.",
    "root": "Globs of repeated blocks that are meant to stay in the root unit.",
    "ignored": "Globs or class names of modules whose parameters are whole on every rank.",
    "freeze": "Globs on names of parameters that are not trained.",
}


@dataclass(frozen=True)
class _SpecFlags:
    """What tyro sees in the place of a `ShardingSpec | None`."""

    default: ShardingSpec | None


def spec_flags() -> ConstructorRegistry:
    """A tyro registry in which a config's `ShardingSpec | None` is a flag for each of its fields.

    A flag that is given replaces that field of the default; without any the default stays, None included.
    """
    from tyro.constructors import ConstructorRegistry, StructConstructorSpec

    registry = ConstructorRegistry()
    looking: list[type] = []

    def rule(info: StructTypeInfo) -> StructConstructorSpec | None:
        if info.type is _SpecFlags:
            return _flags(info.default.default)
        if info.type in looking or not _has_spec(info.type):
            return None
        looking.append(info.type)  # what tyro makes of the config by itself
        try:
            known = ConstructorRegistry.get_struct_spec(info)
        finally:
            looking.pop()
        if not isinstance(known, StructConstructorSpec):
            return None
        return dataclasses.replace(known, fields=tuple(map(_seen_as_flags, known.fields)))

    registry.struct_rule(rule)
    return registry


def _has_spec(kind: Any) -> bool:
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return False
    return (ShardingSpec | None) in typing.get_type_hints(kind).values()


def _seen_as_flags(field: StructFieldSpec) -> StructFieldSpec:
    if field.type != (ShardingSpec | None):
        return field
    default = field.default if isinstance(field.default, ShardingSpec) else None
    return dataclasses.replace(field, type=_SpecFlags, default=_SpecFlags(default))


def _flags(default: ShardingSpec | None) -> StructConstructorSpec:
    from tyro.constructors import StructConstructorSpec, StructFieldSpec

    def build(**given: tuple[str, ...] | None) -> ShardingSpec | None:
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(default or ShardingSpec(units=(AUTO,)), **changes) if changes else default

    kind: Any = tuple[str, ...] | None
    fields = (StructFieldSpec(name, kind, None, f"{text}{_now(default, name)}") for name, text in HELP.items())
    return StructConstructorSpec(build, tuple(fields))


def _now(default: ShardingSpec | None, name: str) -> str:
    """What the field is unless its flag is given, for the help."""
    if default is None:
        return ""
    values = [rule.match for rule in default.rules] if name == "units" else getattr(default, name)
    return f" Now: {' '.join(map(repr, values))}." if values else ""
