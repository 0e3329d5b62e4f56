"""The runtime: processes, device, mesh and accelerate's `Accelerator`; one a process, ended cleanly."""

from __future__ import annotations

import atexit
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from purestep.sharding.config import AcceleratorConfig, ConfigError, ParallelismConfig, Topology
from purestep.sharding.connecting import build_mesh, join, leave
from purestep.sharding.determinism import deterministic_algorithms
from purestep.sharding.environment import launched_on_cpu, refuse_interference
from purestep.sharding.failures import report
from purestep.sharding.launching import Launch, launch_of
from purestep.state.checkpoint.background import finish_running

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed.device_mesh import DeviceMesh

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_open: Runtime | None = None


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
    local_rank: int = 0
    """This process among those of its machine."""
    _store: Any = field(default=None, repr=False)
    _undo: ExitStack = field(default_factory=ExitStack, repr=False)
    """Puts back what was set for the whole process: variables of the environment, torch's switches."""

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
        dtype = _AUTOCAST.get(self.config.mixed_precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

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
        with ExitStack() as ending:  # from the last to the first, each of them whatever happens to the others
            ending.callback(self._undo.close)
            ending.callback(_forget_accelerate)
            ending.callback(leave)
            ending.callback(finish_running)  # saves in flight need the process group
            for tracker in [] if self.accelerator is None else self.accelerator.trackers:
                ending.callback(tracker.finish)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception | KeyboardInterrupt) and self._store is not None and _open is self:
            report(error, self._store, self.rank, self.world_size)
        self.close()


def start(
    parallelism: ParallelismConfig | None = None,
    accelerator: AcceleratorConfig | None = None,
    *,
    log_with: str | list[str] | None = None,
    project_dir: str | Path | None = None,
) -> Runtime:
    """Start this process's part of a run: device, process group, mesh, Accelerator.

    The number of processes comes from the launcher (torchrun, `accelerate launch`, `srun`); how they divide the work
    from `parallelism`. Everything is checked before a process group exists. If one of several processes fails, the
    errors of the others say so, provided that the runtime is used in a `with` block.

    Args:
        parallelism: the two degrees; default one process, or DDP over all that were launched.
        accelerator: device, precision and engine knobs.
        log_with: trackers for accelerate ("tensorboard", "wandb", "trackio").
        project_dir: where trackers write.

    Raises:
        ConfigError: the degrees do not fit the processes, the device is not here, or the environment interferes.
        RuntimeError: a runtime is already open in this process, or the other processes were not there within the
            timeout of the process group.

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
    launch = launch_of()
    topology = parallelism.resolve(launch.world_size)
    device_type = choose_device(config.device, topology)
    _open = Runtime(topology, torch.device(device_type), config, local_rank=launch.local_rank)
    atexit.register(_open.close)
    try:
        _connect(_open, launch, log_with, project_dir)
    except BaseException:
        _open.close()
        raise
    return _open


def _forget_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


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


def _connect(runtime: Runtime, launch: Launch, log_with: Any, project_dir: Any) -> None:
    """Set up everything of a runtime that has to be given back."""
    config, device_type = runtime.config, runtime.device.type
    if config.deterministic:
        runtime._undo.enter_context(deterministic_algorithms(device_type))
    timeout = timedelta(seconds=config.process_group.timeout_s)
    if runtime.world_size == 1:
        with launch.in_environment():
            runtime.accelerator = _build_accelerator(config, device_type, log_with, project_dir)
    else:
        runtime._undo.enter_context(launch.in_environment())
        runtime._store = join(launch, device_type, timeout)
        runtime.accelerator = _build_accelerator(config, device_type, log_with, project_dir)
    runtime.device = runtime.accelerator.device if device_type != "cpu" else runtime.device
    runtime.mesh = build_mesh(runtime.topology, device_type, timeout)
    # Everybody is connected to everybody: a rank that fails right away does not take others down at their start.
    runtime.all_reduce(torch.zeros(1, device=runtime.device))


def _build_accelerator(config: AcceleratorConfig, device_type: str, log_with: Any, project_dir: Any) -> Accelerator:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    ddp = DistributedDataParallelKwargs(
        bucket_cap_mb=config.ddp.bucket_cap_mb,
        find_unused_parameters=config.ddp.find_unused_parameters,
        static_graph=config.ddp.static_graph,
    )
    return Accelerator(
        cpu=device_type == "cpu",
        # accelerate's fp16 brings a gradient scaler of its own, and refuses the CPU: see `Runtime.autocast`.
        mixed_precision=config.mixed_precision if config.mixed_precision == "bf16" else "no",
        gradient_accumulation_steps=config.gradient_accumulation.steps,
        kwargs_handlers=[ddp],
        log_with=log_with,
        project_dir=project_dir,
    )
