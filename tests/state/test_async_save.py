"""Saving in the background: what is written is the state as it was, training goes on, and no failure is lost."""

from __future__ import annotations

import dataclasses
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import purestep as ps
from purestep.state.checkpoint import checkpoints as module
from purestep.state.checkpoint.background import Background
from purestep.state.checkpoint.checkpoints import Checkpoints
from purestep.state.checkpoint.staging import Staging
from purestep.state.files.manifest import FORMATS, CheckpointError
from tests.toys import Net, net_batch, net_loss, net_optimizer


def _state(step: int = 0, **changes) -> ps.TrainState:
    fields = {"params": {"w": torch.full((3,), float(step))}, "buffers": {}, "opt_state": {}, "key": ps.key(0)}
    return ps.TrainState(step=step, **{**fields, **changes})


class _Gate:
    """Holds every save back until it is opened."""

    def __init__(self, monkeypatch) -> None:
        self._open, self.threads = threading.Event(), []
        save = module.save

        def slow(path, state, **options):
            self.threads.append(threading.current_thread())
            assert self._open.wait(60)
            return save(path, state, **options)

        monkeypatch.setattr(module, "save", slow)

    def open(self) -> None:
        self._open.set()


@pytest.mark.parametrize("format", FORMATS)
def test_training_goes_on_while_a_slow_writer_runs_and_the_files_are_those_of_sync(tmp_path, monkeypatch, format):
    """Donating steps write into the memory that was saved, while the writer has not begun yet."""
    module_ = ps.shard(Net())
    step = ps.train_step(module_, net_loss, net_optimizer(), donate=True)
    state = ps.init(module_, net_optimizer(), ps.key(0))
    state, _ = step(state, net_batch(0))
    kept = state.clone()
    gate = _Gate(monkeypatch)
    with Checkpoints(tmp_path / "async", format=format, async_save=True) as checkpoints:
        path = checkpoints.save(state, metadata={"note": 1})
        for i in range(1, 4):  # the writer waits for the gate: were these not beside it, they would never come
            state, _ = step(state, net_batch(i))
        assert (state.step, checkpoints.steps(), path.exists()) == (4, [], False)
        assert gate.threads == [gate.threads[0]] != [threading.current_thread()]
        gate.open()
        checkpoints.wait()
        assert checkpoints.latest() == path
    ps.save(tmp_path / "sync", kept, format=format, metadata={"note": 1})
    assert _files(path) == _files(tmp_path / "sync")
    assert state.digest() != kept.digest()
    assert ps.restore(path, kept).digest() == kept.digest()


def _files(path: Path) -> dict[str, bytes]:
    # DCP's metadata file is a pickle, whose bytes depend on which objects are shared.
    names = [file for file in path.rglob("*") if file.is_file() and file.name != ".metadata"]
    return {str(file.relative_to(path)): file.read_bytes() for file in names if file.name not in _DIFFER}


_DIFFER = ("SHA256SUMS", "state.json")  # they hold the sum and the size of the above


def test_one_save_is_in_flight_and_a_new_one_waits_for_it(tmp_path, monkeypatch):
    gate = _Gate(monkeypatch)
    with Checkpoints(tmp_path, async_save=True) as checkpoints:
        checkpoints.save(_state(1))
        threading.Timer(0.2, gate.open).start()
        checkpoints.save(_state(2))
        assert checkpoints.steps()[:1] == [1]
    assert checkpoints.steps() == [1, 2]
    assert ps.restore(checkpoints.path(1), _state()).params["w"].tolist() == [1.0] * 3


def test_restore_latest_waits(tmp_path, monkeypatch):
    gate = _Gate(monkeypatch)
    with Checkpoints(tmp_path, async_save=True) as checkpoints:
        checkpoints.save(_state(1))
        threading.Timer(0.2, gate.open).start()
        assert checkpoints.restore_latest(_state()).step == 1


def test_staging_keeps_values_of_every_kind_and_uses_its_memory_again():
    dtypes = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128, torch.bool]
    dtypes += [torch.uint8, torch.uint16, torch.int64, torch.float16]
    base = torch.arange(24).reshape(4, 6)
    leaves = {str(dtype): base.to(dtype) for dtype in dtypes}
    leaves |= {
        "transposed": torch.randn(3, 5).t(),
        "expanded": torch.ones(1).expand(7),
        "strided": torch.randn(8)[::2],
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "neg": torch.randn(3, dtype=torch.complex64).conj().imag,
        "0-d": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "grad": torch.ones(2, requires_grad=True),
    }
    state = _state(params=leaves, extra={"scale": 2.0, "table": [torch.ones(2), "x", None]})
    staging = Staging()
    staging.prepare(state)
    staged = staging.copy(state)
    assert staged.digest() == state.digest()
    assert staged.extra["table"][1:] == ["x", None]
    for name, leaf in state.leaves().items():
        assert staged.leaves()[name].data_ptr() != leaf.data_ptr() or not leaf.numel()
    places = {name: leaf.data_ptr() for name, leaf in staged.leaves().items()}
    again = staging.copy(state.replace(params={**leaves, "0-d": torch.tensor(4.0), "grad": torch.ones(5)}))
    moved = [name for name, leaf in again.leaves().items() if leaf.data_ptr() != places[name]]
    assert moved == ["params/grad"], "the one that has another shape"


def test_what_cannot_be_saved_is_refused_at_once(tmp_path):
    with Checkpoints(tmp_path, async_save=True) as checkpoints:
        with pytest.raises(ValueError, match="is a meta tensor"):
            checkpoints.save(_state(params={"w": torch.ones(2, device="meta")}))
        with pytest.raises(TypeError, match=r"metadata\['x'\]"):
            checkpoints.save(_state(), metadata={"x": {1}})
        with pytest.raises(TypeError, match="metric 'x' must be a number"):
            checkpoints.save(_state(), metrics={"x": "y"})
        checkpoints.save(_state(5))
    assert checkpoints.steps() == [5]


# --- failures --------------------------------------------------------------------------------------------------------


@contextmanager
def _full_disk(limit: int = 60) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _fail_one(checkpoints: Checkpoints) -> None:
    """A save that fails in the background; nothing has asked for its result yet."""
    with _full_disk():
        checkpoints.save(_state(2))
        checkpoints._background._thread.join()


_ASK = {
    "wait": lambda checkpoints: checkpoints.wait(),
    "save": lambda checkpoints: checkpoints.save(_state(3)),
    "restore_latest": lambda checkpoints: checkpoints.restore_latest(_state()),
    "close": lambda checkpoints: checkpoints.close(),
    "exit": lambda checkpoints: checkpoints.__exit__(None, None, None),
}


@pytest.mark.parametrize("ask", _ASK)
def test_a_failure_surfaces_once_and_the_next_save_works(tmp_path, ask):
    checkpoints = Checkpoints(tmp_path, async_save=True)
    checkpoints.save(_state(1))
    checkpoints.wait()
    _fail_one(checkpoints)
    with pytest.raises(CheckpointError, match=r"checkpoint .*step-00000002: .*File too large"):
        _ASK[ask](checkpoints)
    if ask in ("close", "exit"):
        checkpoints = Checkpoints(tmp_path, async_save=True)
    assert checkpoints.restore_latest(_state()).step == 1
    checkpoints.save(_state(2))
    checkpoints.close()
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_an_error_in_the_block_comes_first_and_tells_of_the_failure(tmp_path):
    checkpoints = Checkpoints(tmp_path, async_save=True)

    def fail() -> None:
        with checkpoints:
            _fail_one(checkpoints)
            raise KeyError

    with pytest.raises(KeyError) as caught:
        fail()
    assert "a save in the background failed" in "".join(caught.value.__notes__)
    with pytest.raises(CheckpointError):  # still not told to anybody who could act on it
        checkpoints.wait()


def test_errors_of_any_kind_name_the_checkpoint():
    background = Background()

    def fail() -> None:
        raise SystemExit("planted")

    background.start("some/path", fail)
    with pytest.raises(CheckpointError, match="checkpoint some/path: SystemExit: planted"):
        background.wait()
    background.wait()


def test_the_disk_is_full_while_the_lock_is_taken(tmp_path):
    with _full_disk(5), pytest.raises(CheckpointError, match="File too large"):
        Checkpoints(tmp_path).save(_state(1))
    Checkpoints(tmp_path).save(_state(1))


_PROGRAM = """
import sys, torch, purestep as ps
from purestep.state.checkpoint import checkpoints as module
state = ps.TrainState(step=1, params={"w": torch.ones(3)}, buffers={}, opt_state={}, key=ps.key(0))
save = module.save

def slow(path, *args, **options):
    import time
    time.sleep(0.5)
    if "fails" in sys.argv:
        raise ps.CheckpointError(f"checkpoint {path}: planted")
    return save(path, *args, **options)

module.save = slow
checkpoints = ps.Checkpoints(sys.argv[1], async_save=True)
checkpoints.save(state)
if "asks" in sys.argv:
    try:
        checkpoints.wait()
    except ps.CheckpointError:
        pass
print("end")
"""


def _program(*argv: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _PROGRAM, *argv]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_program_that_ends_without_asking_waits_and_fails(tmp_path):
    cases = {"good": ((), 0, ""), "bad": (("fails",), 1, "planted"), "told": (("fails", "asks"), 0, "")}
    programs = {name: _program(str(tmp_path / name), *flags) for name, (flags, *_) in cases.items()}
    for name, program in programs.items():
        out, err = program.communicate(timeout=100)
        _, code, message = cases[name]
        assert (program.returncode, out) == (code, "end\n"), (name, err)
        assert (message in err) if message else err == "", (name, err)
    assert Checkpoints(tmp_path / "good").restore_latest(_state()).step == 1
    assert sorted(os.listdir(tmp_path / "good")) == ["step-00000001"]


def test_fit_saves_in_the_background_and_resumes_the_same(tmp_path):
    from tests.training.programs import Config, build

    config = Config(
        output_dir=tmp_path / "sync",
        steps=6,
        batch_size=4,
        eval_every=1,
        accelerator=ps.AcceleratorConfig(device="cpu"),
        checkpoint=ps.training.CheckpointConfig(every=1, keep_last=2, keep_every=3, keep_best=("eval/loss", "max")),
    )
    whole = ps.fit(config, build(config))
    rules = dataclasses.replace(config.checkpoint, async_save=True)
    parts = dataclasses.replace(config, output_dir=tmp_path / "async", checkpoint=rules)
    ps.fit(dataclasses.replace(parts, steps=4), build(parts))
    resumed = ps.fit(dataclasses.replace(parts, resume=True), build(parts))
    assert resumed.state.digest() == whole.state.digest()
    names = sorted(os.listdir(tmp_path / "sync/checkpoints"))
    assert names == sorted(os.listdir(tmp_path / "async/checkpoints"))
    assert names == [f"step-{i:08d}" for i in (1, 3, 5, 6)]  # the loss falls: the first is the worst
