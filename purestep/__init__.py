"""purestep: JAX-style functional training steps on PyTorch.

`import purestep as ps`. Names load on first use, so that a program can parse its configuration, or print its help,
without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from purestep._lazy import attach

__version__ = "0.1.0"

_PUBLIC = {
    "state": (
        "TrainState",
        "Key",
        "key",
        "FrozenDict",
        "ConsumedStateError",
        "check_replicas",
        "save",
        "restore",
        "RestoreReport",
        "describe",
        "verify",
        "diff",
        "Comparison",
        "convert",
        "import_params",
        "Checkpoints",
        "CheckpointError",
    ),
    "sharding": (
        "ParallelismConfig",
        "Topology",
        "AcceleratorConfig",
        "GradientAccumulationConfig",
        "FSDPConfig",
        "DDPConfig",
        "ProcessGroupConfig",
        "LossScaleConfig",
        "CompileConfig",
        "ConfigError",
        "Runtime",
        "start",
        "ShardingSpec",
        "ShardingError",
        "Unit",
        "ActivationCheckpointing",
        "Plan",
        "PureModule",
        "shard",
        "init",
        "initial_loss_scale",
        "next_loss_scale",
        "abstract_state",
        "load_params",
        "LoadReport",
    ),
    "functional": (
        "Mean",
        "Gradients",
        "value_and_grad",
        "accumulate",
        "clip_by_global_norm",
        "global_norm",
        "adamw",
        "adam",
        "sgd",
        "adagrad",
        "rmsprop",
        "nadam",
        "radam",
        "lion",
        "adafactor",
        "muon",
        "from_torch",
        "schedule_free",
        "chain",
        "GradientTransform",
        "Optimizer",
        "scale",
        "clip_by_value",
        "clip_by_group",
        "centralize",
        "add_noise",
        "monitor_norms",
        "partition",
        "Param",
        "freeze",
        "decay_mask",
        "NO_DECAY",
        "skip_nonfinite",
        "NonFiniteError",
        "lookahead",
        "with_ema",
        "eval_params",
        "with_hyperparameters",
        "set_hyperparameters",
        "switch_optimizer",
        "constant",
        "linear",
        "cosine",
        "warmup_cosine",
        "warmup_stable_decay",
        "join",
        "train_step",
        "eval_step",
        "evaluate",
        "scan",
        "donate",
        "find_nonfinite",
        "jvp",
        "hvp",
        "per_sample_grads",
        "BatchOrder",
        "loader",
    ),
    "training": ("TrainConfig", "Experiment", "Run", "fit", "main"),
}

_SOURCES = {name: package for package, names in _PUBLIC.items() for name in names}

__all__ = ["__version__", *_SOURCES]


__getattr__, __dir__ = attach(__name__, {**_SOURCES, **{name: name for name in (*_PUBLIC, "testing")}})


if TYPE_CHECKING:
    from purestep.functional import *  # noqa: F403
    from purestep.sharding import *  # noqa: F403
    from purestep.state import *  # noqa: F403
    from purestep.training import *  # noqa: F403
