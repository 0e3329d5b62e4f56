"""What a training run is asked to do, as plain values. Importing this module imports neither torch nor accelerate."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from purestep.sharding.config import AcceleratorConfig, ConfigError, ParallelismConfig
from purestep.sharding.rules import ShardingSpec

if TYPE_CHECKING:
    from torch import nn

CheckpointFormat = Literal["safetensors", "dcp", "safetensors_dcp"]
Tracker = Literal["tensorboard", "wandb", "trackio"]


@dataclass(frozen=True)
class DataConfig:
    """Where the samples come from."""

    path: Path | None = None
    """File or folder to read; None: the program's own default."""
    num_workers: int = 0
    """Processes that load batches ahead, on each rank. 0: load in the training process."""

    def __post_init__(self) -> None:
        _at_least(0, "--data.num-workers", self.num_workers)


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved, and which checkpoints stay: with no rule all, otherwise those that any rule keeps."""

    every: int = 0
    """Steps between checkpoints; there is always one after the last step. 0: only that one."""
    keep_last: int | None = None
    """How many of the newest checkpoints stay."""
    keep_every: int | None = None
    """Checkpoints of steps that are a multiple of this stay for good."""
    keep_best: tuple[str, Literal["min", "max"]] | None = None
    """The checkpoint with the least or the greatest value of a metric stays, e.g. eval/loss min."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy in host memory, while training goes on."""

    def __post_init__(self) -> None:
        _at_least(0, "--checkpoint.every", self.every)
        for flag, value in (
            ("--checkpoint.keep-last", self.keep_last),
            ("--checkpoint.keep-every", self.keep_every),
        ):
            if value is not None:
                _at_least(1, flag, value)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run as a frozen tree of values: everything that `fit` needs besides the experiment itself.

    Subclass it with the fields of your own program; `ps.main` turns every field into a flag and `train_config.json`
    holds them all. A subclass that defines `__post_init__` calls `super().__post_init__()`.

    Raises:
        ConfigError: a value is out of range; the message names the flag.

    >>> import dataclasses, purestep as ps
    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Config(ps.TrainConfig):
    ...     learning_rate: float = 3e-4
    >>> Config(steps=10).learning_rate
    0.0003
    >>> Config(steps=0)
    Traceback (most recent call last):
    purestep.sharding.config.ConfigError: --steps 0: must be at least 1
    """

    output_dir: Path = Path("runs/default")
    """The run's directory: config, metrics, plot and checkpoints. Must not exist yet, unless --resume."""
    resume: bool = False
    """Continue the run in --output-dir from its newest valid checkpoint, with the run's own config as the defaults."""
    steps: int = 1000
    """Optimizer updates in all."""
    batch_size: int = 32
    """Samples a step, over all processes and microbatches: the global batch."""
    seed: int = 0
    """Decides the initial parameters, the order of the samples and every random number, whatever the topology."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl; the last step and evaluated ones always have one."""
    eval_every: int = 0
    """Steps between evaluations; there is always one after the last step. 0: only that one."""
    log_with: tuple[Tracker, ...] = ()
    """Trackers that also get the metrics."""
    checkpoint_format: CheckpointFormat = "safetensors"
    """Files of a checkpoint. safetensors_dcp: the model as safetensors and everything as DCP."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the state is saved."""
    data: DataConfig = field(default_factory=DataConfig)
    """Where the samples come from."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """How the processes divide the work."""
    accelerator: AcceleratorConfig = field(default_factory=AcceleratorConfig)
    """Device, precision, and the knobs of torch's engines."""
    sharding: ShardingSpec | None = None
    """How the model maps to units, instead of what the experiment or the model says. None: as they say."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--steps", self.steps),
            ("--batch-size", self.batch_size),
            ("--log-every", self.log_every),
        ):
            _at_least(1, flag, value)
        _at_least(0, "--eval-every", self.eval_every)
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"--seed {self.seed}: must be from 0 to 2**64 - 1")
        if len(set(self.log_with)) != len(self.log_with):
            raise ConfigError(f"--log-with {' '.join(self.log_with)}: a tracker is named twice")


@dataclass(frozen=True)
class Experiment:
    """What is trained, on what, and how: the part of a run that is code.

    Raises:
        TypeError: the loss is not callable, or a dataset has no length or cannot be indexed.
    """

    model: nn.Module
    """The module; its own parameters are never read when it is on the meta device."""
    loss: Callable[..., Any]
    """`loss(model, batch, key) -> Mean | scalar | (Mean | scalar, metrics)`."""
    optimizer: Any
    """`init(params)` and `update(grads, opt_state, params, *, step)`, e.g. from `ps.chain`."""
    data: Any
    """Map-style dataset; its items collate to a tree of tensors with one leading dim."""
    spec: Any = None
    """`ShardingSpec`; None: the model's own `sharding_spec`, or what is found in the model. The config's `sharding`
    wins over it."""
    eval: Any = None
    """Map-style dataset that the same loss is evaluated on, every sample once; None: no evaluation."""
    on_end: Callable[[Any], None] | None = None
    """Called with the `Run` on every rank after the last step."""
    collate_fn: Callable[[list], Any] | None = None
    """How a list of items becomes a batch; None: torch's default."""

    def __post_init__(self) -> None:
        for name in ("loss", "on_end", "collate_fn"):
            value = getattr(self, name)
            if not callable(value) and (name == "loss" or value is not None):
                raise TypeError(f"Experiment.{name} must be callable, got {type(value).__name__}")
        for name in ("data", "eval"):
            dataset = getattr(self, name)
            if name == "eval" and dataset is None:
                continue
            if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
                raise TypeError(
                    f"Experiment.{name} must be a map-style dataset (len(dataset) and dataset[i]), "
                    f"got {type(dataset).__name__}: an iterable cannot be sought to step k"
                )


def check_trackers(config: TrainConfig) -> None:
    """Raise `ConfigError` when a tracker's package is not installed: accelerate would warn and go on without it."""
    for tracker in config.log_with:
        packages = ("tensorboard", "tensorboardX") if tracker == "tensorboard" else (tracker,)
        if not any(importlib.util.find_spec(package) for package in packages):
            raise ConfigError(f"--log-with {tracker}: not installed here; pip install {tracker}")


def _at_least(least: int, flag: str, value: int) -> None:
    if value < least:
        raise ConfigError(f"{flag} {value}: must be at least {least}")
