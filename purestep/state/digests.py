"""Content digests that do not depend on where the elements live."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from purestep.state.blocks import flat_bytes
from purestep.state.names import some
from purestep.state.placement import Block, block_of, default_world_size
from purestep.state.sums import (
    CHUNK_BYTES,
    sum_of_elements,
    sum_of_run,
    sum_of_run_on_device,
    sums_of_small_runs,
)
from purestep.state.train_state import TrainState, named_leaves
from purestep.state.workers import in_parallel

_SMALL_BYTES = 1 << 12  # blocks up to this are summed many at a time
_TASK_BYTES = 16 * CHUNK_BYTES  # of a large block, summed by one thread
_LONG_RUN_BYTES = 1 << 12  # runs of a block in pieces that are worth a call each
_ELEMENTS = 1 << 16  # of shorter pieces, summed at a time


def digest(state: TrainState) -> str:
    """SHA-256 (hex) of a state; see `TrainState.digest`."""
    return digest_of_table(state, leaf_digests(state.leaves()))


def digest_of_table(state: TrainState, sums: Mapping[str, int]) -> str:
    """SHA-256 (hex) over the step, the key, and a table of leaves: name, dtype, shape and sum, or plain value."""
    rows: list[list[Any]] = [["step", state.step], ["key", state.key.hex()]]
    for name, leaf in sorted(named_leaves(state), key=lambda item: item[0]):
        if isinstance(leaf, Tensor):
            rows.append([name, str(leaf.dtype), list(leaf.shape), sums[name]])
        else:
            rows.append([name, type(leaf).__name__, repr(leaf)])
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def leaf_digests(leaves: Mapping[str, Tensor]) -> dict[str, int]:
    """A 64-bit content sum a leaf, equal on every rank. Collective when a leaf is sharded.

    The sum over the leaf's words, modulo 2**64, of each word times a key that its index gives: sums of shards add up to
    the sum of the whole, so nothing is gathered. `purestep.state.sums` says what it is good for.
    """
    blocks = {name: block_of(leaf) for name, leaf in leaves.items()}
    return add_up(blocks, block_digests(blocks))


def add_up(blocks: Mapping[str, Block], parts: Mapping[str, int]) -> dict[str, int]:
    """The sum of each leaf from this rank's part of it (`block_digest`). Collective when a leaf is sharded."""
    sums = dict(parts)
    by_groups: dict[tuple, list[str]] = {}
    for name, block in sorted(blocks.items(), key=lambda item: item[0]):  # ranks may have read them in another order
        if block.shard_groups:
            by_groups.setdefault(block.shard_groups, []).append(name)
    for groups, names in by_groups.items():
        device = blocks[names[0]].local.device
        total = torch.tensor([sums[name] for name in names], dtype=torch.int64, device=device)
        for group in groups:
            torch.distributed.all_reduce(total, group=group)
        sums.update(zip(names, total.tolist(), strict=True))
    return sums


def check_replicas(state: TrainState) -> None:
    """Raise unless every rank holds the same replicated values. Collective: every rank calls it, all raise or none.

    Step, key and plain values are compared with every rank, and each leaf with the ranks that should hold the same
    block of it: a plain tensor with every rank, a DTensor along the mesh axes that replicate it.

    Raises:
        RuntimeError: replicas differ; names the leaves.
    """
    if default_world_size() == 1:
        return
    from purestep.state.collective import gather_objects

    mine: dict[str, tuple] = {"step": (None, state.step), "key": (None, state.key.hex())}
    blocks = {name: block_of(leaf) for name, leaf in named_leaves(state) if isinstance(leaf, Tensor)}
    sums = block_digests(blocks)
    for name, leaf in named_leaves(state):
        if name in blocks:
            block = blocks[name]
            mine[name] = ((block.offset, tuple(block.local.shape)), (str(leaf.dtype), sums[name]))
        else:
            mine[name] = (None, repr(leaf))
    tables = gather_objects(mine)
    wrong = {name for table in tables for name in table.keys() ^ mine.keys()}
    seen: dict[tuple, Any] = {}
    for table in tables:
        wrong |= {name for name, (place, value) in table.items() if seen.setdefault((name, place), value) != value}
    if wrong:
        raise RuntimeError(
            f"replicas differ between ranks in {some(sorted(wrong))}: states must be made from one key on every rank "
            "(ps.init) and change only through steps"
        )


def block_digest(block: Block) -> int:
    """The block's part of its leaf's sum, as a signed 64-bit integer."""
    return block_digests({"": block})[""]


def block_digests(blocks: Mapping[str, Block]) -> dict[str, int]:
    """`block_digest` of each: small blocks many at a time, large ones by several threads."""
    for name, block in blocks.items():
        if block.local.is_meta:
            raise ValueError(f"an abstract state (meta tensors) has no values to digest{name and f': {name!r}'}")
    sums = dict.fromkeys(blocks, 0)
    small: dict[str, tuple[Any, int]] = {}
    tasks: list[tuple[str, Callable[[], int]]] = []
    for name, block in blocks.items():
        if block.local.numel() == 0:
            continue
        start = _start_of_run(block)
        if start is None:
            tasks.append((name, partial(_sum_of_pieces, block)))
        elif block.local.device.type != "cpu":
            tasks.append((name, partial(_sum_on_device, block.local, start)))
        elif block.local.nbytes <= _SMALL_BYTES:
            small[name] = flat_bytes(block.local).numpy(), start
        else:
            tasks += [(name, task) for task in _tasks(flat_bytes(block.local).numpy(), start)]
    sums.update(zip(small, sums_of_small_runs(list(small.values())), strict=True))
    parts = in_parallel(lambda item: item[1](), tasks, serial=len(tasks) < 4)
    for (name, _), part in zip(tasks, parts, strict=True):
        sums[name] += part
    return {name: _wrap(total) for name, total in sums.items()}


def _tasks(data: Any, start: int) -> list[Callable[[], int]]:
    """The sum of a long run in parts, cut where a chunk ends."""
    first = min(len(data), _TASK_BYTES - start % CHUNK_BYTES)
    cuts = [0, *range(first, len(data), _TASK_BYTES), len(data)]
    return [partial(sum_of_run, data[a:b], start + a) for a, b in pairwise(cuts)]


def _sum_on_device(local: Tensor, start: int) -> int:
    return int(sum_of_run_on_device(flat_bytes(local), start).item())


def _sum_of_pieces(block: Block) -> int:
    """The sum of a block whose elements do not follow each other in the leaf: columns, say."""
    width, shape = block.local.element_size(), tuple(block.local.shape)
    rows, length = _runs(shape, block.shape)
    starts = _global_index(block, (*shape[:rows], *(1 for _ in shape[rows:])), block.local.device).flatten()
    if block.local.device.type == "cpu" and length * width >= _LONG_RUN_BYTES:
        data = flat_bytes(block.local).numpy().reshape(-1, length * width)
        return sum(sum_of_run(run, start * width) for run, start in zip(data, starts.tolist(), strict=True))
    bits = _bits(block.local)  # (elements, words an element)
    words = bits.shape[1]
    step = max(1, _ELEMENTS // length)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    within = torch.arange(length * words, device=bits.device)
    for first in range(0, len(starts), step):
        index = (starts[first : first + step] * words).unsqueeze(1) + within
        part = bits[first * length : (first + step) * length]
        total += sum_of_elements(part.flatten(), index.flatten())
    return int(total.item())


def _runs(shape: tuple[int, ...], whole: tuple[int, ...]) -> tuple[int, int]:
    """(leading dims that number the runs, elements a run) of a block of lengths `shape`, each a run of the leaf."""
    last = max((dim for dim, (n, of) in enumerate(zip(shape, whole, strict=True)) if n != of), default=0)
    return last, math.prod(shape[last:])


def _bits(tensor: Tensor) -> Tensor:
    """The elements' bits as integers, shape (elements, words an element)."""
    width = tensor.element_size()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(width, torch.int64)
    return flat_bytes(tensor).view(integer).view(-1, max(1, width // 8))


def _start_of_run(block: Block) -> int | None:
    """Byte of the leaf that the block starts at; None if the block is not one run of the leaf."""
    shape = tuple(block.local.shape)
    if shape == block.shape:
        return 0
    rows, _ = _runs(shape, block.shape)
    if math.prod(shape[:rows]) != 1:
        return None
    return sum(o * s for o, s in zip(block.offset, _strides(block.shape), strict=True)) * block.local.element_size()


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _global_index(block: Block, shape: tuple[int, ...], device: torch.device) -> Tensor:
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (offset, stride) in enumerate(zip(block.offset, _strides(block.shape), strict=True)):
        steps = torch.arange(offset, offset + shape[dim], dtype=torch.int64, device=device) * stride
        index = index.unsqueeze(-1) + steps
    return index


def _wrap(total: int) -> int:
    """`total` modulo 2**64, as a signed 64-bit integer."""
    return (total + 2**63) % 2**64 - 2**63
