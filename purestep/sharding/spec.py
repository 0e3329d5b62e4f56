"""A spec applied to a model: which rule takes which module, and how each unit is run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from purestep.sharding.config import AcceleratorConfig, ActivationCheckpointing, FSDPConfig, Topology
from purestep.sharding.detection import find_spec, spec_of
from purestep.sharding.leaves import Leaf, ModuleLeaves, leaves_of
from purestep.sharding.legality import check_settings, check_units, split_by_dtype
from purestep.sharding.module_paths import named, outer_unit, takes, unit_of
from purestep.sharding.plan import Plan, PlanParam, PlanStep, PlanUnit, UnitSettings
from purestep.sharding.plan_leaves import buffers_of
from purestep.sharding.rules import ShardingError, ShardingSpec, Unit, near, pattern

__all__ = ["ShardingError", "ShardingSpec", "Unit", "frozen_names", "resolve", "spec_of"]


def resolve(
    spec: ShardingSpec,
    model: nn.Module,
    topology: Topology,
    fsdp: FSDPConfig | None = None,
    accelerator: AcceleratorConfig | None = None,
    source: str | None = None,
) -> Plan:
    """See `ShardingSpec.resolve`."""
    accelerator = accelerator or AcceleratorConfig()
    if fsdp is not None:
        accelerator = dataclasses.replace(accelerator, fsdp=fsdp)
    if spec.is_open:
        spec, source = find_spec(model, spec)
    if source is None:
        source = "model" if spec is getattr(model, "sharding_spec", None) else "config"
    leaves = leaves_of(model)
    _check_methods(model, spec.forward_methods)
    frozen = frozen_names(spec, leaves)
    ignored = _ignored_modules(spec, model)
    units = _match(spec, model, ignored)
    whole = _whole_params(leaves, ignored) if topology.is_sharded else set()
    notes: dict[str, str] = {}
    if topology.is_sharded:
        sharded = {name: leaf for name, leaf in leaves.params.items() if name not in whole}
        check_units(spec, model, sharded, units)
        trainable = {name: leaf for name, leaf in sharded.items() if leaf.trainable and name not in frozen}
        notes = split_by_dtype(model, trainable, units)
    settings = _settings_of(spec, model, units, notes, accelerator)
    check_settings(model, settings, topology, accelerator)
    owned = _owned(leaves, [*units, *notes])
    return Plan(
        topology=topology,
        units=tuple(
            PlanUnit(
                path=path,
                module_class=type(module).__name__,
                params=tuple(_param(leaf, frozen, whole) for leaf in owned[path]),
                settings=settings[path],
                shards=topology.shard,
                note=notes.get(path, ""),
            )
            for path, module in _in_order(model, owned)
        ),
        forward_methods=spec.forward_methods,
        source=source,
        buffers=buffers_of(leaves),
        step=PlanStep(
            microbatches=accelerator.gradient_accumulation.steps,
            policy=accelerator.gradient_accumulation.policy,
            ddp_reduce_dtype=accelerator.ddp.reduce_dtype,
        ),
    )


def frozen_names(spec: ShardingSpec, leaves: ModuleLeaves) -> set[str]:
    """The names of the parameters that `spec.freeze` takes; a tied one is taken by any of its names.

    Raises:
        ShardingError: a glob takes none.
    """
    frozen: set[str] = set()
    for glob in spec.freeze:
        taken = {
            name for name, leaf in leaves.params.items() if any(pattern(glob).fullmatch(s.name) for s in leaf.slots)
        }
        if not taken:
            raise ShardingError(
                f"freeze rule {glob!r} matches no parameter{near(glob, leaves.params)}; "
                f"parameters: {named(leaves.params)}"
            )
        frozen |= taken
    return frozen


def _check_methods(model: nn.Module, methods: tuple[str, ...]) -> None:
    for name in methods:
        if not callable(getattr(model, name, None)):
            known = sorted(m for m in dir(type(model)) if not m.startswith("_") and m not in dir(nn.Module))
            raise ShardingError(
                f"forward method {name!r} is not a method of {type(model).__name__}{near(name, known)}; "
                f"it has {named(known) or 'none'}"
            )


def _ignored_modules(spec: ShardingSpec, model: nn.Module) -> set[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    ignored: set[str] = set()
    for rule in spec.ignored:
        taken = {path for path, module in modules.items() if takes(rule, path, module)}
        if not taken:
            raise _dead("ignored rule", rule, model)
        ignored |= taken
    return ignored


def _match(spec: ShardingSpec, model: nn.Module, ignored: Collection[str]) -> dict[str, Unit]:
    """Module path -> the first rule that takes it, in module order. What is in an ignored module is no unit."""
    modules = dict(model.named_modules())
    open_paths = [path for path in modules if path and not unit_of(path, ignored)]
    taken: dict[str, Unit] = {}
    for rule in spec.rules:
        if rule.match == "":
            continue
        paths = [path for path in open_paths if takes(rule.match, path, modules[path])]
        if not paths and any(takes(rule.match, path, module) for path, module in modules.items()):
            raise ShardingError(
                f"unit rule {rule.match!r} matches only modules that are ignored; remove one of the two"
            )
        if not paths:
            raise _dead("unit rule", rule.match, model)
        if all(path in taken for path in paths):
            raise ShardingError(
                f"unit rule {rule.match!r} takes no module that an earlier rule ({taken[paths[0]].match!r}) does not "
                "take already; put it before that one, or remove it"
            )
        for path in paths:
            taken.setdefault(path, rule)
    return {path: taken[path] for path in modules if path in taken}


def _dead(kind: str, rule: str, model: nn.Module) -> ShardingError:
    modules = {path: module for path, module in model.named_modules() if path}
    classes = sorted({type(module).__name__ for module in modules.values()})
    return ShardingError(
        f"{kind} {rule!r} matches no module of {type(model).__name__}{near(rule, [*modules, *classes])}; "
        f"module paths: {named(modules)}; classes: {named(classes)}"
    )


def _whole_params(leaves: ModuleLeaves, ignored: Collection[str]) -> set[str]:
    """Names of the parameters that every rank holds whole: those of ignored modules, and what has nothing to shard.

    Raises:
        ShardingError: a tied one is in an ignored module and in another.
    """
    whole = set()
    for name, leaf in leaves.params.items():
        inside = [unit_of(slot.path, ignored) != "" for slot in leaf.slots]
        if any(inside) and not all(inside):
            pairs = zip(leaf.slots, inside, strict=True)
            places = [f"{slot.name!r} ({'' if is_in else 'not '}ignored)" for slot, is_in in pairs]
            raise ShardingError(
                f"tied weight ignored at one place only: {' and '.join(places)} are one parameter; ignore both "
                "modules, or none"
            )
        if all(inside) or leaf.shape == () or leaf.numel == 0:
            whole.add(name)
    return whole


def _settings_of(
    spec: ShardingSpec,
    model: nn.Module,
    units: Mapping[str, Unit],
    notes: Mapping[str, str],
    accelerator: AcceleratorConfig,
) -> dict[str, UnitSettings]:
    """How each unit is run: as its rule says, and where that says nothing as the run's config does."""
    root = next((rule for rule in spec.rules if rule.match == ""), Unit(""))
    settings = {"": _settings(root, accelerator, _root_defaults(accelerator, is_only=not units))}
    turns: dict[str, Iterator[int]] = {}
    for path, rule in units.items():
        # What is computed again with the unit around it, or compiled with it, is not so once more.
        inner = outer_unit(path, units) != ""
        unit = _settings(rule, accelerator, _defaults(accelerator, is_inner=inner))
        if unit.activation_checkpointing.mode != "none":
            turn = next(turns.setdefault(rule.match, itertools.count()))
            if turn % unit.activation_checkpointing.every:
                unit = dataclasses.replace(unit, activation_checkpointing=ActivationCheckpointing())
        settings[path] = unit
    for path in notes:
        around = settings[unit_of(path.rpartition(".")[0], settings)]
        settings[path] = dataclasses.replace(around, activation_checkpointing=ActivationCheckpointing(), compile=False)
    return settings


@dataclass(frozen=True)
class _Defaults:
    """The settings whose default depends on where a unit is."""

    reshard_after_forward: bool | int
    activation_checkpointing: ActivationCheckpointing
    compile: bool


def _defaults(accelerator: AcceleratorConfig, *, is_inner: bool) -> _Defaults:
    checkpointing = ActivationCheckpointing() if is_inner else accelerator.activation_checkpointing
    return _Defaults(
        accelerator.fsdp.reshard_after_forward, checkpointing, accelerator.compile.enabled and not is_inner
    )


def _root_defaults(accelerator: AcceleratorConfig, *, is_only: bool) -> _Defaults:
    """Backward starts where forward ended, at the root: freeing it in between would only gather it twice, and computing
    all of it again would need as much memory as keeping it. Where the root is all there is, parts of it can be computed
    again.
    """
    asked = accelerator.activation_checkpointing
    checkpointing = asked if is_only and asked.modules else ActivationCheckpointing()
    return _Defaults(False, checkpointing, accelerator.compile.enabled and is_only)


def _settings(rule: Unit, accelerator: AcceleratorConfig, defaults: _Defaults) -> UnitSettings:
    def either(name: str) -> Any:
        own = getattr(rule, name)
        return getattr(defaults if hasattr(defaults, name) else accelerator.fsdp, name) if own is None else own

    return UnitSettings(**{field.name: either(field.name) for field in dataclasses.fields(UnitSettings)})


def _owned(leaves: ModuleLeaves, units: Collection[str]) -> dict[str, list[Leaf]]:
    """The leaves of each unit, the root's too."""
    owned: dict[str, list[Leaf]] = {path: [] for path in (*units, "")}
    for leaf in leaves.params.values():
        owned[unit_of(leaf.slots[0].path, owned)].append(leaf)
    return owned


def _in_order(model: nn.Module, units: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Module order, the root last."""
    yield from ((path, module) for path, module in model.named_modules() if path and path in units)
    yield "", model


def _param(leaf: Leaf, frozen: Collection[str], whole: Collection[str]) -> PlanParam:
    return PlanParam(
        name=leaf.name,
        shape=tuple(leaf.shape),
        dtype=str(leaf.dtype).removeprefix("torch."),
        itemsize=leaf.dtype.itemsize,
        trainable=leaf.trainable and leaf.name not in frozen,
        ignored=leaf.name in whole,
    )
