"""What each setting of a unit does to memory and speed: `python -m benchmarks.memory [--ranks 2]`.

Every setting trains the same GPT in processes of its own, in turn, several rounds. Memory is the growth of a process's
peak resident size from before the module is built to after the last step: parameters, gradients, optimizer, activations
and what FSDP2 gathers, allocator included. Ratios are to the run without the setting.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import socket
import statistics
import time
from typing import Any

import torch
import torch.multiprocessing as mp
import tyro

import purestep as ps
from benchmarks.models import GPT, batch_of_tokens, mean_cross_entropy


@dataclasses.dataclass(frozen=True)
class Options:
    ranks: int = 1
    """Processes; more than one are FSDP2."""
    rounds: int = 3
    steps: int = 4
    """Timed steps, after one that is not."""
    layers: int = 8
    width: int = 256
    batch: int = 16
    """Windows of 256 tokens a process and step."""
    microbatches: int = 1
    compile: bool = False
    """Also with compiled units: the first step then takes long."""


def settings(options: Options) -> dict[str, dict[str, Any]]:
    """By name, the fields of the unit rule, or of `AcceleratorConfig`."""
    recompute = ps.ActivationCheckpointing
    found: dict[str, dict[str, Any]] = {
        "plain": {},
        "checkpointing full": {"activation_checkpointing": recompute("full")},
        "checkpointing selective": {"activation_checkpointing": recompute("selective")},
        "checkpointing every other": {"activation_checkpointing": recompute("full", every=2)},
    }
    if options.compile:
        found["compiled"] = {"compile": True}
    if options.ranks > 1:
        found |= {
            "kept after forward": {"reshard_after_forward": False},
            "no prefetch": {"prefetch": 0},
            "prefetch 2": {"prefetch": 2},
            "gathered in bf16": {"param_dtype": "bf16", "output_dtype": "fp32"},
            "offload": {"cpu_offload": True},
        }
    if options.ranks > 1 and options.microbatches > 1:
        found |= {"defer_all": {"policy": "defer_all"}}
    return found


def worker(rank: int, options: Options, rule: dict[str, Any], port: int, results: Any) -> None:
    torch.set_num_threads(1)
    if options.ranks > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.ranks, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})
    rule = dict(rule)
    accumulation = ps.GradientAccumulationConfig(options.microbatches, rule.pop("policy", "sync_each"))
    config = ps.AcceleratorConfig(device="cpu", gradient_accumulation=accumulation)
    with ps.start(ps.ParallelismConfig(dp_shard=options.ranks), config) as runtime:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with torch.device("meta"):
            model = GPT(width=options.width, layers=options.layers, context=256)
        module = ps.shard(model, ps.ShardingSpec(units=(ps.Unit("blocks.*", **rule),)), runtime)
        optimizer = ps.adamw(1e-3)
        step = ps.train_step(module, mean_cross_entropy, optimizer, accumulate=options.microbatches, donate=True)
        state = ps.init(module, optimizer, ps.key(0))
        tokens, times = batch_of_tokens(options.batch, 256, seed=rank), []
        for _ in range(options.steps + 1):
            start = time.perf_counter()
            state, _ = step(state, tokens)
            times.append(time.perf_counter() - start)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        runtime.barrier()
    if rank == 0:
        results.put((peak * 1024, statistics.median(times[1:])))


def measure(options: Options, rule: dict[str, Any]) -> tuple[float, float]:
    """(bytes, seconds a step) of one run, in processes of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(worker, args=(options, rule, port, results), nprocs=options.ranks)
    return results.get()


def main(options: Options) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in settings(options)}
    for _ in range(options.rounds):
        for name, rule in settings(options).items():
            found[name].append(measure(options, rule))
    print(
        f"GPT, {options.layers} layers, width {options.width}, {options.batch} x 256 tokens a process, "
        f"{options.microbatches} microbatch(es), {options.ranks} process(es), torch {torch.__version__}"
    )
    ratios = {}
    for name, runs in found.items():
        memory, seconds = (statistics.median(run[i] for run in runs) for i in (0, 1))
        ratios[name] = {
            what: round(statistics.median(a[i] / b[i] for a, b in zip(runs, found["plain"], strict=True)), 3)
            for i, what in enumerate(("memory", "time"))
        }
        print(
            f"{name:26} {memory / 1e6:8.0f} MB {ratios[name]['memory']:6.3f}x  "
            f"{seconds * 1e3:8.0f} ms {ratios[name]['time']:6.3f}x"
        )
    print(json.dumps(ratios))


if __name__ == "__main__":
    main(tyro.cli(Options))
