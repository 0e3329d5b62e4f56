"""How far the values of two checkpoints or states are apart, leaf by leaf, each rank its own blocks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from purestep.state.blocks import Target, flat_bytes, whole_tensor
from purestep.state.checkpoint.comparison import Row, Side, ValueChange, of_checkpoint
from purestep.state.checkpoint.opening import together
from purestep.state.collective import gather_objects, on_every_rank
from purestep.state.digests import block_digest, leaf_digests
from purestep.state.files.integrity import Contents
from purestep.state.files.manifest import DamagedCheckpointError, digest_text
from purestep.state.files.reading import LeafReader
from purestep.state.placement import Block, block_of, default_rank, is_dtensor, local_tensor
from purestep.state.train_state import TrainState, named_leaves
from purestep.state.workers import Progress

_CHUNK = 1 << 20  # elements compared at a time


@dataclass
class _Part:
    """What one rank found in its block of a leaf."""

    count: int = 0
    max_abs: float = 0.0
    max_relative: float = 0.0
    digests: tuple[int, int] = (0, 0)


def side_together(source: str | os.PathLike | TrainState) -> Side:
    """A checkpoint or a state as one side of a comparison. Collective."""
    if not isinstance(source, TrainState):
        return together(source, lambda: of_checkpoint(source))
    leaves = source.leaves()
    sums = leaf_digests(leaves)
    rows = {
        name: Row(tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."), digest_text(sums[name]))
        for name, leaf in leaves.items()
    }
    plain = {name: value for name, value in named_leaves(source) if not isinstance(value, Tensor)}
    return Side(repr(source), source.step, source.key.hex(), rows, plain, source)


def measure(a: Side, b: Side, names: Sequence[str], progress: Progress, *, collective: bool) -> list[ValueChange]:
    """How the values of the leaves `names` differ; they have one shape. Collective if told so.

    Raises:
        DamagedCheckpointError: what was read of a checkpoint is not what was saved; names the leaves.
    """
    mine: list[_Part] = []
    failures: list[Exception] = []
    rows = {name: a.leaves[name] for name in names}
    sizes = {name: math.prod(row.shape) * getattr(torch, row.dtype).itemsize for name, row in rows.items()}
    done, total = 0, sum(sizes.values())
    with ExitStack() as stack:
        values = [_Values(side, stack) for side in (a, b)]
        for name in names:
            try:
                mine.append(_measure(values, name, a.leaves[name].shape, collective))
            except Exception as error:  # raised at the end: the other ranks may wait for this one at the next leaf
                failures.append(error)
                mine.append(_Part())
            done += sizes[name]
            progress("comparing", done, total)
    if collective:
        on_every_rank(lambda: _raise_first(failures))
    _raise_first(failures)
    parts = gather_objects(mine) if collective else [mine]
    found = {name: [of_rank[i] for of_rank in parts] for i, name in enumerate(names)}
    for i, side in enumerate((a, b)):
        if isinstance(side.source, Contents):
            sums = {name: sum(part.digests[i] for part in found[name]) for name in names}
            _check_digests(side, sums)
    changes = [
        ValueChange(
            name,
            math.prod(a.leaves[name].shape),
            sum(part.count for part in found[name]),
            _worst(part.max_abs for part in found[name]),
            _worst(part.max_relative for part in found[name]),
        )
        for name in names
    ]
    return [change for change in changes if change.num_differing]  # a change of dtype alone is none of values


class _Values:
    """The values of one side, a block of a leaf at a time."""

    def __init__(self, side: Side, stack: ExitStack) -> None:
        if isinstance(side.source, TrainState):
            self.leaves = side.source.leaves()
        else:
            self.leaves = {}
            self._rows = side.source.manifest.leaves
            self._reader = stack.enter_context(LeafReader(side.source))

    def in_memory(self, name: str, like: Tensor | None, block: Block) -> Tensor | None:
        """The block of a state's leaf; None for a checkpoint. Collective if the leaf is sharded, and not as `like`."""
        leaf = self.leaves.get(name)
        if leaf is None:
            return None
        if is_dtensor(leaf):
            if like is not None and _where(leaf) == _where(like):
                return local_tensor(leaf)
            leaf = whole_tensor(leaf)
        for dim, (start, length) in enumerate(zip(block.offset, block.local.shape, strict=True)):
            leaf = leaf.narrow(dim, start, length)
        return leaf

    def on_disk(self, name: str, block: Block) -> Tensor:
        """The block of a checkpoint's leaf."""
        row = self._rows[name]
        local = torch.empty(block.local.shape, dtype=getattr(torch, row.dtype))
        self._reader.read(row, Target(local, local, block.offset))
        return local


def _measure(values: Sequence[_Values], name: str, shape: tuple[int, ...], collective: bool) -> _Part:
    """This rank's part of a leaf: its block, where a state shards the leaf; else rank 0 looks at the whole."""
    leaves = [side.leaves[name] for side in values if name in side.leaves]
    like = next(filter(is_dtensor, leaves), None)
    if like is not None:
        block = block_of(like)
    else:
        whole = torch.empty(shape, device="meta")
        block = Block(whole, (0,) * len(shape), shape, not collective or default_rank() == 0, ())
    in_memory = [side.in_memory(name, like, block) for side in values]
    if not block.primary:
        return _Part()
    a, b = (
        side.on_disk(name, block) if tensor is None else tensor for side, tensor in zip(values, in_memory, strict=True)
    )
    part = _gap(a, b.to(a.device))
    part.digests = tuple(block_digest(Block(x, block.offset, shape, True, ())) for x in (a, b))  # type: ignore[assignment]
    return part


def _gap(a: Tensor, b: Tensor) -> _Part:
    part = _Part()
    a, b = (x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for x in (a, b))
    for x, y in zip(a.split(_CHUNK), b.split(_CHUNK), strict=True):
        differ = _differ(x, y)
        x, y = _wide(x)[differ], _wide(y)[differ]
        if x.numel() == 0:
            continue
        gap, scale = (x - y).abs(), torch.maximum(x.abs(), y.abs())
        relative = torch.where(gap == 0, 0.0, torch.where(gap.isinf(), torch.inf, gap / scale))
        part.count += x.numel()
        part.max_abs = _worst([part.max_abs, gap.max().item()])
        part.max_relative = _worst([part.max_relative, relative.max().item()])
    return part


def _differ(a: Tensor, b: Tensor) -> Tensor:
    """Which elements differ: bit for bit, or in value if the dtypes differ."""
    if a.dtype == b.dtype:
        ours, theirs = (flat_bytes(x).view(-1, x.element_size()) for x in (a, b))
        return (ours != theirs).any(1)
    ours, theirs = _wide(a), _wide(b)
    return (ours != theirs) & ~(ours.isnan() & theirs.isnan())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _where(leaf: Tensor) -> tuple:
    return leaf.device_mesh, tuple(leaf.placements)  # type: ignore[attr-defined]


def _worst(numbers: Iterable[float]) -> float:
    """The largest; nan if there is one."""
    numbers = list(numbers)
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def _raise_first(failures: list[Exception]) -> None:
    if failures:
        raise failures[0]


def _check_digests(side: Side, sums: Mapping[str, int]) -> None:
    wrong = [name for name, total in sums.items() if digest_text(total) != side.leaves[name].digest]
    if wrong:
        raise DamagedCheckpointError(f"{side.label} is damaged: values differ from their digest: {', '.join(wrong)}")
