"""Paths in a module tree: what globs take, which unit is around a path, and how a list of paths is told."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import nn

from purestep.sharding.rules import pattern


def takes(rule: str, path: str, module: nn.Module) -> bool:
    """Whether a rule, a glob or a class name, takes the module at `path`."""
    return path != "" and (type(module).__name__ == rule or pattern(rule).fullmatch(path) is not None)


def around(path: str) -> Iterator[str]:
    """`path` and the paths of the modules around it, innermost first, without the root.

    >>> list(around("blocks.0.mlp"))
    ['blocks.0.mlp', 'blocks.0', 'blocks']
    """
    while path:
        yield path
        path = path.rpartition(".")[0]


def unit_of(path: str, units: Collection[str]) -> str:
    """The innermost of `units` that is `path` or around it; "" for the root unit."""
    return next((outer for outer in around(path) if outer in units), "")


def outer_unit(path: str, units: Collection[str]) -> str:
    """The innermost of `units` around `path`, not itself; "" for the root unit."""
    return unit_of(path.rpartition(".")[0], units)


def has_unit(path: str, units: Iterable[str]) -> bool:
    """Whether one of `units` is inside the module at `path`."""
    return any(unit.startswith(path + ".") for unit in units)


def is_called(module: nn.Module) -> bool:
    """Whether the module has a forward: what has none, such as a ModuleList, never runs hooks."""
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def named(paths: Iterable[str], limit: int = 8) -> str:
    """The paths as a list in a sentence.

    >>> named(["a", "b", "c"], limit=2)
    'a, b, ... (3 in all)'
    """
    paths = list(paths)
    return ", ".join(paths[:limit]) + (f", ... ({len(paths)} in all)" if len(paths) > limit else "")


def children_first(modules: Mapping[str, nn.Module], paths: Collection[str]) -> list[str]:
    """`paths` in the order of `modules`, but what is inside another before it."""
    return sorted((path for path in modules if path in paths), key=lambda path: -path.count("."))
