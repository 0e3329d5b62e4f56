"""Real processes: started by every launcher, and ending with a word when one of them fails."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from purestep.sharding.launching import LAUNCHER_VARIABLES

_PROGRAM = str(Path(__file__).with_name("launched.py"))
_CLEAN = {
    name: value
    for name, value in os.environ.items()
    if name not in LAUNCHER_VARIABLES and not name.startswith(("SLURM_", "ACCELERATE_", "TORCHELASTIC_"))
} | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}


@dataclass
class Ended:
    """What a process left."""

    code: int
    out: str
    err: str
    seconds: float


def _free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def _run_all(
    environments: list[dict[str, str]], *args: str, stuck: int | None = None, timeout: float = 60
) -> list[Ended]:
    """The program once for each environment, side by side; the one that is `stuck` is ended when the others have."""
    began = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, _PROGRAM, *args],
            env=_CLEAN | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for environment in environments
    ]
    ended = []
    try:
        for rank, process in sorted(enumerate(processes), key=lambda item: item[0] == stuck):
            if rank == stuck:
                process.kill()
            out, err = process.communicate(timeout=max(1, timeout - (time.monotonic() - began)))
            ended.append(Ended(process.returncode, out, err, time.monotonic() - began))
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    return ended


def _by_hand(world_size: int = 2) -> list[dict[str, str]]:
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def _by_srun() -> list[dict[str, str]]:
    step = {
        "SLURM_JOB_ID": _free_port(),  # MASTER_PORT follows from it
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
    }
    return [{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]


def _check(lines: list[dict], kind: str) -> None:
    assert sorted(line["rank"] for line in lines) == [0, 1]
    for line in lines:
        assert (line["local_rank"], line["world"], line["kind"], line["sum"]) == (line["rank"], 2, kind, 3.0)
        assert line["local_world"] == "2"
        assert line["again"] == ["fsdp2", 2.0]


@pytest.mark.parametrize("started", ["by hand", "by srun"])
def test_variables_that_people_or_slurm_set(started):
    ended = _run_all(_by_hand() if started == "by hand" else _by_srun(), "1", "2", "30", "again")
    assert [process.code for process in ended] == [0, 0], ended
    assert not any(process.err for process in ended)
    lines = [json.loads(process.out) for process in ended]
    _check(lines, "fsdp2")
    for line in lines:  # the environment is as it was
        assert line["left"] == ([] if started == "by srun" else ["MASTER_ADDR", "RANK", "WORLD_SIZE"])


def _launch(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *command], env=_CLEAN, capture_output=True, text=True, timeout=90, check=False
    )


LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    "accelerate launch": (
        *("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    ),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers(name):
    done = _launch(*LAUNCHERS[name], _PROGRAM, "2", "1", "30", "again")
    assert done.returncode == 0, done.stderr
    _check([json.loads(line) for line in re.findall(r"\{.*?\}", done.stdout)], "ddp")


def test_accelerate_that_starts_one_process_instead_of_two_is_an_error():
    done = _launch("accelerate.commands.launch", "--cpu", "--num_processes", "2", _PROGRAM, "1", "1", "30")
    assert done.returncode != 0
    assert "asked for several processes on the CPU and started one" in done.stderr


def test_torchrun_ends_everybody_when_one_fails():
    done = _launch(*LAUNCHERS["torchrun"], _PROGRAM, "1", "2", "30", "raises", "0")
    assert done.returncode != 0
    assert "ValueError: the data of this rank are bad" in done.stderr


# One of them fails: its rank, how, exit code of it, what the other says

FAILURES = [
    (1, "raises", 1, "rank 0 of 2 ended because rank 1 failed: ValueError: the data of this rank are bad"),
    (0, "raises", 1, "rank 1 of 2 ended because rank 0"),  # which may have taken the store along by then
    (1, "killed", -signal.SIGKILL, "rank 0 of 2 ended because rank 1 left no error and did not answer"),
    (0, "killed", -signal.SIGKILL, "rank 1 of 2 ended because rank 0, which keeps the store, does not answer"),
]


@pytest.mark.parametrize(("rank", "how", "code", "said"), FAILURES)
def test_when_one_fails_the_others_end_at_once_and_say_why(rank, how, code, said):
    ended = _run_all(_by_hand(), "1", "2", "60", how, str(rank))
    failed, other = ended[rank], ended[1 - rank]
    assert failed.code == code
    assert other.code == 1
    assert said in other.err
    assert max(process.seconds for process in ended) < 30  # of the 60 that a collective call may wait


def test_one_that_is_stuck_ends_the_others_after_the_timeout():
    ended = _run_all(_by_hand(), "1", "2", "3", "stalls", "1", stuck=1)
    assert [process.code for process in ended] == [1, -signal.SIGKILL]
    assert "Timed out waiting 3000ms" in ended[0].err
    assert "rank 1 left no error and did not answer: killed (out of memory?), stuck" in ended[0].err


def test_the_timeout_is_that_of_the_groups_of_a_mesh_too():
    ended = _run_all(_by_hand(4), "2", "2", "3", "stalls on the shards", "3", stuck=3)
    assert "Timed out waiting 3000ms" in ended[2].err  # the other one of its shard group
    assert [process.code for process in ended] == [1, 1, 1, -signal.SIGKILL]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_waits_for_nobody_stops_after_the_timeout(rank):
    (alone,) = _run_all([_by_hand()[rank]], "1", "2", "2")
    assert alone.code == 1
    assert f"rank {rank} of 2 could not join the others at 127.0.0.1:" in alone.err
    assert "within 2 s (--accelerator.process-group.timeout-s)" in alone.err
    assert alone.seconds < 25


HALF_SET = [
    {"WORLD_SIZE": "2"},
    {"RANK": "0"},
    {"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"},
]


def test_half_a_launcher_is_refused_at_once():
    for process in _run_all(HALF_SET, "1", "1", "600"):
        assert process.code == 1
        assert "ConfigError" in process.err
        assert process.seconds < 30
