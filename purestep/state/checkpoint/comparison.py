"""Where two checkpoints or states differ. Needs no torch for two checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from purestep.state.files.integrity import Contents, open_checkpoint
from purestep.state.files.manifest import Manifest, plain_values
from purestep.state.workers import Progress

if TYPE_CHECKING:
    from purestep.state.train_state import TrainState

_SHOWN = 20  # lines a kind of difference


@dataclass(frozen=True)
class Change:
    """Something that `a` and `b` both have, and that is not the same in them."""

    name: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.a} / {self.b}"


@dataclass(frozen=True)
class ValueChange:
    """A leaf whose values differ; the numbers are None if only digests were compared."""

    name: str
    num_elements: int
    num_differing: int | None = None
    """Elements that differ, bit for bit (by value if the dtypes differ too)."""
    max_abs: float | None = None
    """Largest |a - b|; nan if one of the two is nan somewhere."""
    max_relative: float | None = None
    """Largest |a - b| / max(|a|, |b|)."""

    def __str__(self) -> str:
        if self.num_differing is None:
            return self.name
        share = f"{self.num_differing:,} of {self.num_elements:,} elements"
        return f"{self.name}: {share}, at most {self.max_abs:.3g} apart (relative {self.max_relative:.3g})"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `diff` found. `print` it for a list."""

    a: str
    b: str
    num_common: int
    """Leaves that both have."""
    step: tuple[int, int] | None
    """Their steps, if they differ."""
    key: tuple[str, str] | None
    """Their keys in hex, if they differ."""
    only_in_a: tuple[str, ...]
    """Leaves, and plain values of `extra`, that only `a` has."""
    only_in_b: tuple[str, ...]
    shapes: tuple[Change, ...]
    """Leaves of different shapes."""
    dtypes: tuple[Change, ...]
    """Leaves of different dtypes."""
    plain: tuple[Change, ...]
    """Plain values of `extra` that differ."""
    values: tuple[ValueChange, ...]
    """Leaves of one shape whose values differ. Those of different dtypes are here only if values were compared."""

    @property
    def equal(self) -> bool:
        """Whether there is no difference: then the digests of the two are the same."""
        same = self.step is None and self.key is None
        return same and not (
            self.only_in_a or self.only_in_b or self.shapes or self.dtypes or self.plain or self.values
        )

    def __str__(self) -> str:
        lines = [f"a: {self.a}", f"b: {self.b}"]
        if self.equal:
            return "\n".join([*lines, f"equal: step, key and {self.num_common} leaves"])
        lines += [f"step: {self.step[0]} / {self.step[1]}"] if self.step else []
        lines += [f"key: {self.key[0]} / {self.key[1]}"] if self.key else []
        for title, items in {
            "only in a": self.only_in_a,
            "only in b": self.only_in_b,
            "shapes differ": self.shapes,
            "dtypes differ": self.dtypes,
            "plain values differ": self.plain,
            "values differ": self.values,
        }.items():
            if items:
                share = f" of {self.num_common} leaves" if items is self.values else ""
                lines.append(f"{title}: {len(items)}{share}")
            lines += [f"  {item}" for item in items[:_SHOWN]]
            lines += [f"  and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
        return "\n".join(lines)


@dataclass(frozen=True)
class Row:
    """One leaf, as far as a comparison of tables needs it."""

    shape: tuple[int, ...]
    dtype: str
    digest: str


@dataclass(frozen=True)
class Side:
    """One of the two things compared."""

    label: str
    step: int
    key: str
    leaves: Mapping[str, Row]
    plain: Mapping[str, Any]
    source: Contents | TrainState


def diff(
    a: str | os.PathLike | TrainState,
    b: str | os.PathLike | TrainState,
    *,
    values: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Where two checkpoints or states differ: in leaves, shapes, dtypes, plain values, step and key.

    Whether values differ is told by the leaves' digests: of two checkpoints only the tables are read. Their data is
    taken to be what was saved, which `verify` checks; with `values=True` what is read is checked.

    Two checkpoints are compared by the calling process alone. With a state this is a collective call in a process
    group: every rank makes it, and every rank gets the whole answer.

    Args:
        a: a checkpoint's directory, or a state, sharded or not.
        b: what to compare it with, likewise; sharded in another way, if it is.
        values: also compare the values of the leaves that differ, one leaf after the other.
        progress: called with what is being done, bytes of leaves compared so far, and bytes in all.

    Returns:
        The differences; `.equal` says whether there are none.

    Raises:
        CheckpointError: a path that is no checkpoint, or a damaged one.

    >>> import tempfile, torch, purestep as ps
    >>> state = ps.TrainState(step=3, params={"w": torch.ones(4)}, buffers={}, opt_state={}, key=ps.key(0))
    >>> other = state.replace(step=4, params={"w": torch.tensor([1.0, 1.5, 1.0, 1.0])})
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = ps.save(f"{directory}/demo", state)
    ...     print(ps.diff(path, other, values=True))
    a: checkpoint ...demo
    b: TrainState(step=4, ...)
    step: 3 / 4
    values differ: 1 of 1 leaves
      params/w: 1 of 4 elements, at most 0.5 apart (relative 0.333)
    """
    if isinstance(a, str | os.PathLike) and isinstance(b, str | os.PathLike):
        return _compare(of_checkpoint(a), of_checkpoint(b), values, progress, collective=False)
    from purestep.state.checkpoint.measuring import side_together

    return _compare(side_together(a), side_together(b), values, progress, collective=True)


def of_checkpoint(path: str | os.PathLike) -> Side:
    """A checkpoint as one side of a comparison."""
    contents = open_checkpoint(path)
    manifest: Manifest = contents.manifest
    rows = {name: Row(leaf.shape, leaf.dtype, leaf.digest) for name, leaf in manifest.leaves.items()}
    return Side(f"checkpoint {contents.root}", manifest.step, manifest.key, rows, plain_values(manifest), contents)


def _compare(a: Side, b: Side, values: bool, progress: Progress | None, *, collective: bool) -> Comparison:
    common = [name for name in a.leaves if name in b.leaves]
    pairs = {name: (a.leaves[name], b.leaves[name]) for name in common}
    shapes = [Change(name, x.shape, y.shape) for name, (x, y) in pairs.items() if x.shape != y.shape]
    dtypes = [Change(name, x.dtype, y.dtype) for name, (x, y) in pairs.items() if x.dtype != y.dtype]
    alike = {name: x for name, (x, y) in pairs.items() if x.shape == y.shape and (values or x.dtype == y.dtype)}
    differing = [name for name, x in alike.items() if x != b.leaves[name]]
    if values and differing:
        from purestep.state.checkpoint.measuring import measure

        changes = measure(a, b, differing, progress or (lambda what, done, total: None), collective=collective)
    else:
        changes = [ValueChange(name, _count(alike[name].shape)) for name in differing]
    return Comparison(
        a=a.label,
        b=b.label,
        num_common=len(common),
        step=(a.step, b.step) if a.step != b.step else None,
        key=(a.key, b.key) if a.key != b.key else None,
        only_in_a=_only(a, b),
        only_in_b=_only(b, a),
        shapes=tuple(shapes),
        dtypes=tuple(dtypes),
        plain=tuple(
            Change(name, value, b.plain[name])
            for name, value in a.plain.items()
            if name in b.plain and _plain(value) != _plain(b.plain[name])
        ),
        values=tuple(changes),
    )


def _only(this: Side, other: Side) -> tuple[str, ...]:
    leaves = [name for name in this.leaves if name not in other.leaves]
    return (*leaves, *(name for name in this.plain if name not in other.plain))


def _plain(value: Any) -> tuple[type, str]:
    """What makes two plain values the same: type and digits, so that nan is nan, and 1 is neither 1.0 nor True."""
    return type(value), repr(value)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
