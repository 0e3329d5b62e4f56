"""SIGTERM, kept checkpoints and failures in the background, as a program's user meets them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import purestep as ps
from purestep.training import CheckpointConfig
from purestep.training.stopping import StopRequest
from tests.ranks import run_ranks
from tests.training.programs import Config, build

PROGRAM = Path(__file__).with_name("programs.py")
FOREVER = ["--accelerator.device", "cpu", "--batch-size", "4", "--log-every", "1", "--steps", "1000000"]


@contextlib.contextmanager
def _ranks(world_size: int, *flags: str, **options) -> Iterator[list[subprocess.Popen]]:
    """The program on `world_size` processes, as a launcher would start them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parents[2])}
    if world_size > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        size = str(world_size)
        environment |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world_size > 1 else {})},
            **options,
        )
        for rank in range(world_size)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _await_steps(path: Path, processes: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + 90
    file = path / "metrics.jsonl"
    while not (file.exists() and file.stat().st_size) and time.monotonic() < deadline and processes[0].poll() is None:
        time.sleep(0.02)


def _end(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    ended = [(*process.communicate(timeout=90), process.returncode) for process in processes]
    return [(code, out, err) for out, err, code in ended]


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [(1, ["--checkpoint.async-save", "--data.num-workers", "1"]), (2, ["--parallelism.dp-shard", "2"])],
)
def test_a_run_saves_on_sigterm_and_goes_on_as_if_nothing_had_been(tmp_path, world_size, flags):
    path = tmp_path / "run"
    with _ranks(world_size, *FOREVER, *flags, "--output-dir", str(path), start_new_session=True) as processes:
        _await_steps(path, processes)
        # One rank hears of it. A launcher signals the whole process group, and with it the loader's workers.
        os.killpg(processes[-1].pid, signal.SIGTERM)
        ended = _end(processes)
    assert [code for code, _, _ in ended] == [143] * world_size, ended
    assert all("Traceback" not in err for _, _, err in ended), ended
    (name,) = [path.name for path in (path / "checkpoints").iterdir()]
    step = int(name.removeprefix("step-"))
    lines = ended[0][2].splitlines()
    assert lines[-2:] == [
        f"saved {path}/checkpoints/{name}",
        f"stopped by SIGTERM; continue with --resume --output-dir {path}",
    ]
    if world_size == 2:
        assert "SIGTERM" not in ended[1][2], "one rank speaks"

    more = ["--steps", str(step + 2), "--data.num-workers", "0"]
    resumed = run_ranks(_finish, world_size, ["--resume", "--output-dir", str(path), *more])
    whole = run_ranks(_finish, world_size, [*FOREVER, *flags, "--output-dir", str(tmp_path / "whole"), *more])
    assert resumed == whole == [(step + 2, whole[0][1])] * world_size


def _finish(argv: list[str]) -> tuple[int, str]:
    """Step and digest at the end of the program."""
    ends: list[tuple[int, str]] = []
    ps.main(Config, lambda config: build(config, lambda run: ends.append((run.state.step, run.state.digest()))), argv)
    return ends[0]


def test_a_second_sigterm_ends_at_once(tmp_path):
    with StopRequest(ps.shard(build(Config()).model).runtime) as stop:
        assert not stop.agreed()
        before = time.monotonic()
        child = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import os, signal, time\n"
                "from purestep.sharding.runtime import local_runtime\n"
                "from purestep.training.stopping import StopRequest\n"
                "with StopRequest(local_runtime()) as stop:\n"
                "    os.kill(os.getpid(), signal.SIGTERM)\n"
                "    print(stop.agreed(), flush=True)\n"
                "    os.kill(os.getpid(), signal.SIGTERM)\n"
                "    time.sleep(60)\n",
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[2])},
        )
        out, _ = child.communicate(timeout=90)
        assert (out, child.returncode) == ("True\n", -signal.SIGTERM)
        assert time.monotonic() - before < 50
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _one_is_told(rank: int) -> list[bool]:
    with ps.start(accelerator=ps.AcceleratorConfig(device="cpu")) as runtime, StopRequest(runtime) as stop:
        answers = [stop.agreed()]
        if runtime.rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return [*answers, stop.agreed(), stop.agreed()]


def test_all_ranks_agree_to_stop():
    assert run_ranks(_one_is_told, 2, 1) == [[False, True, True]] * 2


# --- what the flags of checkpoints do --------------------------------------------------------------------------------


def _config(path: Path, *, checkpoint: CheckpointConfig, **changes) -> Config:
    cpu = ps.AcceleratorConfig(device="cpu")
    config = Config(output_dir=path, steps=6, batch_size=4, log_every=3, accelerator=cpu, checkpoint=checkpoint)
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize(
    ("checkpoint", "changes", "message"),
    [
        (
            CheckpointConfig(every=3, keep_best=("eval/loss", "min")),
            {"eval_every": 2},
            "--checkpoint.every 3 must be a multiple of --eval-every 2",
        ),
        (
            CheckpointConfig(every=3, keep_best=("eval/loss", "min")),
            {"eval_every": 0},
            "--checkpoint.every 3 must be a multiple of --eval-every 0",
        ),
        (CheckpointConfig(every=1, keep_best=("los", "min")), {}, "no metric of this name, but loss, weight, "),
        (CheckpointConfig(keep_best=("eval/los", "min")), {}, "no metric of this name, but eval/loss, eval/mae"),
    ],
)
def test_a_best_that_cannot_be_is_refused(tmp_path, checkpoint, changes, message):
    config = _config(tmp_path / "run", checkpoint=checkpoint, **changes)
    with pytest.raises(ps.ConfigError, match=f"--checkpoint.keep-best {checkpoint.keep_best[0]} min: .*{message}"):
        ps.fit(config, build(config))
    assert list(tmp_path.glob("run/checkpoints/step-*")) == []


def test_a_best_of_evaluations_needs_them(tmp_path):
    config = _config(tmp_path / "run", checkpoint=CheckpointConfig(keep_best=("eval/loss", "min")))
    with pytest.raises(ps.ConfigError, match="there is no evaluation to take it from"):
        ps.fit(config, dataclasses.replace(build(config), eval=None))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "flag"), [("keep_last", "--checkpoint.keep-last"), ("keep_every", "--checkpoint.keep-every")]
)
def test_counts_below_one_are_refused(field, flag):
    with pytest.raises(ps.ConfigError, match=f"{flag} 0: must be at least 1"):
        CheckpointConfig(**{field: 0})


def test_checkpoints_hold_the_metrics_of_their_step(tmp_path):
    config = _config(tmp_path / "run", checkpoint=CheckpointConfig(every=2, keep_best=("loss", "min")))
    run = ps.fit(config, build(config))
    checkpoints = ps.Checkpoints(tmp_path / "run/checkpoints", keep_best=("loss", "min"))
    metrics = {step: ps.describe(checkpoints.path(step)).metadata["metrics"] for step in checkpoints.steps()}
    assert metrics[6]["loss"] == run.metrics["loss"]
    assert metrics[6]["eval/loss"] == run.metrics["eval/loss"]
    assert checkpoints.best() == checkpoints.path(min(metrics, key=lambda step: metrics[step]["loss"]))


def test_flags_and_config_file(tmp_path):
    flags = ["--checkpoint.every", "2", "--checkpoint.keep-last", "1", "--checkpoint.keep-best", "loss", "max"]
    flags += ["--checkpoint.async-save", "--steps", "5", "--batch-size", "4", "--accelerator.device", "cpu"]
    run = ps.main(Config, build, [*flags, "--output-dir", str(tmp_path / "a")])
    expected = CheckpointConfig(every=2, keep_last=1, keep_best=("loss", "max"), async_save=True)
    assert run.config.checkpoint == expected
    file = str(tmp_path / "a/train_config.json")
    again = ps.main(Config, build, ["--config", file, "--output-dir", str(tmp_path / "b")])
    assert again.config.checkpoint == expected
    assert again.state.digest() == run.state.digest()


def test_a_failure_in_the_background_ends_the_program_with_a_line(tmp_path):
    import resource

    flags = ["--output-dir", str(tmp_path / "run"), "--checkpoint.every", "1", "--checkpoint.async-save"]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))  # noqa: E731
    with _ranks(1, *FOREVER, "--width", "40", *flags, preexec_fn=limit) as processes:
        ((code, _, err),) = _end(processes)
    assert code == 1, err
    line = err.splitlines()[-1]
    assert re.fullmatch(r"error: checkpoint .*/checkpoints/step-0000000\d: \[Errno 27\] File too large.*", line), err
    assert sorted(os.listdir(tmp_path / "run/checkpoints")) == []


def test_a_run_that_goes_on_cannot_be_resumed_by_another(tmp_path):
    path = tmp_path / "run"
    with _ranks(1, *FOREVER, "--output-dir", str(path)) as processes:
        _await_steps(path, processes)
        with _ranks(1, "--resume", "--output-dir", str(path)) as others:
            ((code, _, err),) = _end(others)
        assert processes[0].poll() is None
        assert code == 1
        assert err.startswith(f"error: {path}/checkpoints is in use by another run (process {processes[0].pid} on ")
        assert not (path / "resumes.jsonl").exists()
