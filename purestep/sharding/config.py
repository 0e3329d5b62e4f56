"""What a run asks of its machines, as plain values. Importing this module imports neither torch nor accelerate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

Dtype = Literal["fp32", "bf16", "fp16"]
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
    policy: Literal["sync_each", "defer_all_reduce", "defer_all"] = "sync_each"
    """When gradients are reduced under FSDP2 and HSDP: at every microbatch; over shards at every one and over replicas
    at the last; or all at the last, which keeps whole gradients in between. DDP reduces at the last one."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"--accelerator.gradient-accumulation.steps {self.steps}: must be at least 1")


@dataclass(frozen=True)
class ActivationCheckpointing:
    """What backward computes again instead of keeping it from forward: less memory, more time."""

    mode: Literal["none", "full", "selective"] = "none"
    """full: keep only inputs. selective: keep what `save_ops` computed, too."""
    modules: tuple[str, ...] = ()
    """Globs on paths within a unit: recompute only these submodules. None given: the whole unit."""
    save_ops: tuple[str, ...] = ()
    """Operators whose results are kept, such as aten.mm or aten._scaled_dot_product*. None given: matrix products,
    attention and collectives."""
    every: int = 1
    """Only every n-th of the units that a rule takes, beginning with the first."""

    def __post_init__(self) -> None:
        for name in ("modules", "save_ops"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"ActivationCheckpointing.{name} is a tuple of globs, got {getattr(self, name)!r}")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.mode not in ("none", "full", "selective"):
            raise ConfigError(
                f"--accelerator.activation-checkpointing.mode {self.mode}: expected none, full or selective"
            )
        if self.every < 1:
            raise ConfigError(f"--accelerator.activation-checkpointing.every {self.every}: must be at least 1")
        if self.save_ops and self.mode != "selective":
            raise ConfigError(
                f"--accelerator.activation-checkpointing.save-ops {' '.join(self.save_ops)}: acts only with "
                f"--accelerator.activation-checkpointing.mode selective, not with {self.mode}"
            )
        if self.modules and self.mode == "none":
            raise ConfigError(
                f"--accelerator.activation-checkpointing.modules {' '.join(self.modules)}: acts only with "
                "--accelerator.activation-checkpointing.mode full or selective"
            )


@dataclass(frozen=True)
class CompileConfig:
    """Compilation of the eager path, unit by unit."""

    enabled: bool = False
    """Compile every unit whose rule does not say otherwise; a model without units as a whole."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """`torch.compile(mode=...)`, also of units that only a rule of the spec compiles."""


@dataclass(frozen=True)
class LossScaleConfig:
    """The dynamic loss scale of fp16: too small a gradient becomes zero there, too large a one infinite."""

    init: float = 65536.0
    """Scale of the first step."""
    growth_factor: float = 2.0
    """By how much the scale grows after `growth_interval` steps with finite gradients."""
    backoff_factor: float = 0.5
    """By how much it shrinks after a step with a gradient that is not finite; that step changes nothing."""
    growth_interval: int = 2000
    """Steps in a row with finite gradients before the scale grows."""
    min: float = 1.0
    """The scale does not shrink below this."""

    def __post_init__(self) -> None:
        flag = "--accelerator.loss-scale"
        for name, value, fits, expected in (
            ("init", self.init, 0 < self.init < math.inf, "positive and finite"),
            ("growth-factor", self.growth_factor, 1 <= self.growth_factor < math.inf, "at least 1 and finite"),
            ("backoff-factor", self.backoff_factor, 0 < self.backoff_factor < 1, "between 0 and 1"),
            ("growth-interval", self.growth_interval, self.growth_interval >= 1, "at least 1"),
            ("min", self.min, 0 < self.min <= self.init, f"positive, and at most {flag}.init ({self.init})"),
        ):
            if not fits:
                raise ConfigError(f"{flag}.{name} {value}: must be {expected}")


@dataclass(frozen=True)
class FSDPConfig:
    """Knobs of FSDP2 (`torch.distributed.fsdp.fully_shard`); they act when dp_shard > 1. A spec may say otherwise of a
    unit.
    """

    reshard_after_forward: bool | int = True
    """Free a unit's gathered parameters after its forward and gather them again in backward: less memory, more traffic.
    An int keeps them sharded over that many ranks in between, e.g. those of one machine. The root unit, which backward
    needs first, stays gathered."""
    param_dtype: Dtype = "fp32"
    """Dtype in which units are gathered. fp32 gives the numbers of DDP and local exactly; bf16 halves the traffic."""
    reduce_dtype: Dtype = "fp32"
    """Dtype in which gradients are reduced."""
    output_dtype: Dtype | None = None
    """Dtype to which floating-point outputs of units are cast. None: they stay as they are."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory; gather from there."""
    prefetch: int | None = None
    """Units gathered ahead of the one that runs, in forward and backward. 0: none. None: as FSDP2 does by itself, which
    is one ahead in backward."""

    def __post_init__(self) -> None:
        check_reshard(self.reshard_after_forward, "--accelerator.fsdp")
        check_prefetch(self.prefetch, "--accelerator.fsdp")


@dataclass(frozen=True)
class DDPConfig:
    """Knobs of `torch.nn.parallel.DistributedDataParallel`; they act when the topology is DDP."""

    bucket_cap_mb: int = 25
    """Size of the gradient buckets that are reduced while backward goes on, in MiB."""
    find_unused_parameters: bool = False
    """Search for parameters without a gradient in each step: needed when a loss does not use all of them."""
    static_graph: bool = False
    """Promise that every step uses the same parameters."""
    reduce_dtype: Dtype = "fp32"
    """Dtype in which gradients are reduced. bf16 and fp16 halve the traffic."""

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
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """bf16, fp16: forward and loss under autocast, in every topology; parameters, gradients and optimizer stay fp32."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """How the loss is scaled under fp16."""
    deterministic: bool = False
    """Let torch use deterministic algorithms only: the same bits in every run on the same machine, slower."""
    activation_checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    """Of every unit whose rule does not say otherwise."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    """Compilation unit by unit."""
    gradient_accumulation: GradientAccumulationConfig = field(default_factory=GradientAccumulationConfig)
    """Microbatches."""
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """Knobs of FSDP2."""
    ddp: DDPConfig = field(default_factory=DDPConfig)
    """Knobs of DDP."""
    process_group: ProcessGroupConfig = field(default_factory=ProcessGroupConfig)
    """Knobs of the process group."""

    def __post_init__(self) -> None:
        for flag, dtype in (
            ("fsdp.param-dtype", self.fsdp.param_dtype),
            ("fsdp.reduce-dtype", self.fsdp.reduce_dtype),
            ("ddp.reduce-dtype", self.ddp.reduce_dtype),
        ):
            self.check_scaled(f"--accelerator.{flag}", dtype)

    def check_scaled(self, name: str, dtype: Dtype) -> None:
        """Raise `ConfigError` for gradients that pass through fp16 unless the loss is scaled for it."""
        if dtype == "fp16" and self.mixed_precision != "fp16":
            raise ConfigError(
                f"{name} fp16: without --accelerator.mixed-precision fp16 no loss scale keeps gradients within its "
                "range; set that, or use bf16"
            )


def check_reshard(value: bool | int | None, where: str) -> None:
    """Raise `ConfigError` unless `value` can be a `reshard_after_forward`; `where` says whose it is."""
    if not isinstance(value, bool) and value is not None and value < 2:
        name = f"{where}.reshard-after-forward" if where.startswith("--") else f"{where}: reshard_after_forward"
        raise ConfigError(f"{name} {value}: as a number it is the ranks to reshard over, at least 2; or True or False")


def check_prefetch(value: int | None, where: str) -> None:
    """Raise `ConfigError` unless `value` can be a `prefetch`; `where` says whose it is."""
    if value is not None and value < 0:
        name = f"{where}.prefetch" if where.startswith("--") else f"{where}: prefetch"
        raise ConfigError(f"{name} {value}: must be at least 0, or None to leave it to FSDP2")
