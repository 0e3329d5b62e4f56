"""How `purestep inspect` shows a checkpoint: to be read by people, and by programs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from purestep._sizes import size
from purestep.state.files.integrity import Description
from purestep.state.files.manifest import LeafInfo

_OWN_ROWS = ("params", "buffers", "extra")  # groups shown leaf by leaf; the others mirror params
_RIGHT = (1, 4)  # columns of numbers


def as_text(description: Description, *, leaves: bool) -> str:
    """A checkpoint as a page of text.

    Args:
        description: what `describe` returns.
        leaves: every leaf on a line of its own; else leaves of repeated blocks share one.
    """
    groups = _grouped(description.leaves.values())
    lines: list[tuple[str, ...]] = []
    for group, members in groups.items():
        lines.append(_total(group, members))
        if leaves:
            lines += [_leaf(leaf) for leaf in members]
        elif group.split("/")[0] in _OWN_ROWS:
            lines += _patterns(members)
    if len(groups) > 1:
        lines.append(_total("all", list(description.leaves.values())))
    return "\n".join([*_header(description), "", *_aligned(lines)])


def as_table(description: Description) -> dict[str, Any]:
    """A checkpoint as a JSON object."""
    return {
        "path": str(description.path),
        "step": description.step,
        "key": description.key,
        "digest": description.digest,
        "format": description.format,
        "format_version": description.format_version,
        "bytes": description.bytes,
        "topology": dict(description.topology),
        "versions": dict(description.versions),
        "metadata": dict(description.metadata),
        "files": dict(description.files),
        "trees": {
            tree: {"leaves": len(members), "elements": sum(map(_elements, members)), "bytes": _bytes(members)}
            for tree, members in _by_tree(description.leaves.values()).items()
        },
        "leaves": [
            {
                "name": leaf.name,
                "shape": list(leaf.shape),
                "dtype": leaf.dtype,
                "placement": leaf.placement,
                "digest": leaf.digest,
                "bytes": leaf.nbytes,
            }
            for leaf in description.leaves.values()
        ],
    }


def printable(text: str) -> str:
    r"""`text` with what a terminal would act on written as escapes: names come from files that anybody may have made.

    >>> printable("params/a\x1b[2J")
    'params/a\\x1b[2J'
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _header(description: Description) -> Iterator[str]:
    topology, files = description.topology, description.files
    mesh = topology.get("mesh")
    mesh_text = ", mesh " + " x ".join(f"{axis} {n}" for axis, n in mesh.items()) if isinstance(mesh, dict) else ""
    folders: dict[str, int] = {}
    for name, num in files.items():
        folder = name.split("/")[0] + "/" if "/" in name else name
        folders[folder] = folders.get(folder, 0) + num
    parts = ", ".join(f"{folder} {size(num)}" for folder, num in sorted(folders.items()))
    processes = topology.get("world_size")
    yield f"checkpoint {description.path}"
    yield f"  step      {description.step}"
    yield f"  format    {description.format}, version {description.format_version}"
    yield f"  size      {size(description.bytes)} in {len(files) + 2} files ({parts})"
    yield f"  digest    {description.digest}"
    yield f"  key       {description.key}"
    yield f"  saved by  {processes} process{'es' if processes != 1 else ''}{mesh_text}"
    yield "  versions  " + ", ".join(f"{name} {version}" for name, version in description.versions.items())
    for name, value in description.metadata.items():
        yield f"  metadata  {name}: {json.dumps(value, ensure_ascii=False)}"


def _grouped(leaves: Iterable[LeafInfo]) -> dict[str, list[LeafInfo]]:
    """Leaves by tree; those of the optimizer by transform and slot."""
    groups: dict[str, list[LeafInfo]] = {}
    for leaf in leaves:
        parts = leaf.name.split("/")
        group = "/".join(parts[:3]) if parts[0] == "opt_state" and len(parts) > 3 else parts[0]
        groups.setdefault(group, []).append(leaf)
    order = ["params", "buffers", "opt_state", "ema", "extra"]
    return dict(sorted(groups.items(), key=lambda item: (order.index(item[0].split("/")[0]), item[0])))


def _by_tree(leaves: Iterable[LeafInfo]) -> dict[str, list[LeafInfo]]:
    trees: dict[str, list[LeafInfo]] = {}
    for leaf in leaves:
        trees.setdefault(leaf.name.split("/")[0], []).append(leaf)
    return trees


def _patterns(leaves: Iterable[LeafInfo]) -> list[tuple[str, ...]]:
    """One line for the leaves that differ in numbers in their names alone."""
    alike: dict[tuple, list[LeafInfo]] = {}
    for leaf in leaves:
        path = leaf.name.split("/", 1)[1]
        pattern = re.sub(r"(?<![^./])\d+(?![^./])", "*", path)
        alike.setdefault((pattern, leaf.shape, leaf.dtype), []).append(leaf)
    lines: list[tuple[str, ...]] = []
    for (pattern, shape, dtype), members in alike.items():
        count = f"{len(members)} x" if len(members) > 1 else ""
        name = pattern if count else members[0].name.split("/", 1)[1]
        lines.append((f"  {name}", count, str(shape), dtype, size(_bytes(members))))
    return lines


def _leaf(leaf: LeafInfo) -> tuple[str, ...]:
    return (f"  {leaf.name}", "", str(leaf.shape), leaf.dtype, size(leaf.nbytes), leaf.placement, leaf.digest)


def _total(name: str, leaves: list[LeafInfo]) -> tuple[str, ...]:
    num = len(leaves)
    dtypes = sorted({leaf.dtype for leaf in leaves})
    elements = f"{sum(map(_elements, leaves)):,} elements"
    return (name, f"{num} lea{'ves' if num != 1 else 'f'}", elements, ", ".join(dtypes), size(_bytes(leaves)))


def _elements(leaf: LeafInfo) -> int:
    return math.prod(leaf.shape)


def _bytes(leaves: Iterable[LeafInfo]) -> int:
    return sum(leaf.nbytes for leaf in leaves)


def _aligned(lines: list[tuple[str, ...]]) -> list[str]:
    widths = [max((len(line[i]) for line in lines if i < len(line)), default=0) for i in range(7)]
    text = []
    for line in lines:
        cells = [cell.rjust(w) if i in _RIGHT else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths))]  # noqa: B905
        text.append("  ".join(cells).rstrip())
    return text
