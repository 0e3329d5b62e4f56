"""A program that launchers start: it reports where it is, or fails in one of several ways.

python launched.py REPLICATE SHARD TIMEOUT_S [WHAT RANK]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch

import purestep as ps


def misbehave(what: str) -> None:
    if what == "raises":
        raise ValueError("the data of this rank are bad")
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what.startswith("stalls"):
        time.sleep(300)


def main(replicate: str, shard: str, timeout_s: str, what: str = "", rank: str = "-1") -> None:
    config = ps.AcceleratorConfig(device="cpu", process_group=ps.ProcessGroupConfig(timeout_s=float(timeout_s)))
    with ps.start(ps.ParallelismConfig(int(replicate), int(shard)), config) as runtime:
        total = runtime.all_reduce(torch.tensor([1.0 + runtime.rank])).item()
        if runtime.rank == int(rank):
            misbehave(what)
        if what == "stalls on the shards":  # the others wait in a group of the mesh, not in that of all
            torch.distributed.all_reduce(torch.ones(1), group=runtime.mesh.get_group("dp_shard"))
        runtime.all_reduce(torch.ones(1))
        said = {
            "rank": runtime.rank,
            "local_rank": runtime.local_rank,
            "world": runtime.world_size,
            "kind": runtime.topology.kind,
            "sum": total,
            "local_world": os.environ.get("LOCAL_WORLD_SIZE"),
        }
    if what == "again":  # in one process, with another topology
        with ps.start(ps.ParallelismConfig(1, -1), config) as runtime:
            said["again"] = [runtime.topology.kind, runtime.all_reduce(torch.ones(1)).item()]
    said["left"] = sorted(name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name in os.environ)
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
