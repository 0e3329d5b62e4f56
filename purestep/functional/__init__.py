"""What happens to a state: gradients, optimizers, schedules, steps, and the order of the data."""

from purestep.functional.accumulation import accumulate
from purestep.functional.chaining import chain
from purestep.functional.data import BatchOrder, loader
from purestep.functional.gradients import Gradients, value_and_grad
from purestep.functional.means import Mean
from purestep.functional.optimizers import adam, adamw, sgd
from purestep.functional.schedules import constant, cosine, join, linear, warmup_cosine, warmup_stable_decay
from purestep.functional.steps import eval_step, train_step
from purestep.functional.transforms import clip_by_global_norm, global_norm

__all__ = [
    "BatchOrder",
    "Gradients",
    "Mean",
    "accumulate",
    "adam",
    "adamw",
    "chain",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "eval_step",
    "global_norm",
    "join",
    "linear",
    "loader",
    "sgd",
    "train_step",
    "value_and_grad",
    "warmup_cosine",
    "warmup_stable_decay",
]
