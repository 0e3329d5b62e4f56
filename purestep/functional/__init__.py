"""What happens to a state: gradients, optimizers, schedules, steps, and the order of the data."""

from purestep.functional.accumulation import accumulate
from purestep.functional.adafactor import adafactor
from purestep.functional.adaptive import adagrad, nadam, radam, rmsprop
from purestep.functional.averaging import eval_params, with_ema
from purestep.functional.chaining import chain
from purestep.functional.clipping import clip_by_group, clip_by_value
from purestep.functional.data import BatchOrder, loader
from purestep.functional.decay import NO_DECAY, decay_mask
from purestep.functional.derivatives import hvp, jvp, per_sample_grads
from purestep.functional.donation import donate
from purestep.functional.evaluation import evaluate
from purestep.functional.freezing import freeze
from purestep.functional.gradients import Gradients, value_and_grad
from purestep.functional.guarding import NonFiniteError, skip_nonfinite
from purestep.functional.hyperparameters import set_hyperparameters, with_hyperparameters
from purestep.functional.implementations import implementation_change, implementations
from purestep.functional.lifted import from_torch
from purestep.functional.lion import lion
from purestep.functional.localization import find_nonfinite
from purestep.functional.looking_ahead import lookahead
from purestep.functional.means import Mean
from purestep.functional.monitoring import monitor_norms
from purestep.functional.muon import muon
from purestep.functional.noise import add_noise
from purestep.functional.optimizers import adam, adamw, sgd
from purestep.functional.param_rules import Param
from purestep.functional.partitioning import partition
from purestep.functional.rescaling import centralize, scale
from purestep.functional.scanning import scan
from purestep.functional.schedule_free import schedule_free
from purestep.functional.schedules import constant, cosine, join, linear, warmup_cosine, warmup_stable_decay
from purestep.functional.steps import eval_step, train_step
from purestep.functional.switching import switch_optimizer
from purestep.functional.transforms import GradientTransform, Optimizer, clip_by_global_norm, global_norm

__all__ = [
    "donate",
    "evaluate",
    "find_nonfinite",
    "hvp",
    "jvp",
    "per_sample_grads",
    "scan",
    "BatchOrder",
    "GradientTransform",
    "Gradients",
    "Mean",
    "NO_DECAY",
    "NonFiniteError",
    "Optimizer",
    "Param",
    "accumulate",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "add_noise",
    "centralize",
    "chain",
    "clip_by_global_norm",
    "clip_by_group",
    "clip_by_value",
    "constant",
    "cosine",
    "decay_mask",
    "eval_params",
    "eval_step",
    "freeze",
    "from_torch",
    "global_norm",
    "implementation_change",
    "implementations",
    "join",
    "linear",
    "lion",
    "loader",
    "lookahead",
    "monitor_norms",
    "muon",
    "nadam",
    "partition",
    "radam",
    "rmsprop",
    "scale",
    "set_hyperparameters",
    "schedule_free",
    "sgd",
    "skip_nonfinite",
    "switch_optimizer",
    "train_step",
    "value_and_grad",
    "warmup_cosine",
    "warmup_stable_decay",
    "with_ema",
    "with_hyperparameters",
]
