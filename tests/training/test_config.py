"""What a config refuses, and that it costs no torch."""

import dataclasses
import subprocess
import sys

import pytest

from purestep.sharding.config import ConfigError
from purestep.training.config import CheckpointConfig, DataConfig, Experiment, TrainConfig


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"steps": 0}, "--steps 0: must be at least 1"),
        ({"batch_size": 0}, "--batch-size 0: must be at least 1"),
        ({"log_every": 0}, "--log-every 0: must be at least 1"),
        ({"eval_every": -1}, "--eval-every -1: must be at least 0"),
        ({"seed": -1}, "--seed -1: must be from 0 to"),
        ({"seed": 2**64}, "--seed 18446744073709551616: must be from 0 to"),
        ({"log_with": ("wandb", "wandb")}, "--log-with wandb wandb: a tracker is named twice"),
    ],
)
def test_values_out_of_range_name_the_flag(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**kwargs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataConfig(num_workers=-1), "--data.num-workers -1"),
        (lambda: CheckpointConfig(every=-1), "--checkpoint.every -1"),
    ],
)
def test_nested_values_out_of_range_name_the_flag(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_limits_are_accepted():
    config = TrainConfig(steps=1, batch_size=1, seed=2**64 - 1, checkpoint=CheckpointConfig(every=0))
    assert dataclasses.replace(config, seed=0).seed == 0


def test_a_subclass_may_have_fields_without_defaults():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(TrainConfig):
        width: int

    assert Config(width=3).width == 3
    with pytest.raises(ConfigError, match="--steps 0"):
        Config(width=3, steps=0)


class _Stream:
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"loss": None}, "Experiment.loss must be callable, got NoneType"),
        ({"on_end": 3}, "Experiment.on_end must be callable, got int"),
        ({"data": _Stream()}, r"Experiment.data must be a map-style dataset .* got _Stream"),
        ({"data": None}, r"Experiment.data must be a map-style dataset .* got NoneType"),
        ({"eval": _Stream()}, r"Experiment.eval must be a map-style dataset .* got _Stream"),
    ],
)
def test_an_experiment_that_cannot_run_says_so(kwargs, message):
    good = {"model": None, "loss": print, "optimizer": None, "data": [1, 2]}
    Experiment(**good)
    with pytest.raises(TypeError, match=message):
        Experiment(**{**good, **kwargs})


def test_configs_import_no_torch():
    code = (
        "import sys, purestep.training; from purestep.training import TrainConfig, Experiment, main; TrainConfig();"
        "bad = {'torch', 'accelerate', 'numpy'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
