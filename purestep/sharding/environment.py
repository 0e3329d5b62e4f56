"""The environment guard: variables that would configure the engine behind the config's back are refused by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from purestep.sharding.config import AcceleratorConfig, ConfigError

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun and `accelerate launch` set for a run of several processes."""

# accelerate would make a process group of these.
_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
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
        yield "ACCELERATE_DYNAMO_BACKEND", "no compilation"
    if environ.get("ACCELERATE_TORCH_DEVICE", config.device).split(":")[0] != config.device:
        yield "ACCELERATE_TORCH_DEVICE", "--accelerator.device"
    if _truthy(environ.get("ACCELERATE_USE_CPU")) and config.device not in ("cpu", "auto"):
        yield "ACCELERATE_USE_CPU", "--accelerator.device cpu"


def launched_world_size(environ: Mapping[str, str] | None = None) -> int:
    """Number of processes the launcher started; 1 without a launcher.

    Raises:
        ConfigError: the launcher's variables are half set or no numbers, which would make the start hang.
    """
    environ = os.environ if environ is None else environ
    if "WORLD_SIZE" not in environ and "RANK" not in environ:
        for name in _MPI_SIZES:
            if environ.get(name, "1") != "1":
                raise ConfigError(
                    f"started by MPI ({name}={environ[name]}), which is no launcher of purestep; start several "
                    f"processes with torchrun or accelerate launch, or unset {name} for one"
                )
        return 1
    numbers = {}
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        try:
            numbers[name] = int(environ[name])
        except (KeyError, ValueError):
            raise ConfigError(
                f"the launcher's variables are half set: {name} is {environ.get(name, 'missing')!r} while "
                f"{', '.join(f'{n}={environ[n]}' for n in LAUNCHER_VARIABLES if n in environ)}; start several "
                "processes with torchrun or accelerate launch, or unset these variables for one"
            ) from None
    if not 0 <= numbers["RANK"] < numbers["WORLD_SIZE"]:
        raise ConfigError(f"RANK={numbers['RANK']} is not below WORLD_SIZE={numbers['WORLD_SIZE']}")
    if numbers["WORLD_SIZE"] > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise ConfigError(f"WORLD_SIZE={numbers['WORLD_SIZE']} but {' and '.join(missing)} missing; use torchrun")
    return numbers["WORLD_SIZE"]


def launched_on_cpu(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `accelerate launch` was told to leave the accelerators alone."""
    return _truthy((os.environ if environ is None else environ).get("ACCELERATE_USE_CPU"))


@contextmanager
def without_launcher() -> Iterator[None]:
    """Hide the launcher's variables: a world of one process needs no process group."""
    hidden = {name: os.environ.pop(name) for name in LAUNCHER_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _truthy(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes", "on", "y", "t")
