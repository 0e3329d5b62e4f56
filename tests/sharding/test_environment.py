"""Environment variables: what would configure the engine beside the config is refused by name, launchers are not."""

from __future__ import annotations

import os

import pytest
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from purestep.sharding.config import AcceleratorConfig, ConfigError, GradientAccumulationConfig
from purestep.sharding.environment import launched_on_cpu, refuse_interference
from purestep.sharding.launching import LAUNCHER_VARIABLES, launched_world_size

CUDA = AcceleratorConfig(device="cuda")
REFUSED = [  # variable, value, config, what the message advises
    ("ACCELERATE_USE_FSDP", "true", AcceleratorConfig(), "--parallelism.dp-shard"),
    ("ACCELERATE_USE_PARALLELISM_CONFIG", "1", AcceleratorConfig(), "--parallelism.dp-replicate and"),
    ("ACCELERATE_USE_DEEPSPEED", "True", AcceleratorConfig(), "DeepSpeed is not an engine of purestep"),
    ("ACCELERATE_USE_MEGATRON_LM", "yes", AcceleratorConfig(), "Megatron-LM is not an engine of purestep"),
    ("FSDP_VERSION", "2", AcceleratorConfig(), r"--accelerator.fsdp.\*"),
    ("FSDP_OFFLOAD_PARAMS", "false", AcceleratorConfig(), r"--accelerator.fsdp.\*"),
    ("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2", AcceleratorConfig(), r"--parallelism.\*"),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", AcceleratorConfig(), "--accelerator.gradient-accumulation.steps"),
    ("ACCELERATE_MIXED_PRECISION", "bf16", AcceleratorConfig(), "--accelerator.mixed-precision"),
    ("ACCELERATE_MIXED_PRECISION", "fp16", AcceleratorConfig(mixed_precision="bf16"), "--accelerator.mixed-precision"),
    ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", AcceleratorConfig(), "--accelerator.compile.enabled"),
    ("ACCELERATE_TORCH_DEVICE", "cuda:1", AcceleratorConfig(device="cpu"), "--accelerator.device"),
    ("ACCELERATE_USE_CPU", "true", CUDA, "--accelerator.device cpu"),
]


@pytest.mark.parametrize(("name", "value", "config", "advice"), REFUSED)
def test_a_variable_that_would_act_behind_the_config_is_refused(name, value, config, advice):
    with pytest.raises(ConfigError, match=rf"{name}={value} \(unset it, use .*{advice}"):
        refuse_interference(config, {name: value, "PATH": "/bin"})


ACCEPTED = [  # says what the config says, or nothing
    ({}, AcceleratorConfig()),
    ({"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_DEEPSPEED": "0"}, AcceleratorConfig()),
    (
        {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
        AcceleratorConfig(gradient_accumulation=GradientAccumulationConfig(4)),
    ),
    ({"ACCELERATE_MIXED_PRECISION": "no"}, AcceleratorConfig(mixed_precision="bf16")),
    ({"ACCELERATE_MIXED_PRECISION": "BF16"}, AcceleratorConfig(mixed_precision="bf16")),
    ({"ACCELERATE_TORCH_DEVICE": "cuda:1"}, CUDA),
    ({"ACCELERATE_USE_CPU": "true"}, AcceleratorConfig()),
    ({"ACCELERATE_USE_CPU": "False"}, CUDA),
]


@pytest.mark.parametrize(("environ", "config"), ACCEPTED)
def test_a_variable_that_agrees_is_accepted(environ, config):
    refuse_interference(config, environ)


def test_every_interfering_variable_is_named_at_once():
    with pytest.raises(ConfigError) as error:
        refuse_interference(AcceleratorConfig(), {name: value for name, value, _, _ in REFUSED[:6]})
    assert all(name in str(error.value) for name, *_ in REFUSED[:6])


def _launch_arguments(*flags: str):
    arguments = launch_command_parser().parse_args([*flags, "train.py"])
    # What the launcher fills in where neither a flag nor a config file says.
    arguments.mixed_precision, arguments.use_cpu, arguments.num_machines = "no", False, 1
    arguments.dynamo_backend, arguments.num_cpu_threads_per_process = "no", 1
    return arguments


@pytest.mark.parametrize("config", [AcceleratorConfig(), AcceleratorConfig(mixed_precision="bf16"), CUDA], ids=str)
def test_what_accelerate_launch_sets_by_default_is_accepted(config, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", *LAUNCHER_VARIABLES))]:
        monkeypatch.delenv(name)
    one = prepare_simple_launcher_cmd_env(_launch_arguments("--num_processes", "1"))[1]
    several = prepare_multi_gpu_env(_launch_arguments("--num_processes", "2", "--main_process_port", "0"))
    for environ in (one, several):
        assert environ["ACCELERATE_MIXED_PRECISION"] == "no"  # it did set what this test is about
        refuse_interference(config, environ)
    assert launched_world_size(one) == 1
    with pytest.raises(ConfigError, match="ACCELERATE_USE_FSDP=true"):
        refuse_interference(config, prepare_multi_gpu_env(_launch_arguments("--use_fsdp", "--num_processes", "2")))


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("1", True), ("False", False), (None, False)])
def test_the_launchers_word_for_cpu(value, expected):
    assert launched_on_cpu({} if value is None else {"ACCELERATE_USE_CPU": value}) == expected
