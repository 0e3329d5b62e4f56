"""Which leaf of a checkpoint becomes which leaf of a state, and what is wrong about it, before a byte is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from re import compile as compile_pattern
from typing import Any

from torch import Tensor

from purestep.state.checkpoint.casting import refusal
from purestep.state.checkpoint.renaming import Renaming, suggest
from purestep.state.checkpoint.tying import Ties, first_name, other_names
from purestep.state.files.integrity import Contents
from purestep.state.files.manifest import CheckpointError, LeafInfo, plain_values
from purestep.state.mappings import FrozenDict
from purestep.state.placement import local_tensor
from purestep.state.train_state import TrainState, named_leaves

STRICT = ("exact", "exact_but_dtype", "partial")
EVERYTHING = ("*",)
_SHOWN = 8  # names a line of a report


@dataclass(frozen=True)
class Wanted:
    """How a checkpoint may differ from the state asked for; see `restore`."""

    strict: str = "exact"
    include: tuple[str, ...] = EVERYTHING
    renaming: Renaming = field(default_factory=Renaming)
    ties: Ties = ()

    def __post_init__(self) -> None:
        if self.strict not in STRICT:
            raise ValueError(f"strict must be one of {', '.join(map(repr, STRICT))}, got {self.strict!r}")
        if isinstance(self.include, str) or not all(isinstance(pattern, str) for pattern in self.include):
            raise TypeError(f"include takes a tuple of patterns, ('params/*',), got {self.include!r}")
        object.__setattr__(self, "include", tuple(self.include))
        if self.strict != "partial" and self.include != EVERYTHING:
            raise ValueError(f"include={self.include!r} leaves something out: that needs strict='partial'")

    @property
    def partial(self) -> bool:
        """Whether leaves may come from the state given."""
        return self.strict == "partial"


@dataclass(frozen=True, kw_only=True)
class RestoreReport:
    """What `restore` took from where. `print` it for a summary; names are leaf names of the state, in its order."""

    path: Path
    """The checkpoint."""
    step: int
    """Its step."""
    strict: str
    """How it was restored."""
    loaded: tuple[str, ...]
    """Leaves, and plain values of `extra`, that came from the checkpoint."""
    missing: tuple[str, ...]
    """Those the checkpoint does not have: kept as given."""
    excluded: tuple[str, ...]
    """Those it has and `include` left out: kept as given."""
    unexpected: tuple[str, ...]
    """Names in the checkpoint that the state has no place for."""
    cast: Mapping[str, tuple[str, str]]
    """Leaf -> (dtype in the checkpoint, dtype in the state), where they differ."""
    renamed: tuple[tuple[str, str], ...]
    """(name in the checkpoint, name in the state), where they differ."""

    def __str__(self) -> str:
        casts = [f"{name} ({old} -> {new})" for name, (old, new) in self.cast.items()]
        rows = {
            "loaded": self.loaded,
            "missing (kept as given)": self.missing,
            "excluded (kept as given)": self.excluded,
            "unexpected (not used)": self.unexpected,
            "cast": casts,
            "renamed": [f"{old} -> {new}" for old, new in self.renamed],
        }
        lines = [f"restored {self.path} (step {self.step}, strict={self.strict!r})"]
        for title, names in rows.items():
            if names or title == "loaded":
                more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                lines.append(f"  {title}: {len(names)}" + (": " if names else "") + ", ".join(names[:_SHOWN]) + more)
        return "\n".join(lines)


@dataclass(frozen=True)
class Match:
    """What to read, and what to keep."""

    sources: Mapping[str, LeafInfo]
    """Leaf of the state -> its row in the checkpoint."""
    plain: Mapping[str, Any]
    """Plain value of `extra` -> the checkpoint's."""
    counters: frozenset[str]
    """Which of "step" and "key" come from the checkpoint."""
    whole_extra: bool
    """Whether `extra` is the checkpoint's tree as it is, down to its containers."""
    report: RestoreReport


def match(contents: Contents, state: TrainState, wanted: Wanted) -> Match:
    """Find every leaf of `state` in the checkpoint.

    Raises:
        CheckpointError: they do not fit as `wanted` demands; names every leaf that does not.
    """
    where = f"checkpoint {contents.root} (step {contents.manifest.step})"
    asked = dict(named_leaves(state))
    rows, plain, renamed = _renamed(where, contents, wanted)
    renamed += _untie(rows, asked, contents.manifest.ties)
    included = _included(where, asked, wanted)
    found = {name for name in asked if name in (rows if isinstance(asked[name], Tensor) else plain)}
    taken = [name for name in asked if name in found and name in included]
    # Plain values that are not asked for come along with their tree, where that is taken as it is.
    whole_extra = not (wanted.partial or any(old.startswith("extra/") for old, _ in renamed))
    unexpected = [name for name in (rows if whole_extra else {**rows, **plain}) if name not in found]
    sources = {name: rows[name] for name in taken if name in rows}
    report = RestoreReport(
        path=contents.root,
        step=contents.manifest.step,
        strict=wanted.strict,
        loaded=(*taken, *(name for name in plain if whole_extra and name not in asked)),
        missing=tuple(name for name in asked if name not in found),
        excluded=tuple(name for name in asked if name in found and name not in included),
        unexpected=tuple(unexpected),
        cast=FrozenDict(_casts(sources, asked)),
        renamed=tuple((old, new) for old, new in renamed if new in taken),
    )
    problems = _misfits(report, sources, asked, wanted)
    if problems:
        problems += _advice(report, rows, asked, wanted)
        raise CheckpointError(f"{where} does not fit the state asked for:" + "".join(f"\n  {x}" for x in problems))
    return Match(
        sources=sources,
        plain={name: plain[name] for name in taken if name in plain},
        counters=frozenset({"step", "key"} & included),
        whole_extra=whole_extra,
        report=report,
    )


def _renamed(
    where: str, contents: Contents, wanted: Wanted
) -> tuple[dict[str, LeafInfo], dict[str, Any], list[tuple[str, str]]]:
    """The checkpoint's rows and plain values under the names of the state, and (old, new) where they differ."""
    old_rows, old_plain = contents.manifest.leaves, plain_values(contents.manifest)
    try:
        names = wanted.renaming.apply([*old_rows, *old_plain])
        names = {old: tuple(dict.fromkeys(first_name(wanted.ties, x) for x in new)) for old, new in names.items()}
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None
    origin: dict[str, str] = {}
    for old, new_names in names.items():
        for new in new_names:
            other = origin.setdefault(new, old)
            if other != old and not _tied(old_rows.get(other), old_rows.get(old)):
                raise CheckpointError(
                    f"{where}: {other} and {old} would both become {new}, and their values differ: "
                    "only the two names of one tied weight can; write narrower rename patterns"
                )
    rows = {new: old_rows[old] for new, old in origin.items() if old in old_rows}
    plain = {new: old_plain[old] for new, old in origin.items() if old in old_plain}
    return rows, plain, [(old, new) for old, new_names in names.items() for new in new_names if new != old]


def _untie(rows: dict[str, LeafInfo], asked: Mapping[str, Any], ties: Ties) -> list[tuple[str, str]]:
    """Add what is asked for under another name of a tied leaf; (name in the checkpoint, name added) of each."""
    added = []
    for name in asked if ties else ():
        held = [other for other in other_names(ties, name) if other in rows] if name not in rows else []
        if held:
            added.append((held[0], name))
    rows.update({name: rows[old] for old, name in added})
    return added


def _tied(a: LeafInfo | None, b: LeafInfo | None) -> bool:
    """Whether two leaves hold the same values, as two names of one weight do."""
    return a is not None and b is not None and (a.shape, a.dtype, a.digest) == (b.shape, b.dtype, b.digest)


def _included(where: str, asked: Mapping[str, Any], wanted: Wanted) -> set[str]:
    names = ["step", "key", *asked]
    included: set[str] = set()
    for pattern in wanted.include:
        matches = compile_pattern(translate(pattern)).match
        new = {name for name in names if matches(name)}
        if not new:
            raise CheckpointError(f"{where}: include pattern {pattern!r} matches no leaf of the state asked for")
        included |= new
    return included


def _misfits(
    report: RestoreReport, sources: Mapping[str, LeafInfo], asked: Mapping[str, Any], wanted: Wanted
) -> list[str]:
    """One line for everything that keeps the checkpoint from being the state asked for."""
    lines: list[str] = []
    if wanted.partial:
        kept = [name for name in (*report.missing, *report.excluded) if isinstance(asked[name], Tensor)]
        lines += [
            f"not loaded, and a meta tensor in the state given: {name}"
            for name in kept
            if local_tensor(asked[name]).is_meta
        ]
        if not (report.loaded or lines):
            lines.append("nothing that include lets in is in the checkpoint")
    else:
        lines += [f"missing in the checkpoint: {name}" for name in report.missing]
        lines += [f"not in the state asked for: {name}" for name in report.unexpected]
    for name, row in sources.items():
        shape = tuple(asked[name].shape)
        if row.shape != shape:
            lines.append(f"shape of {name}: {row.shape} in the checkpoint, {shape} asked for")
        if name in report.cast:
            reason = "" if wanted.strict == "exact" else refusal(row.dtype, asked[name].dtype)
            if reason is not None:
                why = f" ({reason})" if reason else ""
                lines.append(f"dtype of {name}: {row.dtype} in the checkpoint, {_dtype(asked[name])} asked for{why}")
    return lines


def _advice(report: RestoreReport, rows: Mapping[str, LeafInfo], asked: Mapping[str, Any], wanted: Wanted) -> list[str]:
    """What would make it fit."""
    lines = []
    if not wanted.renaming.rules:
        missing = {name: tuple(asked[name].shape) for name in report.missing if isinstance(asked[name], Tensor)}
        unexpected = {name: rows[name].shape for name in report.unexpected if name in rows}
        guess = suggest(missing, unexpected, [name for name in rows if name not in unexpected])
        lines += [f"did you mean rename={guess}?"] if guess else []
    refused = (name for name, (old, _) in report.cast.items() if refusal(old, asked[name].dtype) is not None)
    if wanted.strict == "exact" and report.cast and not any(refused):
        lines.append("to cast, use strict='exact_but_dtype'")
    return lines


def _casts(sources: Mapping[str, LeafInfo], asked: Mapping[str, Tensor]) -> dict[str, tuple[str, str]]:
    pairs = {name: (row.dtype, _dtype(asked[name])) for name, row in sources.items()}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def _dtype(leaf: Tensor) -> str:
    return str(leaf.dtype).removeprefix("torch.")
