"""The runtime: processes, device, mesh and accelerate's `Accelerator`; one a process, ended cleanly."""

from __future__ import annotations

import atexit
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from purestep.sharding.config import AcceleratorConfig, ConfigError, ParallelismConfig, Topology
from purestep.sharding.environment import launched_on_cpu, launched_world_size, refuse_interference, without_launcher
from purestep.state.checkpoint.background import finish_running

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed.device_mesh import DeviceMesh

_open: Runtime | None = None
_store: Any = None  # where the processes meet; it outlives a runtime, so that a second one in a process meets there too
_generation = 0


@dataclass(eq=False)
class Runtime:
    """Where a run lives. Made by `ps.start`; a context manager, so that the process group ends with its block.

    Every rank is a data-parallel rank: it sees its own slice of each global batch.
    """

    topology: Topology
    device: torch.device
    config: AcceleratorConfig = field(default_factory=AcceleratorConfig)
    mesh: DeviceMesh | None = None
    """None for local; ("dp_replicate",), ("dp_shard",) or both otherwise."""
    accelerator: Accelerator | None = None
    """None only for the default local runtime of `ps.shard`."""

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.topology.world_size

    @property
    def rank(self) -> int:
        """This process among all."""
        return torch.distributed.get_rank() if self.world_size > 1 else 0

    @property
    def dp_rank(self) -> int:
        """Which slice of the global batch is this process's."""
        return self.rank

    @property
    def dp_size(self) -> int:
        """Number of slices of the global batch."""
        return self.topology.dp_size

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints."""
        return self.rank == 0

    def autocast(self) -> AbstractContextManager:
        """The mixed-precision context for a forward and its loss."""
        return nullcontext() if self.accelerator is None else self.accelerator.autocast()

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Sum (or "max") `tensor` over all ranks, in place."""
        if self.world_size > 1:
            reduce = {"sum": torch.distributed.ReduceOp.SUM, "max": torch.distributed.ReduceOp.MAX}[op]
            torch.distributed.all_reduce(tensor, op=reduce)
        return tensor

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            torch.distributed.barrier()

    def close(self) -> None:
        """End trackers and the process group. Safe to call twice."""
        global _open
        if _open is not self:
            return
        _open = None
        atexit.unregister(self.close)
        from accelerate.state import AcceleratorState, GradientState

        try:
            if self.accelerator is not None:
                for tracker in self.accelerator.trackers:
                    tracker.finish()
        finally:
            finish_running()  # saves in flight need the process group
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def start(
    parallelism: ParallelismConfig | None = None,
    accelerator: AcceleratorConfig | None = None,
    *,
    log_with: str | list[str] | None = None,
    project_dir: str | Path | None = None,
) -> Runtime:
    """Start this process's part of a run: device, process group, mesh, Accelerator.

    The number of processes comes from the launcher (torchrun, `accelerate launch`); how they divide the work from
    `parallelism`. Everything is checked before a process group exists.

    Args:
        parallelism: the two degrees; default one process, or DDP over all that were launched.
        accelerator: device, precision and engine knobs.
        log_with: trackers for accelerate ("tensorboard", "wandb", "trackio").
        project_dir: where trackers write.

    Raises:
        ConfigError: the degrees do not fit the processes, the device is not here, or the environment interferes.
        RuntimeError: a runtime is already open in this process.

    >>> import purestep as ps
    >>> with ps.start(accelerator=ps.AcceleratorConfig(device="cpu")) as runtime:
    ...     print(runtime.topology, runtime.device)
    local (replicate 1 x shard 1) cpu
    """
    global _open
    parallelism, config = parallelism or ParallelismConfig(), accelerator or AcceleratorConfig()
    if _open is not None:
        raise RuntimeError(
            "a runtime is already open in this process; close it first (runtime.close(), or a with block)"
        )
    refuse_interference(config)
    topology = parallelism.resolve(launched_world_size())
    device_type = choose_device(config.device, topology)
    _open = Runtime(topology=topology, device=torch.device(device_type), config=config)
    atexit.register(_open.close)
    try:
        _open.accelerator = _build_accelerator(config, topology, device_type, log_with, project_dir)
        _open.device = _open.accelerator.device if device_type != "cpu" else _open.device
        _open.mesh = _build_mesh(topology, device_type)
        # Everybody is connected to everybody: a rank that fails right away does not take others down at their start.
        _open.all_reduce(torch.zeros(1, device=_open.device))
    except BaseException:
        _open.close()
        raise
    return _open


def local_runtime(device: torch.device | str = "cpu") -> Runtime:
    """A runtime of one process that owns no global state; what `ps.shard(model)` uses."""
    return Runtime(topology=Topology(1, 1), device=torch.device(device))


def choose_device(asked: str, topology: Topology) -> str:
    """The device type to compute on.

    Raises:
        ConfigError: the device asked for is not on this machine, or cannot join a process group.
    """
    here = [name for name, found in _devices() if found]
    if asked == "auto" and launched_on_cpu():
        asked = "cpu"
    if asked == "auto":
        asked = here[0] if not (here[0] == "mps" and topology.world_size > 1) else "cpu"
    if asked not in here:
        raise ConfigError(f"--accelerator.device {asked}: not on this machine, which has {', '.join(here)}")
    if asked == "mps" and topology.world_size > 1:
        raise ConfigError(
            f"--accelerator.device mps: has no process group, so it cannot run {topology}; use --accelerator.device cpu"
        )
    return asked


def _devices() -> list[tuple[str, bool]]:
    return [
        ("cuda", torch.cuda.is_available()),
        ("xpu", hasattr(torch, "xpu") and torch.xpu.is_available()),
        ("mps", torch.backends.mps.is_available()),
        ("cpu", True),
    ]


def _build_accelerator(
    config: AcceleratorConfig, topology: Topology, device_type: str, log_with: Any, project_dir: Any
) -> Accelerator:
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedDataParallelKwargs

    ddp = DistributedDataParallelKwargs(
        bucket_cap_mb=config.ddp.bucket_cap_mb,
        find_unused_parameters=config.ddp.find_unused_parameters,
        static_graph=config.ddp.static_graph,
    )
    with without_launcher() if topology.world_size == 1 else nullcontext():
        if topology.world_size > 1:
            timeout = timedelta(seconds=config.process_group.timeout_s)
            PartialState(cpu=device_type == "cpu", timeout=timeout, **_meeting_place(timeout))
        return Accelerator(
            cpu=device_type == "cpu",
            mixed_precision=config.mixed_precision,
            gradient_accumulation_steps=config.gradient_accumulation.steps,
            kwargs_handlers=[ddp],
            log_with=log_with,
            project_dir=project_dir,
        )


def _meeting_place(timeout: timedelta) -> dict[str, Any]:
    """Store, rank and world size for a process group.

    A second process group must not find the keys of the first, nor meet a store that its rank 0 is about to close: one
    store a process, one prefix a process group.
    """
    global _store, _generation
    from torch.distributed.rendezvous import rendezvous

    if _store is None:
        _store = next(iter(rendezvous("env://", timeout=timeout)))
    store, rank, world_size = _store
    _generation += 1
    prefixed = torch.distributed.PrefixStore(f"purestep/{_generation}", store)
    return {"store": prefixed, "rank": rank, "world_size": world_size}


def _build_mesh(topology: Topology, device_type: str) -> DeviceMesh | None:
    if topology.kind == "local":
        return None
    from torch.distributed.device_mesh import init_device_mesh

    # A (N, 1) or (1, N) mesh would work too, at the price of collectives over groups of one.
    degrees = {"dp_replicate": topology.replicate, "dp_shard": topology.shard}
    names = tuple(name for name, degree in degrees.items() if degree > 1)
    return init_device_mesh(device_type, tuple(degrees[name] for name in names), mesh_dim_names=names)
