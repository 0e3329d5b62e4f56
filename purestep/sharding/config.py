"""What a run asks of its machines, as plain values. Importing this module imports neither torch nor accelerate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

TopologyKind = Literal["local", "ddp", "fsdp2", "hsdp"]


class ConfigError(ValueError):
    """A configuration that cannot work here; the message names the flag and the fix."""


@dataclass(frozen=True)
class Topology:
    """How the processes of one run divide the work: `replicate` groups of `shard` processes each."""

    replicate: int
    """Groups that hold copies of the state."""
    shard: int
    """Processes that share one copy of the state."""

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.replicate * self.shard

    @property
    def dp_size(self) -> int:
        """Data-parallel processes: each sees its own slice of the global batch."""
        return self.replicate * self.shard

    @property
    def kind(self) -> TopologyKind:
        """`local`, `ddp` (copies), `fsdp2` (shards) or `hsdp` (copies of shards)."""
        if self.world_size == 1:
            return "local"
        if self.shard == 1:
            return "ddp"
        return "fsdp2" if self.replicate == 1 else "hsdp"

    @property
    def is_sharded(self) -> bool:
        """Whether a process holds only a part of each parameter."""
        return self.shard > 1

    def __str__(self) -> str:
        return f"{self.kind} (replicate {self.replicate} x shard {self.shard})"


@dataclass(frozen=True)
class ParallelismConfig:
    """Two degrees say the whole topology.

    >>> ParallelismConfig(dp_shard=-1).resolve(8)
    Topology(replicate=1, shard=8)
    >>> ParallelismConfig(dp_replicate=2, dp_shard=2).resolve(4).kind
    'hsdp'
    """

    dp_replicate: int = 1
    """Copies of the model (DDP, or HSDP with dp_shard). -1: as many as the processes allow."""
    dp_shard: int = 1
    """Processes one copy is sharded over (FSDP2). -1: as many as the processes allow."""
    tp: int = 1
    """Tensor-parallel degree. Reserved: must be 1."""
    cp: int = 1
    """Context-parallel degree. Reserved: must be 1."""

    def resolve(self, world_size: int) -> Topology:
        """The topology of `world_size` processes. Pure: this config keeps its -1.

        Raises:
            ConfigError: the degrees are invalid or do not multiply to the number of processes; each is echoed.
        """
        asked = f"--parallelism.dp-replicate {self.dp_replicate} --parallelism.dp-shard {self.dp_shard}"
        for name in ("tp", "cp"):
            if getattr(self, name) != 1:
                raise ConfigError(
                    f"--parallelism.{name} {getattr(self, name)}: this degree is reserved and must be 1; "
                    "use --parallelism.dp-replicate and --parallelism.dp-shard"
                )
        for flag, degree in (("dp-replicate", self.dp_replicate), ("dp-shard", self.dp_shard)):
            if degree != -1 and degree < 1:
                raise ConfigError(f"--parallelism.{flag} {degree}: a degree is a positive number, or -1 to infer it")
        if self.dp_replicate == self.dp_shard == -1:
            raise ConfigError(f"{asked}: only one degree can be inferred; set the other")
        if self.dp_replicate == self.dp_shard == 1:
            return Topology(replicate=world_size, shard=1)
        replicate, shard = self.dp_replicate, self.dp_shard
        if replicate == -1 and world_size % shard == 0:
            replicate = world_size // shard
        if shard == -1 and world_size % replicate == 0:
            shard = world_size // replicate
        if replicate * shard != world_size or -1 in (replicate, shard):
            raise ConfigError(
                f"{asked} does not fit {world_size} process{'es' * (world_size != 1)}: the degrees must "
                "multiply to the "
                f"number of processes; start {_fitting(self)} (torchrun --nproc-per-node), or change a degree "
                "(-1 infers it)"
            )
        return Topology(replicate=replicate, shard=shard)


def _fitting(config: ParallelismConfig) -> str:
    if -1 in (config.dp_replicate, config.dp_shard):
        return f"a multiple of {max(config.dp_replicate, config.dp_shard)}"
    return f"{config.dp_replicate * config.dp_shard} processes"


@dataclass(frozen=True)
class GradientAccumulationConfig:
    """How many microbatches make one optimizer update."""

    steps: int = 1
    """Microbatches a step, on each rank."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"--accelerator.gradient-accumulation.steps {self.steps}: must be at least 1")


@dataclass(frozen=True)
class FSDPConfig:
    """Knobs of FSDP2 (`torch.distributed.fsdp.fully_shard`); they act when dp_shard > 1."""

    reshard_after_forward: bool = True
    """Free a unit's gathered parameters after its forward and gather them again in backward: less memory, more traffic.
    The root unit, which backward needs first, stays gathered."""
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which units are gathered. fp32 gives the numbers of DDP and local exactly; bf16 halves the traffic."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients are reduced."""


@dataclass(frozen=True)
class DDPConfig:
    """Knobs of `torch.nn.parallel.DistributedDataParallel`; they act when the topology is DDP."""

    bucket_cap_mb: int = 25
    """Size of the gradient buckets that are reduced while backward goes on, in MiB."""
    find_unused_parameters: bool = False
    """Search for parameters without a gradient in each step: needed when a loss does not use all of them."""
    static_graph: bool = False
    """Promise that every step uses the same parameters."""

    def __post_init__(self) -> None:
        if self.bucket_cap_mb < 1:
            raise ConfigError(f"--accelerator.ddp.bucket-cap-mb {self.bucket_cap_mb}: must be at least 1")


@dataclass(frozen=True)
class ProcessGroupConfig:
    """Knobs of the process group."""

    timeout_s: float = 600.0
    """Seconds after which a collective that some rank did not join fails instead of waiting."""

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ConfigError(f"--accelerator.process-group.timeout-s {self.timeout_s}: must be positive")


@dataclass(frozen=True)
class AcceleratorConfig:
    """What the run needs from accelerate and from torch's engines, as plain values; `ps.start` builds the objects."""

    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = "auto"
    """Where to compute. auto: the accelerator of this machine, else the CPU."""
    mixed_precision: Literal["no", "bf16"] = "no"
    """bf16: forward and loss under autocast, in every topology; parameters, gradients and optimizer stay fp32."""
    gradient_accumulation: GradientAccumulationConfig = field(default_factory=GradientAccumulationConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    ddp: DDPConfig = field(default_factory=DDPConfig)
    process_group: ProcessGroupConfig = field(default_factory=ProcessGroupConfig)
