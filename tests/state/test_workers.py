"""Threads that hash, read and write: results as without them, errors not lost, and no threads left or needed."""

from __future__ import annotations

import hashlib
import io
import random
import threading

import numpy as np
import pytest
import torch

import purestep.state.workers as workers
from purestep.state.files.file_reading import Extent, read_extents
from purestep.state.files.hashing import StreamHash
from purestep.state.workers import Pool, in_parallel


def test_results_are_in_order_and_the_first_error_in_order_is_raised(monkeypatch):
    monkeypatch.setattr(workers, "num_workers", lambda: 3)
    assert in_parallel(lambda x: x * x, range(50)) == [x * x for x in range(50)]
    with pytest.raises(ZeroDivisionError, match="division"):
        in_parallel(lambda x: 1 // (x - 3) if x < 10 else int("x"), range(20))
    assert not [thread for thread in threading.enumerate() if thread.name == "purestep"]


def test_where_no_thread_can_be_started_the_caller_does_the_work(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Pool(2) as pool:
        jobs = [pool.submit(int, text) for text in ("1", "x")]
    assert jobs[0].result() == 1
    with pytest.raises(ValueError, match="'x'"):
        jobs[1].result()


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"), [(2, "1", 2), (2, "2", 1), (64, "8", 8), (64, "1", 8), (3, "x", 3)]
)
def test_ranks_of_one_machine_share_its_cores(monkeypatch, cores, ranks, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(cores), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert workers.num_workers() == expected


def test_a_stream_is_hashed_in_order():
    draw = random.Random(0)
    for i in range(6):
        stream, plain = StreamHash(in_thread=i % 2 == 0), hashlib.sha256()
        for _ in range(30):
            data = draw.randbytes(draw.choice([0, 1, 5_000, 70_000, 300_000]))
            stream.update(data)
            plain.update(data)
        assert stream.hexdigest() == plain.hexdigest()
        stream.close()


@pytest.mark.parametrize("hashed", [True, False])
def test_extents_of_any_size_and_order_are_read_and_every_byte_hashed_once(tmp_path, hashed):
    draw = random.Random(0)
    data = np.random.default_rng(0).integers(0, 256, 5_000_000, dtype=np.uint8)
    (tmp_path / "x").write_bytes(data.tobytes())
    wanted, extents, done = [], [], []
    for i in range(60):
        size = draw.choice([1, 8, 4_000, 262_144, 262_145, 1_500_000])
        begin = draw.choice([0, len(data) - size, draw.randrange(len(data) - size)])
        target = torch.empty(size, dtype=torch.uint8)
        if i % 3 == 0:  # not contiguous: cannot be read into
            target = torch.empty(2 * size, dtype=torch.uint8)[::2]
        wanted.append((begin, size, target))
        extents.append(Extent(begin, (size,), (slice(None),), target, lambda i=i: done.append(i)))
    sha256 = StreamHash() if hashed else None
    with (tmp_path / "x").open("rb", buffering=0) as file:
        read_extents(file, extents, stop=len(data), sha256=sha256)
    for begin, size, target in wanted:
        assert np.array_equal(target.numpy(), data[begin : begin + size])
    assert sorted(done) == list(range(60))
    if sha256 is not None:
        assert sha256.hexdigest() == hashlib.sha256(data).hexdigest()
        sha256.close()


def test_a_file_that_ends_early_is_an_error():
    target = torch.empty(8, dtype=torch.uint8)
    extent = Extent(0, (8,), (slice(None),), target, lambda: None)
    with pytest.raises(ValueError, match="the file ends at byte 5"):
        read_extents(io.BytesIO(b"12345"), [extent], stop=8, sha256=None)
