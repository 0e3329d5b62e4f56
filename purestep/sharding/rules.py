"""`ShardingSpec`: ordered rules, as data, that map a module to units. Importing this module imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from purestep.sharding.config import (
    AcceleratorConfig,
    ActivationCheckpointing,
    ConfigError,
    Dtype,
    FSDPConfig,
    Topology,
    check_prefetch,
    check_reshard,
)

if TYPE_CHECKING:
    from torch import nn

    from purestep.sharding.plan import Plan

__all__ = ["ActivationCheckpointing", "Dtype", "ShardingError", "ShardingSpec", "Unit", "near", "pattern"]


AUTO = "auto"


class ShardingError(ConfigError):
    """A spec that does not fit its model; the message names the rule or the parameter, and the fix."""


@dataclass(frozen=True)
class Unit:
    """A rule: which modules become units, and how. Fields left at None are as the run's config says.

    Activation checkpointing and compilation act in every topology, the other settings only where dp_shard > 1.

    >>> Unit("blocks.*", param_dtype="bf16", activation_checkpointing=ActivationCheckpointing("full", every=2)).match
    'blocks.*'
    """

    sparse: ClassVar[bool] = True
    """Whether a file may leave out fields that are None, as far as the codecs of configs are concerned."""

    match: str
    """Glob on module paths, or a class name; "" is the root unit. In a glob `*` stays within one path segment, and `**`
    does not. "auto" stands for what would be taken if the spec were not given."""
    reshard_after_forward: bool | int | None = None
    """Free the gathered parameters between forward and backward. An int: keep them sharded over that many ranks."""
    param_dtype: Dtype | None = None
    """Dtype in which the unit is gathered."""
    reduce_dtype: Dtype | None = None
    """Dtype in which its gradients are reduced."""
    output_dtype: Dtype | None = None
    """Dtype to which its floating-point outputs are cast."""
    activation_checkpointing: ActivationCheckpointing | None = None
    """What backward recomputes instead of keeping."""
    compile: bool | None = None
    """Compile the unit by itself."""
    cpu_offload: bool | None = None
    """Keep its shards, gradients and optimizer state in host memory."""
    prefetch: int | None = None
    """Units gathered ahead of this one, in forward and backward; 0: none; None: as FSDP2 does by itself."""

    def __post_init__(self) -> None:
        where = f"unit rule {self.match!r}"
        check_reshard(self.reshard_after_forward, where)
        check_prefetch(self.prefetch, where)
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            if (dtype := getattr(self, name)) not in (None, *get_args(Dtype)):
                raise ConfigError(f"{where}: {name} {dtype!r}: expected {', '.join(get_args(Dtype))}")


@dataclass(frozen=True)
class ShardingSpec:
    """How a model maps to units and to entry points.

    A model may carry its own as a class attribute `sharding_spec`. Without any, `ps.shard` takes transformers'
    `_no_split_modules`, or else the repeated blocks it finds.

    >>> spec = ShardingSpec(units=("blocks.*", Unit("", param_dtype="fp32")), forward_methods=("encode",))
    >>> spec.units[0] == Unit("blocks.*")
    True
    >>> ShardingSpec.from_dict(spec.to_dict()) == spec
    True
    """

    units: tuple[Unit | str, ...] = ()
    """Rules in order: the first that takes a module decides about it. A string stands for a rule without settings. What
    no rule takes belongs to the root unit; the rule "" has its settings."""
    forward_methods: tuple[str, ...] = ()
    """Methods of the model, beside `forward`, that a step or an `apply` may call."""
    root: tuple[str, ...] = ()
    """Globs of repeated blocks that are meant to stay in the root unit."""
    ignored: tuple[str, ...] = ()
    """Globs or class names of modules whose parameters are whole on every rank instead of sharded."""
    freeze: tuple[str, ...] = ()
    """Globs on names of parameters that are not trained."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            values = _items(field.name, getattr(self, field.name))
            if field.name == "units":
                values = tuple(Unit(value) if isinstance(value, str) else value for value in values)
            object.__setattr__(self, field.name, values)

    @property
    def rules(self) -> tuple[Unit, ...]:
        """`units`, each as a `Unit`."""
        return tuple(unit for unit in self.units if isinstance(unit, Unit))

    @property
    def is_open(self) -> bool:
        """Whether a rule is "auto", so that the spec has to be completed by another one."""
        return any(rule.match == AUTO for rule in self.rules)

    def over(self, base: ShardingSpec) -> ShardingSpec:
        """This spec on top of `base`, whose rules stand where it says "auto", and whose other fields are added to it.

        A setting of the "auto" rule counts where a rule of `base` says nothing. Without such a rule nothing of `base`
        remains.

        >>> spec = ShardingSpec(units=("head", Unit("auto", prefetch=2)), freeze=("embed.*",))
        >>> spec = spec.over(ShardingSpec(units=("blocks.*",), forward_methods=("encode",)))
        >>> [(rule.match, rule.prefetch) for rule in spec.rules], spec.forward_methods, spec.freeze
        ([('head', None), ('blocks.*', 2)], ('encode',), ('embed.*',))
        """
        if not self.is_open:
            return self
        units = tuple(
            each for rule in self.rules for each in (_filled(base.rules, rule) if rule.match == AUTO else [rule])
        )
        others = (field.name for field in dataclasses.fields(self) if field.name != "units")
        merged = {name: tuple(dict.fromkeys((*getattr(self, name), *getattr(base, name)))) for name in others}
        return ShardingSpec(units=units, **merged)

    def resolve(
        self,
        model: nn.Module,
        topology: Topology,
        fsdp: FSDPConfig | None = None,
        *,
        accelerator: AcceleratorConfig | None = None,
        source: str | None = None,
    ) -> Plan:
        """The plan of `model` under this spec: pure, and as good on a meta model as on a real one.

        Args:
            model: not yet sharded; on any device.
            topology: from `ParallelismConfig.resolve`.
            fsdp: settings of units that the rules leave open; default those of `accelerator`.
            accelerator: the same for activation checkpointing and compilation; default none of both.
            source: what the plan says about where the spec came from; default "config", or "model".

        Raises:
            ShardingError: a rule matches nothing; an unknown forward method; and, when `topology` shards, weights tied
                across units, repeated blocks that no rule takes, mixed dtypes that cannot be told apart by module, or
                units that cannot be hooked.
        """
        from purestep.sharding.spec import resolve

        return resolve(self, model, topology, fsdp, accelerator, source)

    def to_dict(self) -> dict[str, Any]:
        """The spec as JSON types; `ShardingSpec.from_dict` reads it back."""
        return _as_json(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ShardingSpec:
        """The spec that `to_dict` wrote; what is not there has its default, a unit may be just its glob.

        Raises:
            ConfigError: an unknown field.
        """
        data = _known(cls, data)
        units = tuple(unit if isinstance(unit, str) else _unit_from(unit) for unit in data.pop("units", ()))
        return cls(units=units, **{name: tuple(values) for name, values in data.items()})


@lru_cache(maxsize=512)
def pattern(glob: str) -> re.Pattern[str]:
    """A glob over dotted paths as a regular expression to match in full."""
    parts = re.split(r"(\*\*|\*|\?)", glob)
    table = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    return re.compile("".join(table.get(part, re.escape(part)) for part in parts))


def near(glob: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)` when known names are close to a glob, else nothing.

    >>> near("blcoks.*", ["blocks.0", "blocks.1", "head"])
    " (did you mean 'blocks.*'?)"
    """
    # Numbers are what a glob leaves open.
    candidates = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in known)
    found = difflib.get_close_matches(glob, candidates, n=2, cutoff=0.7)
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def _filled(rules: Iterable[Unit], defaults: Unit) -> list[Unit]:
    """The rules, with the settings of `defaults` where they have none."""
    names = [field.name for field in dataclasses.fields(Unit)]
    filled = []
    for rule in rules:
        open_ones = {name: getattr(defaults, name) for name in names if getattr(rule, name) is None}
        filled.append(dataclasses.replace(rule, **open_ones))
    return filled


def _items(field: str, values: Any) -> tuple:
    kinds = (str, Unit) if field == "units" else (str,)
    if isinstance(values, str | Unit):
        raise TypeError(f"ShardingSpec.{field} is a tuple of rules, got {values!r}; write ({values!r},)")
    for value in values:
        if not isinstance(value, kinds):
            raise TypeError(f"ShardingSpec.{field} holds {' or '.join(k.__name__ for k in kinds)}, got {value!r}")
    return tuple(values)


def _as_json(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: _as_json(value) for name, value in tree.items()}
    return [_as_json(item) for item in tree] if isinstance(tree, list | tuple) else tree


def _unit_from(data: Mapping[str, Any]) -> Unit:
    data = _known(Unit, data)
    checkpointing = data.pop("activation_checkpointing", None)
    if checkpointing is not None:
        checkpointing = ActivationCheckpointing(**_known(ActivationCheckpointing, checkpointing))
    return Unit(**data, activation_checkpointing=checkpointing)


def _known(kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(kind)]
    for name in data:
        if name not in names:
            hint = near(name, names) or f"; it has {', '.join(names)}"
            raise ConfigError(f"unknown field {name!r} of {kind.__name__}{hint}")
    return dict(data)
