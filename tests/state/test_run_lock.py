"""One run a directory: who else saves is refused, who only reads is not, and the dead are in nobody's way."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from purestep.state.checkpoint import run_lock
from purestep.state.checkpoint.checkpoints import Checkpoints
from purestep.state.files.locks import Lock, lock_or_none
from purestep.state.files.manifest import CheckpointError
from purestep.state.keys import key
from purestep.state.train_state import TrainState
from tests.ranks import _context


def _state(step: int) -> TrainState:
    return TrainState(step=step, params={"w": torch.ones(3)}, buffers={}, opt_state={}, key=key(0))


def _hold(directory: str, sender: Any, with_worker: bool) -> None:
    """Another run: it saves, starts a worker by forking, and stays."""
    checkpoints = Checkpoints(directory)
    checkpoints.save(_state(1))
    if with_worker:
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
            os._exit(0)
        sender.send(worker)
    sender.send("ready")
    time.sleep(60)


class _OtherRun:
    def __init__(self, directory: Path, with_worker: bool = False) -> None:
        receiver, sender = _context.Pipe(duplex=False)
        self.process = _context.Process(target=_hold, args=(str(directory), sender, with_worker))
        self.process.start()
        self.worker = receiver.recv() if with_worker else None
        assert receiver.recv() == "ready"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> _OtherRun:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        if self.worker is not None:
            os.kill(self.worker, signal.SIGKILL)


def test_a_second_run_is_refused_and_told_who_is_there(tmp_path):
    with _OtherRun(tmp_path) as other:
        checkpoints = Checkpoints(tmp_path)
        for attempt in (lambda: checkpoints.save(_state(2)), lambda: Checkpoints(tmp_path, lock=True)):
            with pytest.raises(CheckpointError) as caught:
                attempt()
            said = str(caught.value)
            assert said.startswith(f"{tmp_path} is in use by another run (process {other.process.pid} on ")
            assert repr(socket.gethostname()) in said
            assert f"since {time.strftime('%Y-%m-%dT', time.gmtime())}" in said
        assert checkpoints.steps() == [1]
        assert checkpoints.restore_latest(_state(0)).step == 1  # a reader is not in anybody's way
        assert (tmp_path / ".lock").exists()
        other.kill()
        checkpoints.save(_state(2))  # the lock ended with its holder
        checkpoints.close()
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_workers_of_a_dead_run_do_not_hold_its_lock(tmp_path):
    with _OtherRun(tmp_path, with_worker=True) as other:
        other.kill()
        os.kill(other.worker, 0)  # it lives
        with Checkpoints(tmp_path, lock=True) as checkpoints:
            checkpoints.save(_state(2))


def test_the_lock_ends_with_close_with_the_object_and_with_an_error(tmp_path):
    path = tmp_path / "run/.lock"
    checkpoints = Checkpoints(tmp_path / "run")
    assert not path.parent.exists(), "nothing is made by looking"
    checkpoints.save(_state(1))
    assert path.exists()
    checkpoints.close()
    assert not path.exists()
    checkpoints = Checkpoints(tmp_path / "run", lock=True)
    assert path.exists()
    del checkpoints
    gc.collect()
    assert not path.exists()

    def fail() -> None:
        with Checkpoints(tmp_path / "run", lock=True):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not path.exists()


def test_objects_of_one_process_share_the_lock(tmp_path):
    first, second = Checkpoints(tmp_path), Checkpoints(tmp_path)
    first.save(_state(1))
    second.save(_state(2))
    first.close()
    assert (tmp_path / ".lock").exists()
    second.close()
    assert not (tmp_path / ".lock").exists()


def test_a_lock_file_that_was_replaced_is_not_mistaken_for_the_lock(tmp_path, monkeypatch):
    """A second run opens the file, the first removes it as it ends, and a third makes a new one: two must not hold."""
    real, moments = run_lock.Lock, []

    class Slow(real):
        def __init__(self, path, **options):
            super().__init__(path, **options)
            if not moments:
                moments.append(os.fstat(self.descriptor).st_ino)
                os.unlink(path)

    monkeypatch.setattr(run_lock, "Lock", Slow)
    with Checkpoints(tmp_path, lock=True):
        held = run_lock._held[tmp_path.resolve() / ".lock"]
        assert os.stat(tmp_path / ".lock").st_ino == os.fstat(held.descriptor).st_ino
        assert moments


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"Not a directory|File exists"):
        Checkpoints(tmp_path / "file" / "run").save(_state(1))
    with pytest.raises(CheckpointError, match=str(tmp_path / "file")):
        Checkpoints(tmp_path / "file").save(_state(1))
    assert multiprocessing.active_children() == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_does_not_hold_the_locks_of_its_parent(tmp_path):
    """A directory being written, say, whose writer is killed: its loader's workers must not make it look alive."""
    lock = Lock(tmp_path)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        with pytest.raises(BlockingIOError):
            Lock(tmp_path)
        lock.release()
        for _ in range(100):  # until the child has run its first lines
            again = lock_or_none(tmp_path)
            if again is not None:
                break
            time.sleep(0.05)
        assert again is not None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
