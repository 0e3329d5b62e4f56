"""One step on several gloo ranks, against hand-written FSDP2 and DDP loops: `python -m benchmarks.sharded [--ranks 2]`.

All contenders train the same GPT on the same batches in the same processes, taking turns: forward, backward, clip to
norm 1, AdamW. FSDP2 by hand uses foreach AdamW, which is what torch picks for DTensors, and fused for comparison.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import purestep as ps
from benchmarks.models import GPT, batch_of_tokens, cross_entropy, purestep_loop
from benchmarks.timing import interleave, report


@dataclasses.dataclass(frozen=True)
class Options:
    ranks: int = 2
    rounds: int = 5
    steps: int = 20
    kind: str = "both"
    """fsdp2, ddp or both."""


def fsdp2_loop(tokens: torch.Tensor, world_size: int, **adamw: Any) -> Callable[[], None]:
    model = GPT()
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _loop(model, tokens, **adamw)


def ddp_loop(tokens: torch.Tensor) -> Callable[[], None]:
    return _loop(torch.nn.parallel.DistributedDataParallel(GPT()), tokens, fused=True)


def _loop(model: torch.nn.Module, tokens: torch.Tensor, **adamw: Any) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **adamw)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def runtime_of(runtime: ps.Runtime, topology: ps.Topology) -> ps.Runtime:
    # The same processes serve two topologies in turn; a run of its own would open one runtime.
    name = "dp_shard" if topology.is_sharded else "dp_replicate"
    mesh = init_device_mesh("cpu", (runtime.world_size,), mesh_dim_names=(name,))
    return dataclasses.replace(runtime, topology=topology, mesh=mesh)


def worker(rank: int, options: Options, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(options.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    with ps.start(ps.ParallelismConfig(), ps.AcceleratorConfig(device="cpu")) as runtime:
        tokens = batch_of_tokens(seed=rank)
        if options.kind in ("both", "fsdp2"):
            sharded = runtime_of(runtime, ps.Topology(1, options.ranks))
            contenders = {
                "FSDP2 by hand, foreach": fsdp2_loop(tokens, options.ranks, foreach=True),
                "FSDP2 by hand, fused": fsdp2_loop(tokens, options.ranks, fused=True),
                "purestep sharded, donated": purestep_loop(tokens, runtime=sharded, donate=True),
                "purestep sharded, pure": purestep_loop(tokens, runtime=sharded, donate=False),
            }
            _time(rank, contenders, options)
        if options.kind in ("both", "ddp"):
            copies = runtime_of(runtime, ps.Topology(options.ranks, 1))
            contenders = {
                "DDP by hand, fused": ddp_loop(tokens),
                "purestep DDP, donated": purestep_loop(tokens, runtime=copies, donate=True),
                "purestep DDP, pure": purestep_loop(tokens, runtime=copies, donate=False),
            }
            _time(rank, contenders, options)
        dist.barrier()


def _time(rank: int, contenders: dict[str, Callable[[], None]], options: Options) -> None:
    seconds = interleave(contenders, rounds=options.rounds, steps=options.steps)
    if rank == 0:
        print(
            f"GPT, 4 layers, width 128, batch {options.ranks} x 8 x 64, {options.ranks} gloo ranks, torch "
            f"{torch.__version__}"
        )
        ratios = report(seconds, next(iter(contenders)))
        print(json.dumps({name: round(ratio, 3) for name, ratio in ratios.items()}), flush=True)


def main(options: Options) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, args=(options, port), nprocs=options.ranks)


if __name__ == "__main__":
    main(tyro.cli(Options))
