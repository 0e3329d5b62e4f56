"""Runtimes: device choice, one at a time, ended cleanly whatever happened."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import purestep as ps
from purestep.sharding import connecting
from purestep.sharding import runtime as module_under_test
from purestep.sharding.config import Topology
from purestep.sharding.connecting import choose_backend
from purestep.sharding.runtime import choose_device
from tests.ranks import run_ranks
from tests.toys import error_of

CPU = ps.AcceleratorConfig(device="cpu")
DEVICES = ("cuda", "xpu", "mps", "cpu")


def _with_devices(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(module_under_test, "_devices", lambda: [(name, name in names) for name in DEVICES])


CHOICES = [  # devices of the machine, asked, processes, chosen
    (("cpu",), "auto", 1, "cpu"),
    (("cuda", "cpu"), "auto", 1, "cuda"),
    (("cuda", "cpu"), "auto", 2, "cuda"),
    (("cuda", "cpu"), "cpu", 2, "cpu"),
    (("xpu", "cpu"), "auto", 2, "xpu"),
    (("mps", "cpu"), "auto", 1, "mps"),
    (("mps", "cpu"), "auto", 2, "cpu"),  # no process group there
    (("mps", "cpu"), "mps", 1, "mps"),
]


@pytest.mark.parametrize(("here", "asked", "world", "chosen"), CHOICES)
def test_the_device_is_the_one_asked_for_or_the_best_here(here, asked, world, chosen, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    _with_devices(monkeypatch, *here)
    assert choose_device(asked, Topology(world, 1)) == chosen


def test_auto_follows_a_launcher_that_was_told_to_use_the_cpu(monkeypatch):
    _with_devices(monkeypatch, "cuda", "cpu")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert choose_device("auto", Topology(2, 1)) == "cpu"


REFUSED = [  # devices of the machine, asked, processes, message
    (("cpu",), "cuda", 1, "--accelerator.device cuda: not on this machine, which has cpu"),
    (("mps", "cpu"), "xpu", 1, "--accelerator.device xpu: not on this machine, which has mps, cpu"),
    (("mps", "cpu"), "mps", 2, "--accelerator.device mps: has no process group.*ddp.*use --accelerator.device cpu"),
]


@pytest.mark.parametrize(("here", "asked", "world", "message"), REFUSED)
def test_a_device_that_cannot_be_used_is_refused(here, asked, world, message, monkeypatch):
    _with_devices(monkeypatch, *here)
    with pytest.raises(ps.ConfigError, match=message):
        choose_device(asked, Topology(world, 1))


def test_a_local_runtime():
    with ps.start(accelerator=CPU) as runtime:
        assert (runtime.rank, runtime.world_size, runtime.dp_rank, runtime.dp_size) == (0, 1, 0, 1)
        assert (runtime.topology, runtime.device, runtime.mesh) == (Topology(1, 1), torch.device("cpu"), None)
        assert runtime.is_main
        assert runtime.accelerator is not None
        assert not torch.distributed.is_initialized()
        runtime.barrier()
        assert runtime.all_reduce(torch.ones(2)).tolist() == [1, 1]


def test_one_runtime_at_a_time_and_closing_twice_is_harmless():
    first = ps.start(accelerator=CPU)
    with pytest.raises(RuntimeError, match="already open in this process; close it first"):
        ps.start(accelerator=CPU)
    first.close()
    first.close()
    second = ps.start(accelerator=CPU)
    first.close()  # must not end the second
    with pytest.raises(RuntimeError, match="already open"):
        ps.start(accelerator=CPU)
    second.close()


def test_a_runtime_takes_the_configuration_it_is_given_not_the_last_ones():
    for precision in ("bf16", "no", "bf16"):
        with ps.start(accelerator=ps.AcceleratorConfig(device="cpu", mixed_precision=precision)) as runtime:
            with runtime.autocast():
                dtype = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
            assert dtype == {"bf16": torch.bfloat16, "no": torch.float32}[precision]


def test_a_block_that_raises_closes_its_runtime():
    with pytest.raises(KeyError), ps.start(accelerator=CPU):
        raise KeyError
    with ps.start(accelerator=CPU):
        pass


def test_a_start_that_fails_leaves_nothing_behind():
    with pytest.raises(ValueError, match="nonsense"):
        ps.start(accelerator=CPU, log_with="nonsense", project_dir="unused")
    with pytest.raises(ps.ConfigError, match="does not fit 1 process"):
        ps.start(ps.ParallelismConfig(2, 2), CPU)
    with ps.start(accelerator=CPU) as runtime:
        assert runtime.accelerator.trackers == []


class _Tracker:
    finished = 0

    def finish(self) -> None:
        self.finished += 1


def test_closing_ends_trackers():
    with ps.start(accelerator=CPU) as runtime:
        tracker = _Tracker()
        runtime.accelerator.trackers = [tracker]
    runtime.close()
    assert tracker.finished == 1


_PROGRAM = """
import warnings; warnings.simplefilter("error")
import purestep as ps, torch
runtime = ps.start(accelerator=ps.AcceleratorConfig(device="cpu"))
print(runtime.topology, torch.distributed.is_initialized())
{end}
"""


@pytest.mark.parametrize("end", ["runtime.close()", "", "raise SystemExit(0)"], ids=["closed", "left open", "exits"])
def test_a_program_ends_without_a_word_and_one_launched_process_has_no_process_group(end):
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(end=end)],
        env={**os.environ, **launched},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "local (replicate 1 x shard 1) False\n", "")


def _several_runtimes() -> dict[str, Any]:
    """Several runtimes one after the other in the processes of one launch."""
    results: dict[str, Any] = {"sums": []}
    for degrees in ((2, 1), (1, 2), (1, 1), (1, -1)):
        with ps.start(ps.ParallelismConfig(*degrees), CPU) as runtime:
            total = runtime.all_reduce(torch.tensor([1.0 + runtime.rank]))
            largest = runtime.all_reduce(torch.tensor([runtime.rank]), op="max")
            names = runtime.mesh.mesh_dim_names
            results["sums"].append((runtime.topology.kind, names, total.item(), largest.item()))
            results["rank"] = (runtime.rank, runtime.is_main)
            results["second"] = error_of(ps.start, ps.ParallelismConfig(), CPU)
        results["ended"] = not torch.distributed.is_initialized()
    results["bad degrees"] = error_of(ps.start, ps.ParallelismConfig(3, 1), CPU)
    results["bad tracker"] = error_of(ps.start, ps.ParallelismConfig(), CPU, log_with="nonsense", project_dir="unused")
    results["no group left"] = not torch.distributed.is_initialized()
    try:
        with ps.start(ps.ParallelismConfig(1, 2), CPU):
            raise KeyError
    except KeyError:
        results["after an error"] = not torch.distributed.is_initialized()
    quick = ps.AcceleratorConfig(device="cpu", process_group=ps.ProcessGroupConfig(timeout_s=7))
    with ps.start(ps.ParallelismConfig(1, 2), quick) as runtime:
        results["timeout"] = connecting._store.timeout.total_seconds()
        results["again"] = runtime.all_reduce(torch.ones(1)).item()
    return results


def test_runtimes_follow_each_other_on_two_ranks():
    everyone = run_ranks(_several_runtimes, 2)
    for rank, results in enumerate(everyone):
        assert results["sums"] == [
            ("ddp", ("dp_replicate",), 3.0, 1),
            ("fsdp2", ("dp_shard",), 3.0, 1),
            ("ddp", ("dp_replicate",), 3.0, 1),
            ("fsdp2", ("dp_shard",), 3.0, 1),
        ]
        assert results["rank"] == (rank, rank == 0)
        assert "already open" in results["second"][1]
        assert results["ended"]
        assert results["no group left"]
        assert results["after an error"]
        assert "does not fit 2 processes" in results["bad degrees"][1]
        assert "nonsense" in results["bad tracker"][1]
        assert results["again"] == 2
        assert results["timeout"] == 7


def test_a_runtime_of_another_precision_after_one_that_failed():
    seen = []

    def fail(precision: str) -> None:
        config = ps.AcceleratorConfig(device="cpu", mixed_precision=precision)
        with ps.start(accelerator=config) as runtime, runtime.autocast():
            seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
            raise KeyError

    for precision in ("fp16", "bf16", "no"):
        with pytest.raises(KeyError):
            fail(precision)
        assert seen[-1] == {"fp16": torch.float16, "bf16": torch.bfloat16, "no": torch.float32}[precision]
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_every_ending_is_made_whatever_happens_to_the_others():
    class Broken(_Tracker):
        def finish(self) -> None:
            raise OSError("the disk is full")

    good = _Tracker()
    runtime = ps.start(accelerator=ps.AcceleratorConfig(device="cpu", deterministic=True))
    runtime.accelerator.trackers = [Broken(), good, Broken()]
    with pytest.raises(OSError, match="the disk is full"):
        runtime.close()
    assert good.finished == 1
    assert not torch.are_deterministic_algorithms_enabled()
    with ps.start(accelerator=CPU):
        pass


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), ("cuda", "cuda:nccl,cpu:gloo"), ("xpu", "xpu:xccl,cpu:gloo")]
)
def test_an_accelerator_has_a_backend_for_the_cpu_beside_its_own(device, backend):
    assert choose_backend(device) == backend
    torch.distributed.distributed_c10d.BackendConfig(torch.distributed.Backend(backend))  # torch understands it
