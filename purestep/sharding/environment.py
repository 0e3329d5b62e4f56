"""The environment guard: variables that would configure the engine behind the config's back are refused by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from purestep.sharding.config import AcceleratorConfig, ConfigError

# accelerate reads these even when it is given arguments, or when an argument was left None.
_ENGINES = {
    "ACCELERATE_USE_FSDP": "--parallelism.dp-shard",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "--parallelism.dp-replicate and --parallelism.dp-shard",
    "ACCELERATE_USE_DEEPSPEED": "--parallelism.dp-shard (DeepSpeed is not an engine of purestep)",
    "ACCELERATE_USE_MEGATRON_LM": "--parallelism.dp-shard (Megatron-LM is not an engine of purestep)",
}


def refuse_interference(config: AcceleratorConfig, environ: Mapping[str, str] | None = None) -> None:
    """Raise if an environment variable contradicts `config` or would configure the engine beside it.

    What a launcher sets to the value that the config has anyway (`accelerate launch` sets
    ACCELERATE_MIXED_PRECISION=no) is accepted.

    Raises:
        ConfigError: names every such variable, and the flag that says the same thing.
    """
    environ = os.environ if environ is None else environ
    found = list(_interfering(config, environ))
    if found:
        raise ConfigError(
            "the environment would configure this run behind its config: "
            + "; ".join(f"{name}={environ[name]} (unset it, use {flag})" for name, flag in found)
        )


def _interfering(config: AcceleratorConfig, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, flag in _ENGINES.items():
        if _truthy(environ.get(name)):
            yield name, flag
    for name in sorted(environ):
        if name.startswith("FSDP_"):
            yield name, "--accelerator.fsdp.*"
        elif name.startswith("PARALLELISM_CONFIG_"):
            yield name, "--parallelism.*"
    steps = config.gradient_accumulation.steps
    if environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", str(steps)) != str(steps):
        yield "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "--accelerator.gradient-accumulation.steps"
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", config.mixed_precision):
        yield "ACCELERATE_MIXED_PRECISION", "--accelerator.mixed-precision"
    if environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        yield "ACCELERATE_DYNAMO_BACKEND", "--accelerator.compile.enabled"
    if environ.get("ACCELERATE_TORCH_DEVICE", config.device).split(":")[0] != config.device:
        yield "ACCELERATE_TORCH_DEVICE", "--accelerator.device"
    if _truthy(environ.get("ACCELERATE_USE_CPU")) and config.device not in ("cpu", "auto"):
        yield "ACCELERATE_USE_CPU", "--accelerator.device cpu"


def launched_on_cpu(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `accelerate launch` was told to leave the accelerators alone."""
    return _truthy((os.environ if environ is None else environ).get("ACCELERATE_USE_CPU"))


def _truthy(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes", "on", "y", "t")
