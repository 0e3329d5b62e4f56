"""Which stored tensor becomes which leaf of a module, and what is wrong about it, before a byte of them is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from purestep.state.checkpoint.casting import refusal
from purestep.state.checkpoint.renaming import Renaming, split, suggest
from purestep.state.checkpoint.tying import Ties, first_name, other_names
from purestep.state.files.manifest import CheckpointError
from purestep.state.mappings import FrozenDict

_SHOWN = 8  # names a line of a report


@dataclass(frozen=True)
class Stored:
    """What is known of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name for it."""


@dataclass(frozen=True)
class Asked:
    """What a module wants."""

    leaves: Mapping[str, Stored]
    """Its parameters and persistent buffers, tied ones once."""
    dtypes: Mapping[str, torch.dtype]
    constants: frozenset[str]
    """Names of its non-persistent buffers."""
    ties: Ties


@dataclass(frozen=True)
class LoadReport:
    """What `load_params` took from where. `print` it for a summary; names are the module's, in its order."""

    source: str
    """What was read, in words."""
    strict: str
    """How it was loaded."""
    loaded: tuple[str, ...]
    """Leaves that have values now."""
    missing: tuple[str, ...] = ()
    """Leaves the source does not have."""
    unexpected: tuple[str, ...] = ()
    """Names in the source that the module has no place for."""
    recomputed: tuple[str, ...] = ()
    """Names in the source of non-persistent buffers, which the module computes itself."""
    cast: Mapping[str, tuple[str, str]] = field(default_factory=FrozenDict)
    """Leaf -> (dtype in the source, dtype in the module), where they differ."""
    renamed: tuple[tuple[str, str], ...] = ()
    """(name in the source, name in the module), where they differ."""

    def __str__(self) -> str:
        rows = {
            "loaded": self.loaded,
            "missing": self.missing,
            "unexpected (not used)": self.unexpected,
            "computed by the module (not used)": self.recomputed,
            "cast": [f"{name} ({old} -> {new})" for name, (old, new) in self.cast.items()],
            "renamed": [f"{old} -> {new}" for old, new in self.renamed],
        }
        lines = [f"loaded {self.source} (strict={self.strict!r})"]
        for title, names in rows.items():
            if names or title == "loaded":
                more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                lines.append(f"  {title}: {len(names)}" + (": " if names else "") + ", ".join(names[:_SHOWN]) + more)
        return "\n".join(lines)


@dataclass(frozen=True)
class Found:
    """What to read."""

    sources: Mapping[str, tuple[str, ...]]
    """Leaf of the module -> stored names; several of one tied weight, which must hold the same values."""
    report: LoadReport


def match(
    where: str,
    stored: Mapping[str, Stored],
    asked: Asked,
    strict: str,
    renaming: Renaming,
    *,
    source_ties: Ties = (),
) -> Found:
    """Find every leaf of a module among stored tensors.

    Args:
        where: what they are stored in, for messages.
        stored: by name, with a tree before it: `params/blocks.0.weight`.
        asked: what the module wants.
        strict: see `load_params`.
        renaming: changes their names.
        source_ties: what the source knows to be tied, and stores under the first name only.

    Raises:
        CheckpointError: they do not fit as `strict` demands; names every leaf that does not.
    """
    by_path, renamed = _renamed(where, stored, asked, renaming)
    for name in asked.leaves:
        other = next((o for o in other_names(source_ties, f"params/{name}") if _path(o) in by_path), None)
        if name not in by_path and other is not None:
            by_path[name] = by_path[_path(other)]
    sources = {name: tuple(by_path[name]) for name in asked.leaves if name in by_path}
    beside = [name for name in by_path if name not in asked.leaves]
    casts = {name: (stored[olds[0]].dtype, asked.leaves[name].dtype) for name, olds in sources.items()}
    report = LoadReport(
        where,
        strict,
        loaded=tuple(sources),
        missing=tuple(name for name in asked.leaves if name not in by_path),
        unexpected=tuple(name for name in beside if name not in asked.constants),
        recomputed=tuple(name for name in beside if name in asked.constants),
        cast=FrozenDict({name: pair for name, pair in casts.items() if pair[0] != pair[1]}),
        renamed=tuple((old, new) for old, new in renamed if new in sources),
    )
    problems = _misfits(report, sources, stored, asked)
    if problems:
        problems += _advice(report, by_path, stored, asked, renaming)
        raise CheckpointError(f"{where} does not fit the module:" + "".join(f"\n  {line}" for line in problems))
    return Found(sources, report)


def _renamed(
    where: str, stored: Mapping[str, Stored], asked: Asked, renaming: Renaming
) -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
    """Module path -> names in the source, and (name in the source, module path) where a pattern changed it."""
    try:
        names = renaming.apply(stored)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None
    by_path: dict[str, list[str]] = {}
    renamed = []
    for old, new_names in names.items():
        for path in dict.fromkeys(_path(first_name(asked.ties, new)) for new in new_names):
            by_path.setdefault(path, []).append(old)
            if path != _path(old):
                renamed.append((_path(old), path))
    return by_path, renamed


def _misfits(
    report: LoadReport, sources: Mapping[str, Sequence[str]], stored: Mapping[str, Stored], asked: Asked
) -> list[str]:
    lines: list[str] = []
    if report.strict == "partial":
        lines += [] if report.loaded else ["nothing in it is a leaf of the module"]
    else:
        lines += [f"missing in it: {name}" for name in report.missing]
        lines += [f"not in the module: {name}" for name in report.unexpected]
    for name, olds in sources.items():
        wanted = asked.leaves[name]
        for old in olds:
            if stored[old].shape != wanted.shape:
                of_which = f" (of {_path(old)})" if len(olds) > 1 else ""
                lines.append(f"shape of {name}{of_which}: {stored[old].shape} in it, {wanted.shape} in the module")
        if name in report.cast:
            reason = "" if report.strict == "exact" else refusal(stored[olds[0]].dtype, asked.dtypes[name])
            if reason is not None:
                why = f" ({reason})" if reason else ""
                lines.append(f"dtype of {name}: {stored[olds[0]].dtype} in it, {wanted.dtype} in the module{why}")
    return lines


def _advice(
    report: LoadReport,
    by_path: Mapping[str, Sequence[str]],
    stored: Mapping[str, Stored],
    asked: Asked,
    renaming: Renaming,
) -> list[str]:
    """What would make it fit."""
    lines = []
    if not renaming.rules and report.missing:
        missing = {f"params/{name}": asked.leaves[name].shape for name in report.missing}
        unexpected = {f"params/{name}": stored[by_path[name][0]].shape for name in report.unexpected}
        guess = suggest(missing, unexpected, [f"params/{name}" for name in report.loaded])
        lines += [f"did you mean rename={guess}?"] if guess else []
    refused = (name for name, (old, _) in report.cast.items() if refusal(old, asked.dtypes[name]) is not None)
    if report.strict == "exact" and report.cast and not any(refused):
        lines.append("to cast, use strict='exact_but_dtype'")
    return lines


def _path(name: str) -> str:
    """The module path in a leaf's name."""
    return split(name)[1] or name
