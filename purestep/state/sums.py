"""Sums of bytes that do not depend on how the bytes are cut up: the arithmetic below `digests`.

The bytes of a leaf, in row-major order, are read as little-endian 16-bit words. The sum is

    word[0] * key[0] + word[1] * key[1] + ...   modulo 2**64,   every key being a pseudo-random odd number below 2**64.

What this is good for:

- It is linear, so the sums of any parts (zeros standing for what is elsewhere) add up to the sum of the whole.
- A change of one word, and so one flipped bit, always changes it: the sum moves by an odd number times a difference
  below 2**16, which is never a multiple of 2**64.
- It is multilinear hashing (Carter and Wegman 1979; Lemire and Kaser 2014): over a random choice of keys, two different
  contents agree with a probability below 2**-47 within a chunk of 512 KiB and below 2**-41 across chunks, exchanged
  elements and moved rows included. Chunks cost some bits because their keys are products, one factor for the place in
  the chunk and one for the chunk, so that a table of one chunk's keys serves all. Each factor comes from SplitMix64.
- It is no defence against somebody who wants two contents to agree. SHA-256 over the files is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

CHUNK_BYTES = 1 << 19  # large enough that threads do not queue up for the interpreter between NumPy's calls
_WINDOWS = CHUNK_BYTES // 8  # words are taken four at a time, as one window of 8 bytes
_DEVICE_BYTES = 1 << 24  # handled at a time on an accelerator, times about 10 in temporaries
_BATCH_WINDOWS = 1 << 15  # of small runs handled at a time
# The window w, shifted right by 0, 16, 32 and 48 bits, times four odd keys: word q of it is then multiplied by
# key[q] + 2**16 * key[q - 1] + ..., which is odd and as random as key[q] is.
_SHIFTS = np.array([[0], [16], [32], [48]], dtype=np.uint64)
_STREAM_OF_CHUNKS = 1 << 32  # place in SplitMix64's sequence; the keys within a chunk begin at 0

Run = tuple[Any, int]
"""Bytes that follow each other in a leaf (a uint8 array of one dim), and the index in the leaf of the first."""


def sum_of_run(data: Any, start: int) -> int:
    """The sum of one run, below 2**64. Memory that it allocates does not depend on the run's length."""
    if not len(data):
        return 0
    first = start // CHUNK_BYTES
    scratch = np.empty((4, _WINDOWS), dtype=np.uint64)
    sums = np.empty((-(-(start + len(data)) // CHUNK_BYTES) - first, 4), dtype=np.uint64)
    keys = _keys_in_chunk()
    for row, (place, windows) in zip(sums, _chunks(data, start), strict=True):
        products = scratch[:, : len(windows)]
        np.right_shift(windows, _SHIFTS, out=products)
        np.multiply(products, keys[:, place : place + len(windows)], out=products)
        np.add.reduce(products, axis=1, out=row)
    sums *= _keys_of_chunks(first, len(sums))
    return int(np.add.reduce(sums, axis=None))


def sums_of_small_runs(runs: Sequence[Run]) -> list[int]:
    """The sum of each of many short runs: what is fixed about a NumPy call is paid once for all of them."""
    results: list[int] = []
    batch: list[Run] = []
    room = _BATCH_WINDOWS
    for run in runs:
        room -= _num_windows(run)
        if room < 0 and batch:
            results += _sums_of_batch(batch)
            batch, room = [], _BATCH_WINDOWS - _num_windows(run)
        batch.append(run)
    return results + (_sums_of_batch(batch) if batch else [])


def sum_of_run_on_device(data: Tensor, start: int) -> Tensor:
    """The same as `sum_of_run` for memory of any device: a 0-d int64 tensor there."""
    keys = _signed(_keys_in_chunk(), data.device)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    first, stop = start // CHUNK_BYTES * CHUNK_BYTES, start + len(data)
    for low in range(first, stop, _DEVICE_BYTES):
        begin, end = max(low, start), min(low + _DEVICE_BYTES, stop)
        chunks = -(-(end - low) // CHUNK_BYTES)
        padded = torch.zeros(chunks * CHUNK_BYTES, dtype=torch.uint8, device=data.device)
        padded[begin - low : end - low] = data[begin - start : end - start]
        windows = padded.view(torch.int64).view(chunks, _WINDOWS)
        of_chunks = _signed(_keys_of_chunks(low // CHUNK_BYTES, chunks), data.device)
        for q in range(4):
            total += ((_shifted(windows, q) * keys[q]).sum(1) * of_chunks[:, q]).sum()
    return total


def sum_of_elements(bits: Tensor, index: Tensor) -> Tensor:
    """The sum of elements that are anywhere in their leaf: a 0-d int64 tensor.

    Args:
        bits: integers of the elements' width (1, 2, 4 or 8 bytes), shape (elements,).
        index: index of each in the leaf, int64, shape (elements,).
    """
    if not len(bits):
        return torch.zeros((), dtype=torch.int64, device=bits.device)
    width = bits.element_size()
    place = index * width
    values = bits.to(torch.int64)
    if width < 8:
        values = values & ((1 << 8 * width) - 1)
    windows = values << ((place & 7) * 8)
    chunk, within = (place >> 3) // _WINDOWS, (place >> 3) % _WINDOWS
    first, last = int(chunk.min()), int(chunk.max())
    keys = _signed(_keys_in_chunk(), bits.device)
    of_chunks = _signed(_keys_of_chunks(first, last - first + 1), bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for q in range(4):
        total += (_shifted(windows, q) * keys[q][within] * of_chunks[:, q][chunk - first]).sum()
    return total


def _chunks(data: Any, start: int) -> Iterator[tuple[int, Any]]:
    """(index in its chunk of the first window, windows) of each chunk that the run reaches into."""
    padded = np.empty(CHUNK_BYTES, dtype=np.uint8)
    stop = start + len(data)
    for base in range(start // CHUNK_BYTES * CHUNK_BYTES, stop, CHUNK_BYTES):
        low, high = max(start, base), min(stop, base + CHUNK_BYTES)
        piece = data[low - start : high - start]
        place, end = (low - base) // 8, -(-(high - base) // 8)
        if low % 8 == 0 and high % 8 == 0:
            windows = piece.view("<u8")
            if windows.flags.aligned:
                yield place, windows
                continue
        whole = padded[place * 8 : end * 8]
        whole[:8] = whole[-8:] = 0
        padded[low - base : high - base] = piece
        yield place, whole.view("<u8")


def _sums_of_batch(runs: Sequence[Run]) -> list[int]:
    counts = np.array([_num_windows(run) for run in runs])
    ends = np.cumsum(counts)
    starts = ends - counts
    padded = np.zeros(int(ends[-1]) * 8, dtype=np.uint8)
    for (data, start), place in zip(runs, (starts * 8).tolist(), strict=True):
        place += start % 8
        padded[place : place + len(data)] = data
    index = np.arange(ends[-1]) + np.repeat(np.array([start // 8 for _, start in runs]) - starts, counts)
    chunk, within = np.divmod(index, _WINDOWS)
    products = padded.view("<u8") >> _SHIFTS
    products *= _keys_in_chunk()[:, within]
    first = int(chunk.min())
    products *= _keys_of_chunks(first, int(chunk.max()) - first + 1)[chunk - first].T
    return np.add.reduceat(np.add.reduce(products, axis=0), starts).tolist()


def _num_windows(run: Run) -> int:
    data, start = run
    return -(-(start % 8 + len(data)) // 8)


@lru_cache(maxsize=1)
def _keys_in_chunk() -> Any:
    """Keys of the windows of a chunk, shape (4, windows)."""
    keys = _split_mix(np.arange(4 * _WINDOWS, dtype=np.uint64)).reshape(4, _WINDOWS)
    keys.flags.writeable = False
    return keys


def _keys_of_chunks(first: int, num: int) -> Any:
    """Keys of `num` chunks, shape (num, 4)."""
    places = np.arange(4 * first, 4 * (first + num), dtype=np.uint64) + np.uint64(_STREAM_OF_CHUNKS)
    return _split_mix(places).reshape(num, 4)


def _split_mix(places: Any) -> Any:
    """Odd numbers at some places of SplitMix64's sequence (Steele, Lea and Flood 2014)."""
    z = (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def _signed(keys: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(keys.view(np.int64).copy()).to(device)


def _shifted(windows: Tensor, q: int) -> Tensor:
    """`windows` shifted right by 16 * q bits, zeros coming in."""
    return windows if q == 0 else (windows >> 16 * q) & ((1 << 64 - 16 * q) - 1)
