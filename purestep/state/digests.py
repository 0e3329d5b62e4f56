"""Content digests that do not depend on where the elements live."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from purestep.state.placement import Block, block_of, default_world_size
from purestep.state.train_state import TrainState, named_leaves

_CHUNK = 1 << 16  # elements hashed at a time: 512 KiB of int64, which stays in a core's cache
# Odd multipliers: the fractional bits of the golden ratio, and MurmurHash3's 64-bit finalizer (Appleby, public domain).
_VALUE, _INDEX, _MIX1, _MIX2 = (
    0x9E3779B97F4A7C15 - 2**64,
    0xC2B2AE3D27D4EB4F - 2**64,
    0xFF51AFD7ED558CCD - 2**64,
    0xC4CEB9FE1A85EC53 - 2**64,
)


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

    The sum over elements, modulo 2**64, of a well-mixed function of (bits, index in the global tensor): sums of shards
    add up to the sum of the whole, so nothing is gathered.
    """
    blocks = {name: block_of(leaf) for name, leaf in leaves.items()}
    sums = {name: block_digest(block) for name, block in blocks.items()}
    by_groups: dict[tuple, list[str]] = {}
    for name, block in blocks.items():
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
    for name, leaf in named_leaves(state):
        if isinstance(leaf, Tensor):
            block = block_of(leaf)
            mine[name] = ((block.offset, tuple(block.local.shape)), (str(leaf.dtype), block_digest(block)))
        else:
            mine[name] = (None, repr(leaf))
    tables = gather_objects(mine)
    wrong = {name for table in tables for name in table.keys() ^ mine.keys()}
    seen: dict[tuple, Any] = {}
    for table in tables:
        wrong |= {name for name, (place, value) in table.items() if seen.setdefault((name, place), value) != value}
    if wrong:
        raise RuntimeError(
            f"replicas differ between ranks in {_some(sorted(wrong))}: states must be made from one key on every rank "
            "(ps.init) and change only through steps"
        )


def block_digest(block: Block) -> int:
    """The block's part of its leaf's sum, as a signed 64-bit integer."""
    local = block.local
    if local.is_meta:
        raise ValueError("an abstract state (meta tensors) has no values to digest")
    if local.numel() == 0:
        return 0
    bits = _bits(local)
    if _contiguous_in_global(block, tuple(local.shape)):
        start = sum(o * s for o, s in zip(block.offset, _strides(block.shape), strict=True)) * bits.shape[1]
        return _sum_range(bits.flatten(), start)
    index = _global_index(block, tuple(local.shape), bits.device).flatten()
    words = bits.shape[1]
    index = index.unsqueeze(1) * words + torch.arange(words, device=index.device)
    return _wrap(int(_mixed(bits.flatten().to(torch.int64), index.flatten()).sum().item()))


def _sum_range(bits: Tensor, start: int) -> int:
    total = 0
    index = torch.arange(start, start + min(_CHUNK, bits.numel()), dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.numel(), _CHUNK):
        chunk = bits[begin : begin + _CHUNK].to(torch.int64)
        total += int(_mixed(chunk, index[: chunk.numel()]).sum().item())
        index += _CHUNK
    return _wrap(total)


def _mixed(bits: Tensor, index: Tensor) -> Tensor:
    """Mix (bits, index) pairs of int64 to int64."""
    z = bits * _VALUE  # a fresh tensor: `bits` may be the leaf's own memory
    z += index * _INDEX
    z ^= (z >> 33).bitwise_and_(0x7FFFFFFF)
    z *= _MIX1
    z ^= (z >> 29).bitwise_and_(0x7FFFFFFFF)
    z *= _MIX2
    z ^= (z >> 32).bitwise_and_(0xFFFFFFFF)
    return z


def _bits(tensor: Tensor) -> Tensor:
    """The elements' bits as integers, shape (elements, words an element)."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    size = flat.element_size()
    if size == 16:
        return torch.view_as_real(flat).contiguous().view(torch.int64)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return flat.view(integer).unsqueeze(1)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _contiguous_in_global(block: Block, shape: tuple[int, ...]) -> bool:
    """Whether the block is one run of the row-major global tensor: whole in every dim after its first sliced one."""
    sliced = [dim for dim, (n, whole) in enumerate(zip(shape, block.shape, strict=True)) if n != whole]
    return not sliced or (len(sliced) == 1 and math.prod(shape[: sliced[0]]) == 1)


def _global_index(block: Block, shape: tuple[int, ...], device: torch.device) -> Tensor:
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (offset, stride) in enumerate(zip(block.offset, _strides(block.shape), strict=True)):
        steps = torch.arange(offset, offset + shape[dim], dtype=torch.int64, device=device) * stride
        index = index.unsqueeze(-1) + steps
    return index


def _wrap(total: int) -> int:
    """`total` modulo 2**64, as a signed 64-bit integer."""
    return (total + 2**63) % 2**64 - 2**63


def _some(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(repr(name) for name in names[:limit]) + more
