"""Reading a checkpoint into a new `TrainState`: only if it is what was written, and fits what is asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import torch
from torch import Tensor

from purestep.state.blocks import Target, allocate
from purestep.state.checkpoint.casting import cast_into
from purestep.state.checkpoint.matching import EVERYTHING, Match, RestoreReport, Wanted, match
from purestep.state.checkpoint.opening import fingerprint, open_together, together
from purestep.state.checkpoint.renaming import Renaming
from purestep.state.checkpoint.tying import as_ties
from purestep.state.collective import gather_objects, on_every_rank
from purestep.state.digests import add_up, block_digest, block_digests
from purestep.state.files.commit import held_for_reading
from purestep.state.files.integrity import Contents, refuse_damage
from purestep.state.files.manifest import (
    MANIFEST,
    CheckpointError,
    DamagedCheckpointError,
    LeafInfo,
    decode_tree,
    digest_text,
)
from purestep.state.files.streaming import is_copied, read_leaves
from purestep.state.keys import Key
from purestep.state.placement import block_of, default_rank, is_dtensor
from purestep.state.train_state import TrainState, clone_leaf, map_leaves

_logger = logging.getLogger("purestep")
Strict = Literal["exact", "exact_but_dtype", "partial"]
Rename = Mapping[str, str | Sequence[str]]


@overload
def restore(
    path: str | os.PathLike,
    abstract_state: TrainState,
    *,
    device: torch.device | str | None = ...,
    verify: bool = ...,
    strict: Strict = ...,
    include: Sequence[str] = ...,
    rename: Rename | None = ...,
    ties: Iterable[Sequence[str]] = ...,
    with_report: Literal[False] = ...,
) -> TrainState: ...


@overload
def restore(
    path: str | os.PathLike,
    abstract_state: TrainState,
    *,
    device: torch.device | str | None = ...,
    verify: bool = ...,
    strict: Strict = ...,
    include: Sequence[str] = ...,
    rename: Rename | None = ...,
    ties: Iterable[Sequence[str]] = ...,
    with_report: Literal[True],
) -> tuple[TrainState, RestoreReport]: ...


def restore(
    path: str | os.PathLike,
    abstract_state: TrainState,
    *,
    device: torch.device | str | None = None,
    verify: bool = True,
    strict: Strict = "exact",
    include: Sequence[str] = EVERYTHING,
    rename: Rename | None = None,
    ties: Iterable[Sequence[str]] = (),
    with_report: bool = False,
) -> TrainState | tuple[TrainState, RestoreReport]:
    """Read a checkpoint into a new state of the shapes, dtypes and placements of `abstract_state`.

    The checkpoint may have been saved on any other topology: each rank reads the bytes of its own shards. Leaves are
    found by name, those of the optimizer too. In a process group this is a collective call, and if it fails on one
    rank, all raise.

    Args:
        path: the checkpoint's directory.
        abstract_state: says what to make: `ps.abstract_state(module, optimizer)`, or any state of the run. It is not
            changed, and its values, step and key are not used unless `strict` is `partial`.
        device: where plain (unsharded) leaves go; by default to where the abstract ones are, and to the CPU if those
            are meta tensors. Sharded leaves go to their mesh's device.
        verify: compare every file with `SHA256SUMS`, and the digest of every leaf that is not just copied from a file
            (but cut for another topology or cast, say) with the one it was saved with.
        strict: `exact`: the checkpoint must hold exactly the leaves asked for. `exact_but_dtype`: values are cast to
            the dtypes asked for; what would lose more than precision (floats to integers, complex numbers to real
            ones) is refused. `partial`: leaves that `include` lets in and the checkpoint has are loaded, cast if need
            be; all others are copied from `abstract_state`, which must have values there. Casts are logged.
        include: with `partial`, patterns of the names of leaves to load: `("params/*", "buffers/*")`. `*` stands for
            any text, dots and slashes too; `?` and `[...]` are as in `fnmatch`. The state's step and key are loaded
            if a pattern matches "step" or "key", as `*` does.
        rename: patterns of names in the checkpoint -> patterns of the names asked for: `{"old.*": "new.*"}`. `*`
            stands for any text, the same on both sides. A pattern that starts with a tree (`"opt_state/adamw/*"`) is
            about whole leaf names; any other is about module paths, in params, buffers, ema and every slot of the
            optimizer alike. The first pattern of each kind that matches counts, whole names before paths. Two names of
            one tied weight may become one if their values are equal, and a list of new names unties: `{"embed":
            ["embed", "head"]}`.
        ties: the names of each weight that the module of this state ties, as `module.ties` gives them. Where the
            checkpoint holds several of a tie, they become one, and must be equal. (The other way round needs nothing:
            a state that asks for the names of a tie one by one gets them, if the checkpoint was saved with its ties.)
        with_report: also return a `RestoreReport`: what was loaded, missing, unexpected, cast and renamed.

    Returns:
        The state, with step, key and the plain values of `extra` as saved; with the report if asked for.

    Raises:
        CheckpointError: it is missing, incomplete or damaged (names the files); or it does not fit the abstract state
            (names every missing, unexpected, mis-shaped and differently typed leaf); or a pattern matches nothing, or
            makes one leaf of two.
        ValueError, TypeError: `strict`, `include` or `rename` is not as described.

    >>> import tempfile, torch, purestep as ps
    >>> state = ps.TrainState(step=3, params={"w": torch.ones(2)}, buffers={}, opt_state={}, key=ps.key(0))
    >>> other = state.replace(params={"net.w": torch.zeros(2, dtype=torch.bfloat16)})
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = ps.save(f"{directory}/demo", state)
    ...     try:
    ...         ps.restore(path, other)
    ...     except ps.CheckpointError as error:
    ...         print(error)
    ...     _, report = ps.restore(path, other, strict="exact_but_dtype", rename={"*": "net.*"}, with_report=True)
    checkpoint ...demo (step 3) does not fit the state asked for:
      missing in the checkpoint: params/net.w
      not in the state asked for: params/w
      did you mean rename={'*': 'net.*'}?
    >>> print(report)
    restored ...demo (step 3, strict='exact_but_dtype')
      loaded: 1: params/net.w
      cast: 1: params/net.w (float32 -> bfloat16)
      renamed: 1: params/w -> params/net.w
    """
    wanted = _agree(abstract_state, strict, include, rename, ties)
    with held_for_reading(path):
        contents = open_together(path, verify=False)  # the files are verified while they are read
        found = together(path, lambda: match(contents, abstract_state, wanted))
        read = _Read(contents, device, verify)
        answers = gather_objects(together(path, lambda: read.leaves_of(found, abstract_state)))
    refuse_damage(contents, [line for damage, _ in answers for line in damage])
    if verify:
        moved = {name for _, names in answers for name in names}
        sources = {name: row for name, row in found.sources.items() if name in moved}
        parts = together(path, lambda: read.digests(sources))
        sums = add_up({name: block_of(read.leaves[name]) for name in sources}, parts)
        together(path, lambda: _compare(contents, sources, sums))
    together(path, read.refuse_casts)
    state = _build(contents, abstract_state, found, read)
    if found.report.cast and default_rank() == 0:
        _logger.warning("%s", found.report)
    return (state, found.report) if with_report else state


def _agree(
    state: TrainState, strict: str, include: Sequence[str], rename: Rename | None, ties: Iterable[Sequence[str]]
) -> Wanted:
    """What is wanted, the same on every rank: ranks that read different leaves would wait for each other."""
    wanted: list[Wanted] = []

    def said() -> dict[str, str]:
        wanted.append(Wanted(strict, include, Renaming.of(rename), as_ties(ties)))  # type: ignore[arg-type]
        if not isinstance(state, TrainState):
            raise TypeError(f"restore takes the state to make, e.g. ps.abstract_state(...), got {type(state).__name__}")
        rows = {name: [str(leaf.dtype), list(leaf.shape), _placement(leaf)] for name, leaf in state.leaves().items()}
        return {"options": repr(wanted[0]), "leaves": fingerprint(rows)}

    first, *others = on_every_rank(said)
    for rank, other in enumerate(others, start=1):
        wrong = " and ".join(name for name, value in first.items() if other[name] != value)
        if wrong:
            raise ValueError(f"every rank must restore the same, but {wrong} of rank {rank} are not those of rank 0")
    return wanted[0]


def _placement(leaf: Tensor) -> str:
    return str(leaf.placements) if is_dtensor(leaf) else ""  # type: ignore[attr-defined]


@dataclass
class _Read:
    """Leaves as they come from the files, in any order and by several threads."""

    contents: Contents
    device: torch.device | str | None
    digest: bool
    leaves: dict[str, Tensor] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    """What cannot be cast."""
    sums: dict[str, int] = field(default_factory=dict)
    """This rank's part of the digest of each leaf that was cast, of the values as stored."""

    def leaves_of(self, found: Match, asked: TrainState) -> tuple[list[str], list[str]]:
        """Read every leaf that was found, into new memory like that of `asked`.

        Returns:
            A line for each damage; and the names of leaves that were not just copied from a file: cut, put together,
            cast, or taken out of DCP's archives. Only of these does a digest say more than the sum of the file.
        """
        like = asked.leaves()
        stored = {
            name: (row, allocate(like[name], self.device, getattr(torch, row.dtype)))
            for name, row in found.sources.items()
        }
        moved = [name for name, (row, target) in stored.items() if not is_copied(row, target)]
        moved += [name for name, (_, target) in stored.items() if target.leaf.dtype != like[name].dtype]
        damage = read_leaves(
            self.contents,
            stored,
            verify=self.digest,
            done=lambda name: self._take(name, stored.pop(name)[1], like[name]),
        )
        return damage, moved

    def digests(self, names: Collection[str]) -> dict[str, int]:
        """This rank's part of the digests of some leaves, of the values as stored."""
        uncast = {name: block_of(self.leaves[name]) for name in names if name not in self.sums}
        return self.sums | block_digests(uncast)

    def refuse_casts(self) -> None:
        """Raise if a leaf could not be cast: it is known by now that its values are what was saved."""
        if self.failed:
            raise CheckpointError(f"checkpoint {self.contents.root}: {'; '.join(sorted(self.failed))}")

    def _take(self, name: str, stored: Target, like: Tensor) -> None:
        if stored.leaf.dtype == like.dtype:
            self.leaves[name] = stored.leaf
            return
        if self.digest:  # of the values before they are cast
            self.sums[name] = block_digest(block_of(stored.leaf))
        target = allocate(like, self.device)
        try:
            cast_into(target, stored)
        except ValueError as error:
            self.failed.append(f"leaf {name}: {error}")
        self.leaves[name] = target.leaf


def _compare(contents: Contents, sources: Mapping[str, LeafInfo], sums: Mapping[str, int]) -> None:
    wrong = {row.name: row for name, row in sources.items() if digest_text(sums[name]) != row.digest}
    if wrong:
        where = {name: sorted({block.file for block in row.blocks or ()}) or ["state/"] for name, row in wrong.items()}
        lines = [f"{name} (in {', '.join(where[name])})" for name in sorted(wrong)]
        raise DamagedCheckpointError(
            f"checkpoint {contents.root} is damaged: values differ from their digest in {MANIFEST}: " + "; ".join(lines)
        )


def _build(contents: Contents, given: TrainState, found: Match, read: _Read) -> TrainState:
    """The state: what was read, and copies of what `given` keeps."""

    def value(name: str, old: Any) -> Any:
        if name in read.leaves:
            return read.leaves[name]
        if name in found.plain or not isinstance(old, Tensor):
            return found.plain.get(name, old)
        copy = clone_leaf(old)
        return copy if read.device is None or is_dtensor(copy) else copy.to(read.device)

    manifest = contents.manifest
    counters = {"step": manifest.step, "key": Key.from_hex(manifest.key)}
    changes: dict[str, Any] = {name: counters[name] for name in found.counters}
    if found.whole_extra:
        changes["extra"] = decode_tree(manifest.extra, read.leaves.__getitem__)
    return map_leaves(value, given, **changes)
