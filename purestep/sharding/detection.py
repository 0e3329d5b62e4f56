"""Where a spec comes from when nobody gives one: the model itself, transformers, or the blocks that repeat in it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from purestep.sharding.leaves import leaves_of
from purestep.sharding.legality import shared_across_units, ties_across_units
from purestep.sharding.module_paths import has_unit, is_called, named, outer_unit, takes, unit_of
from purestep.sharding.rules import ShardingSpec

_SMALLEST = 0.1
"""Blocks count that are at least this part, all together, of the largest repeated class."""


def find_spec(model: nn.Module, spec: ShardingSpec | None = None) -> tuple[ShardingSpec, str]:
    """The spec for a model, and where it comes from, as `Plan.source` says it.

    In order: `spec`, the model's own `sharding_spec`, transformers' `_no_split_modules`, blocks that repeat. The last
    two never fail: what cannot be a unit, because it is tied to something outside, is left to the root.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.mlp = nn.Linear(4, 4)
    ...     def forward(self, x):
    ...         return self.mlp(x)
    >>> spec, source = find_spec(nn.ModuleDict({"blocks": nn.ModuleList([Block(), Block()]), "head": nn.Linear(4, 1)}))
    >>> source
    'repeated blocks detected: blocks.* (Block x 2)'
    """
    if spec is not None and _checked(spec).is_open:
        base, source = find_spec(model)
        return spec.over(base), f"config, and {source}"
    if spec is not None:
        return spec, "config"
    own = getattr(model, "sharding_spec", None)
    if own is not None:
        return _checked(own), "model"
    modules = dict(model.named_modules())
    wanted, owner = _no_split(modules)
    if paths := _possible(model, modules, wanted):
        rules = _rules(modules, paths, by_class=True)
        told = f"_no_split_modules of {owner}: {named(rules)}"
    elif paths := _possible(model, modules, wanted := _repeated(modules)):
        rules = _rules(modules, paths, by_class=False)
        kinds = Counter(type(modules[path]).__name__ for path in paths)
        blocks = ", ".join(f"{kind} x {count}" for kind, count in kinds.items())
        told = f"repeated blocks detected: {named(rules)} ({blocks})"
    else:
        return ShardingSpec(), "none"
    if left := [path for path in wanted if not unit_of(path, paths) and not has_unit(path, paths)]:
        told += f"; left to the root, since other modules share their weights: {named(left)}"
    return ShardingSpec(units=rules, root=("**",)), told


def spec_of(model: nn.Module, spec: ShardingSpec | None = None) -> ShardingSpec:
    """`spec` if given, else the model's own `sharding_spec`, else one that is made of what repeats in the model."""
    return find_spec(model, spec)[0]


def _checked(spec: Any) -> ShardingSpec:
    if not isinstance(spec, ShardingSpec):
        raise TypeError(f"a sharding spec is a ShardingSpec, got {type(spec).__name__}")
    return spec


def _no_split(modules: dict[str, nn.Module]) -> tuple[list[str], str]:
    """Modules of the classes that transformers models, on their own or inside others, say must not be split; and the
    class of the first model that says so.
    """
    classes: set[str] = set()
    owner = ""
    for module in modules.values():
        names = getattr(module, "_no_split_modules", None)
        if isinstance(names, list | tuple | set | frozenset) and names:
            owner = owner or type(module).__name__
            classes.update(name for name in names if isinstance(name, str))
    named_so = (path for path, module in modules.items() if path and type(module).__name__ in classes)
    return [path for path in named_so if is_called(modules[path]) and _numel(modules[path])], owner


def _repeated(modules: dict[str, nn.Module]) -> list[str]:
    """The blocks of the largest class that stands in lists, and of others that are not much smaller."""
    by_class: dict[type, list[str]] = {}
    alike: set[type] = set()
    for children in _lists(modules):
        kinds: dict[type, list[str]] = {}
        for path in children:
            kinds.setdefault(type(modules[path]), []).append(path)
        for kind, paths in kinds.items():
            is_alike = _are_alike([modules[path] for path in paths])
            if is_alike:
                alike.add(kind)
            if is_alike or kind is not nn.Sequential:  # one Sequential says nothing about another
                by_class.setdefault(kind, []).extend(paths)
    blocks = {path for kind in alike for path in by_class[kind]}
    # A Sequential of blocks is a stage; any other block may have blocks inside, such as experts.
    blocks -= {p for p in blocks if type(modules[p]) is nn.Sequential and any(b.startswith(p + ".") for b in blocks)}
    outermost = [path for path in modules if path in blocks and not outer_unit(path, blocks)]
    sizes: Counter[type] = Counter()
    for path in outermost:
        sizes[type(modules[path])] += _numel(modules[path])
    return [path for path in outermost if sizes[type(modules[path])] >= _SMALLEST * max(sizes.values())]


def _lists(modules: dict[str, nn.Module]) -> Iterator[list[str]]:
    """For each list of modules, the paths of those that can be blocks; what stands there twice counts once."""
    for path, container in modules.items():
        if isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            children = ((f"{path}.{name}" if path else name, child) for name, child in container.named_children())
            yield [p for p, child in children if p in modules and _can_be_block(child)]


def _can_be_block(module: nn.Module) -> bool:
    """Whether it has parameters and runs them itself, and is more than one of torch's layers."""
    if not is_called(module) or next(module.parameters(), None) is None:
        return False
    return not type(module).__module__.startswith("torch.nn.") or next(module.children(), None) is not None


def _are_alike(blocks: list[nn.Module]) -> bool:
    """Whether most of several modules of one class have about the same parameters as the next one.

    Stages of a hierarchy are of one class, too, but each has its own width.
    """
    tables = [{(name, tuple(param.shape)) for name, param in block.named_parameters()} for block in blocks]
    alike = sum(2 * len(one & other) >= min(len(one), len(other)) for one, other in itertools.pairwise(tables))
    return len(blocks) >= 2 and 2 * alike >= len(blocks) - 1


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _possible(model: nn.Module, modules: dict[str, nn.Module], paths: list[str]) -> list[str]:
    """Those of `paths` that can be units next to each other; the others are left to what is around them."""
    chosen = set(paths)
    for path in sorted(chosen, key=lambda path: -path.count(".")):
        inner = {other for other in chosen if other.startswith(path + ".")}
        if 2 * sum(_numel(modules[other]) for other in inner) > _numel(modules[path]):
            chosen.discard(path)
        else:
            chosen -= inner
    params = leaves_of(model).params
    while True:
        places = [*ties_across_units(params, chosen), *(found for _, found in shared_across_units(model, chosen))]
        if not places:
            return [path for path in modules if path in chosen]
        chosen -= {unit for found in places for _, unit in found}


def _rules(modules: dict[str, nn.Module], paths: list[str], *, by_class: bool) -> tuple[str, ...]:
    """The shortest rules that take `paths` and nothing else: classes, or globs, or single paths."""
    rules: dict[str, None] = {}
    wanted = set(paths)
    exact: dict[str, bool] = {}
    for path in paths:
        *outer, _ = path.split(".")
        glob = ".".join([*("*" if part.isdigit() else part for part in outer), "*"])
        names = (type(modules[path]).__name__, glob) if by_class else (glob,)
        for name in names:
            if name not in exact:
                exact[name] = all(p in wanted for p, module in modules.items() if takes(name, p, module))
        rules[next((name for name in names if exact[name]), path)] = None
    return tuple(rules)
