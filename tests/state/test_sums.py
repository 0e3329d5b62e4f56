"""The arithmetic of digests: it is what it says, however the bytes are cut and wherever they are."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

import purestep.state.digests as digests
import purestep.state.sums as sums
from purestep.state.placement import Block
from purestep.state.sums import CHUNK_BYTES, sum_of_elements, sum_of_run, sum_of_run_on_device, sums_of_small_runs


def _by_definition(data: np.ndarray, start: int) -> int:
    """Every 16-bit word times its key, with Python's integers."""
    padded = np.zeros(-(-(start % 8 + len(data)) // 8) * 8, dtype=np.uint8)
    padded[start % 8 : start % 8 + len(data)] = data
    total = 0
    for i, word in enumerate(padded.view("<u2").tolist(), start=start // 8 * 4):
        window, q = divmod(i, 4)
        chunk, place = divmod(window, CHUNK_BYTES // 8)
        of_chunk, in_chunk = sums._keys_of_chunks(chunk, 1)[0].tolist(), sums._keys_in_chunk()[:, place].tolist()
        key = sum(of_chunk[r] * in_chunk[r] << 16 * (q - r) for r in range(q + 1))
        assert key % 2 == 1
        total += word * key
    return total % 2**64


def _random_bytes(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


RUNS = [(0, 0), (1, 0), (8, 0), (24, 8), (13, 3), (7, CHUNK_BYTES - 3), (100, 2 * CHUNK_BYTES - 50), (9, 2**40 + 5)]


@pytest.mark.parametrize(("size", "start"), RUNS)
def test_every_way_of_summing_is_the_definition(size, start):
    data = _random_bytes(size)
    expected = _by_definition(data, start)
    assert sum_of_run(data, start) == expected
    assert int(sum_of_run_on_device(torch.from_numpy(data), start)) % 2**64 == expected
    assert int(sum_of_elements(torch.from_numpy(data), torch.arange(start, start + size))) % 2**64 == expected
    if size:
        assert sums_of_small_runs([(data, start)] * 2) == [expected] * 2


def test_many_small_runs_are_summed_as_each_is(monkeypatch):
    monkeypatch.setattr(sums, "_BATCH_WINDOWS", 20)
    draw = random.Random(0)
    runs = [(_random_bytes(draw.randrange(1, 300)), draw.randrange(5 * CHUNK_BYTES)) for _ in range(60)]
    assert sums_of_small_runs(runs) == [sum_of_run(*run) for run in runs]
    assert sums_of_small_runs([]) == []


def test_parts_add_up_wherever_they_are_cut(monkeypatch):
    monkeypatch.setattr(sums, "_DEVICE_BYTES", CHUNK_BYTES)
    data = _random_bytes(3 * CHUNK_BYTES + 77)
    whole = sum_of_run(data, 11)
    draw = random.Random(1)
    for _ in range(20):
        cuts = [0, *sorted(draw.randrange(len(data)) for _ in range(4)), len(data)]
        parts = [(data[a:b], 11 + a) for a, b in pairwise(cuts)]
        assert sum(sum_of_run(*part) for part in parts) % 2**64 == whole
        on_device = [int(sum_of_run_on_device(torch.from_numpy(part), start)) for part, start in parts]
        assert sum(on_device) % 2**64 == whole


@pytest.mark.parametrize("threads", [1, 3])
def test_large_leaves_are_summed_in_parts_by_threads(monkeypatch, threads):
    monkeypatch.setattr("purestep.state.workers.num_workers", lambda: threads)
    monkeypatch.setattr(digests, "_TASK_BYTES", CHUNK_BYTES)
    leaves = {f"{i}": torch.randn(50_000 + i) for i in range(5)}
    expected = {name: sum_of_run(leaf.view(torch.uint8).numpy(), 0) for name, leaf in leaves.items()}
    assert {name: value % 2**64 for name, value in digests.leaf_digests(leaves).items()} == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.complex128, torch.bfloat16])
def test_blocks_of_columns_add_up_in_long_and_in_short_pieces(monkeypatch, dtype):
    whole = torch.randn(5, 6, 40).to(dtype)
    expected = digests.leaf_digests({"x": whole})["x"] % 2**64
    for least in (1, 1 << 20):
        monkeypatch.setattr(digests, "_LONG_RUN_BYTES", least)
        monkeypatch.setattr(digests, "_ELEMENTS", 70)
        for dim in range(3):
            parts, offset = 0, 0
            for part in whole.split(2 if dim < 2 else 17, dim):
                where = tuple(offset if d == dim else 0 for d in range(3))
                parts += digests.block_digest(Block(part, where, tuple(whole.shape), True, ()))
                offset += part.shape[dim]
            assert parts % 2**64 == expected, (least, dim)


def test_keys_are_odd_and_different():
    within, of_chunks = sums._keys_in_chunk(), sums._keys_of_chunks(0, 4096)
    assert np.all(within % 2 == 1)
    assert np.all(of_chunks % 2 == 1)
    assert len({*within.flatten().tolist(), *of_chunks.flatten().tolist()}) == within.size + of_chunks.size
    for bit in range(1, 64):  # every bit of a key is set in about half of them
        for keys in (within, of_chunks):
            share = float(np.mean((keys >> np.uint64(bit)) & np.uint64(1)))
            assert abs(share - 0.5) < 0.02, bit


def test_sums_of_changed_contents_differ():
    """One bit, two bits, sign bits, exchanged words and rows, whole chunks moved: 20,000 changes, no two sums equal."""
    draw = random.Random(0)
    data = _random_bytes(1 << 12).view("<u4")
    found = {sum_of_run(data.view(np.uint8), 0)}
    runs = []
    for i in range(20_000):
        changed = data.copy()
        a, b = draw.sample(range(len(data)), 2)
        if i % 5 == 0:
            changed[a] ^= np.uint32(1 << i // 5 % 32)
        elif i % 5 == 1:
            changed[[a, b]] ^= np.uint32(1 << 31)
        elif i % 5 == 2:
            changed[[a, b]] = changed[[b, a]]
        elif i % 5 == 3:
            changed = np.roll(changed, i)
            changed[0] ^= np.uint32(i)
        else:
            changed[a] += np.uint32(1)
            changed[b] -= np.uint32(1)
        runs.append((changed.tobytes(), (changed.view(np.uint8), 0)))
    contents = dict(runs)
    found |= set(sums_of_small_runs(list(contents.values())))
    assert len(found) == len(contents) + (data.tobytes() not in contents)


def test_chunks_that_change_places_change_the_sum():
    chunks = np.split(_random_bytes(6 * CHUNK_BYTES), 6)
    found = set()
    for i in range(6):
        for j in range(i):
            order = list(range(6))
            order[i], order[j] = j, i
            found.add(sum_of_run(np.concatenate([chunks[k] for k in order]), 0))
    assert len(found) == 15
