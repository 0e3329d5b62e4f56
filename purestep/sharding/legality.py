"""What FSDP2 can hold in a unit: mistakes in a spec are found when it is resolved, not at the first forward."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from purestep.sharding.config import AcceleratorConfig, Topology
from purestep.sharding.leaves import Leaf
from purestep.sharding.module_paths import around, has_unit, is_called, named, unit_of
from purestep.sharding.plan import UnitSettings
from purestep.sharding.rules import ShardingError, ShardingSpec, Unit, pattern


def check_units(spec: ShardingSpec, model: nn.Module, params: Mapping[str, Leaf], units: Mapping[str, Unit]) -> None:
    """Raise `ShardingError` for units that cannot be sharded, and for repeated blocks that no rule takes.

    Args:
        spec: where the units come from.
        model: not yet sharded.
        params: what is to be sharded, by name.
        units: module path -> its rule.
    """
    modules = dict(model.named_modules())
    for path, rule in units.items():
        if not is_called(modules[path]):
            raise ShardingError(
                f"unit rule {rule.match!r} takes {path!r}, a {type(modules[path]).__name__}, which is never called; "
                f"match its children: {path + '.*'!r}"
            )
    for places in ties_across_units(params, units):
        raise ShardingError(
            f"tied weight in two units: {_places(places)} are one parameter, which a unit must own whole; leave both "
            "modules to the root unit (remove the rule that takes one), or make a module that holds both one unit"
        )
    for module, places in shared_across_units(model, units):
        raise ShardingError(
            f"one module in two units: {_places(places)} are the same {type(module).__name__}; make it a unit of its "
            "own, or leave both places to the root unit"
        )
    _check_repeated(spec, modules, units)


def ties_across_units(params: Mapping[str, Leaf], units: Collection[str]) -> Iterator[list[tuple[str, str]]]:
    """Tied parameters that several units would own: (name, unit) of each place."""
    for leaf in params.values():
        places = [(slot.name, unit_of(slot.path, units)) for slot in leaf.slots]
        if len({unit for _, unit in places}) > 1:
            yield places


def shared_across_units(model: nn.Module, units: Collection[str]) -> Iterator[tuple[nn.Module, list[tuple[str, str]]]]:
    """Modules that stand, and so are called, in two places that two units hold: (path, unit) of both."""
    modules = dict(model.named_modules(remove_duplicate=False))
    unit_by_id = {id(modules[path]): path for path in units}
    seen: dict[int, tuple[str, str]] = {}
    for path, module in modules.items():
        if next(module.parameters(recurse=False), None) is None:
            continue
        unit = next((unit_by_id[id(modules[p])] for p in around(path) if id(modules[p]) in unit_by_id), "")
        first = seen.setdefault(id(module), (path, unit))
        if unit != first[1]:
            yield module, [first, (path, unit)]


def _places(places: list[tuple[str, str]]) -> str:
    return " and ".join(f"{name!r} (unit {unit or 'root'!r})" for name, unit in places)


def split_by_dtype(model: nn.Module, trainable: Mapping[str, Leaf], units: Collection[str]) -> dict[str, str]:
    """Modules to make units of their own, so that the trainable parameters of each unit share one dtype.

    FSDP2 reduces the gradients of a unit as one message. What is frozen may have any dtype.

    Returns:
        Module path -> what a plan says about it.

    Raises:
        ShardingError: parameters of one module differ, so that no submodule tells them apart.
    """
    modules = dict(model.named_modules())
    notes: dict[str, str] = {}
    by_unit: dict[str, list[Leaf]] = {}
    for leaf in trainable.values():
        by_unit.setdefault(unit_of(leaf.slots[0].path, units), []).append(leaf)
    for unit, leaves in by_unit.items():
        sizes: dict[torch.dtype, int] = {}
        for leaf in leaves:
            sizes[leaf.dtype] = sizes.get(leaf.dtype, 0) + leaf.numel
        if len(sizes) == 1:
            continue
        kept = sorted(sizes, key=lambda dtype: -sizes[dtype])  # stable: the first of equals
        splits = (_split(modules, unit, leaves, keep) for keep in kept)
        found = next((split for split in splits if split is not None), None)
        if found is None:
            raise _mixed(unit, leaves)
        notes.update((path, f"{dtype} apart from {unit or 'the root'}") for path, dtype in found.items())
    return notes


def _split(modules: Mapping[str, nn.Module], unit: str, leaves: list[Leaf], keep: torch.dtype) -> dict[str, str] | None:
    """The outermost modules of one dtype that hold everything in `unit` but what has dtype `keep`; None: impossible."""
    chosen: dict[str, str] = {}
    for leaf in leaves:
        if leaf.dtype == keep or unit_of(leaf.slots[0].path, chosen):
            continue
        inner = [p for p in around(leaf.slots[0].path) if p != unit and p.startswith(unit and unit + ".")]
        legal = [path for path in inner if is_called(modules[path]) and _is_uniform(path, leaves)]
        if not legal:
            return None
        chosen[legal[-1]] = str(leaf.dtype).removeprefix("torch.")
    return chosen


def _is_uniform(path: str, leaves: list[Leaf]) -> bool:
    """Whether what the module holds has one dtype, and no part of it is tied to something outside."""
    inside = [[(slot.path + ".").startswith(path + ".") for slot in leaf.slots] for leaf in leaves]
    held = [leaf for leaf, places in zip(leaves, inside, strict=True) if any(places)]
    return len({leaf.dtype for leaf in held}) == 1 and all(all(places) or not any(places) for places in inside)


def _mixed(unit: str, leaves: list[Leaf]) -> ShardingError:
    first = leaves[0]
    other = next(leaf for leaf in leaves if leaf.dtype != first.dtype)
    return ShardingError(
        f"unit {unit or 'root'!r} mixes dtypes: {first.name!r} is {first.dtype}, {other.name!r} is {other.dtype}, and "
        f"no submodule tells them apart; give all its trainable parameters one dtype, freeze one of them, move "
        f"{other.name!r} into a module of its own, or leave its module whole on every rank (ShardingSpec.ignored)"
    )


def _check_repeated(spec: ShardingSpec, modules: Mapping[str, nn.Module], units: Mapping[str, Unit]) -> None:
    """A list of blocks that the rules take only partly, or not at all, is almost always a mistake in a glob."""
    if not units:
        return
    for path, container in modules.items():
        if not isinstance(container, nn.ModuleList | nn.Sequential) or unit_of(path, units):
            continue
        # By name, which counts a block that stands in several places once.
        blocks = {f"{path}.{name}" if path else name: child for name, child in container.named_children()}
        by_class: dict[type, list[str]] = {}
        for child_path, child in blocks.items():
            if any(True for _ in child.parameters()) and _is_block(child):
                by_class.setdefault(type(child), []).append(child_path)
        for cls, paths in by_class.items():
            loose = [p for p in paths if not unit_of(p, units) and not has_unit(p, units)]
            declared = [p for p in loose if _is_declared(p, spec, modules)]
            if len(paths) > 1 and len(loose) > len(declared):
                raise ShardingError(
                    f"repeated blocks in no unit: {named(p for p in loose if p not in declared)} ({cls.__name__}) "
                    "would be gathered all at once with the root; add a rule such as "
                    f"{path + '.*' if path else '*'!r}, or declare them with ShardingSpec(root=...)"
                )


def _is_declared(path: str, spec: ShardingSpec, modules: Mapping[str, nn.Module]) -> bool:
    globs = (*spec.root, *spec.ignored)
    return any(pattern(glob).fullmatch(p) or type(modules[p]).__name__ == glob for glob in globs for p in around(path))


def _is_block(module: nn.Module) -> bool:
    """Whether a list of such modules is a list of blocks, rather than a list of lists or a small network of layers."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    return any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn.")


def check_settings(
    model: nn.Module, settings: Mapping[str, UnitSettings], topology: Topology, accelerator: AcceleratorConfig
) -> None:
    """Raise `ShardingError` for settings of units (by path) that cannot be, or that would do nothing."""
    for path, unit in settings.items():
        for name in ("param_dtype", "reduce_dtype"):
            accelerator.check_scaled(f"unit {path or 'root'!r}: {name}", getattr(unit, name))
        ranks = unit.reshard_after_forward
        if topology.is_sharded and not isinstance(ranks, bool) and (topology.shard % ranks or ranks > topology.shard):
            raise ShardingError(
                f"unit {path or 'root'!r}: reshard_after_forward {ranks} does not divide the {topology.shard} ranks "
                "that share a copy (--parallelism.dp-shard); use a divisor, or True or False"
            )
        asks = unit.compile or (unit.activation_checkpointing.mode != "none")
        if asks and not is_called(model.get_submodule(path)):
            raise ShardingError(
                f"unit {path!r} is to be {'compiled' if unit.compile else 'computed again in backward'}, but it is "
                f"never called: a {type(model.get_submodule(path)).__name__} has no forward; match its children"
            )
    asked = accelerator.activation_checkpointing
    if asked.mode != "none" and all(unit.activation_checkpointing.mode == "none" for unit in settings.values()):
        raise ShardingError(
            f"--accelerator.activation-checkpointing.mode {asked.mode}: {type(model).__name__} has no unit to compute "
            "again in backward; name its blocks with ShardingSpec(units=...), or parts of it with "
            "--accelerator.activation-checkpointing.modules"
        )
