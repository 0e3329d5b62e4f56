"""The process group of a run, and its mesh: joined within the timeout, and every group under that same timeout."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from purestep.sharding.config import Topology
from purestep.sharding.launching import Launch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_store: Any = None  # where the processes meet; it outlives a runtime, so that a second one in a process meets there too
_generation = 0
_BACKENDS = {"cpu": "gloo", "cuda": "cuda:nccl,cpu:gloo", "xpu": "xpu:xccl,cpu:gloo"}


def choose_backend(device_type: str) -> str:
    """The collective backend of a run that computes on `device_type`.

    Beside an accelerator the CPU has its own: offloaded shards, whose norms and sums are taken there, objects and what
    a checkpoint gathers are CPU tensors. A unit may be offloaded by a spec that is not known when the group is made.

    >>> choose_backend("cpu"), choose_backend("cuda")
    ('gloo', 'cuda:nccl,cpu:gloo')
    """
    return _BACKENDS[device_type]


def join(launch: Launch, device_type: str, timeout: timedelta) -> Any:
    """Become one of the processes of a process group; accelerate's state then knows it.

    The variables of `launch` are in the environment.

    Returns:
        The store of this process group.

    Raises:
        RuntimeError: the others were not there in time; names the place, and what to look at.
    """
    from accelerate import PartialState

    try:
        store = _meeting_place(timeout)
        with _threads_shared(launch) if device_type == "cpu" else nullcontext():
            PartialState(
                cpu=device_type == "cpu",
                backend=choose_backend(device_type),
                timeout=timeout,
                store=store,
                rank=launch.rank,
                world_size=launch.world_size,
            )
    except RuntimeError as error:  # torch's errors of the network are such
        raise RuntimeError(
            f"rank {launch.rank} of {launch.world_size} could not join the others at "
            f"{launch.master_addr}:{launch.master_port} within {timeout.total_seconds():g} s "
            "(--accelerator.process-group.timeout-s): start all processes, with one MASTER_ADDR and MASTER_PORT that "
            f"every machine can reach and nothing else uses. {error}"
        ) from error
    return store


def build_mesh(topology: Topology, device_type: str, timeout: timedelta) -> DeviceMesh | None:
    """The mesh of the degrees above one: ("dp_replicate",), ("dp_shard",) or both. None for local. Collective."""
    if topology.kind == "local":
        return None
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    # A (N, 1) or (1, N) mesh would work too, at the price of collectives over groups of one.
    degrees = {"dp_replicate": topology.replicate, "dp_shard": topology.shard}
    names = tuple(name for name, degree in degrees.items() if degree > 1)
    if len(names) == 1:  # the group of all, which has the timeout already
        return init_device_mesh(device_type, (topology.world_size,), mesh_dim_names=names)
    # init_device_mesh would give its groups torch's own timeout.
    ranks = torch.arange(topology.world_size, dtype=torch.int).view(topology.replicate, topology.shard)
    groups = [_group_of_mine(lines.tolist(), timeout) for lines in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


def leave() -> None:
    """Leave the process group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        _let_gloo_rest()


def _let_gloo_rest() -> None:
    """Wait until gloo's threads have dropped the tensors of the last collective calls.

    A sharded module keeps its group, and so the group's threads, alive. A thread that drops a tensor needs the GIL, and
    if the interpreter has begun to end by then, Python ends that thread in a way that C++ answers with `terminate`: the
    process dies of SIGABRT after all its work is done. Sleeping gives the GIL away; on Linux it can be seen when
    nothing is left to do.
    """
    quiet, deadline = 0, time.monotonic() + 2
    while quiet < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
        states = [stat for stat in map(_state_of_thread, Path("/proc/self/task").glob("*")) if stat]
        quiet = 0 if "R" in states else quiet + 1


def _state_of_thread(task: Path) -> str | None:
    """Of one of gloo's threads whether it runs (R), sleeps (S), ..."""
    try:
        if not (task / "comm").read_text().startswith("pt_gloo"):
            return None
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return None


def _meeting_place(timeout: timedelta) -> Any:
    """The store of the next process group.

    A second process group must not find the keys of the first, nor meet a store that its rank 0 is about to close: one
    store a process, one prefix a process group.
    """
    global _store, _generation
    from torch.distributed.rendezvous import rendezvous

    if _store is None:
        _store = next(iter(rendezvous("env://", timeout=timeout)))[0]
    _store.set_timeout(timeout)  # of this runtime, not of the first
    _generation += 1
    return torch.distributed.PrefixStore(f"purestep/{_generation}", _store)


def _group_of_mine(lines: list[list[int]], timeout: timedelta) -> Any:
    """Make a group of each line of ranks, as every rank has to, and return the one with this rank."""
    mine = None
    for line in lines:
        group = torch.distributed.new_group(line, timeout=timeout)
        if torch.distributed.get_rank() in line:
            mine = group
    return mine


@contextmanager
def _threads_shared(launch: Launch) -> Iterator[None]:
    """Share the cores between the processes of this machine, unless the launcher has done so (torchrun does).

    Otherwise accelerate does, with a warning, and fails where the system does not tell its number of physical cores.
    """
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // launch.local_world_size)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
