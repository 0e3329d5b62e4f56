"""`purestep plan`: what each rank would hold and send, from a model that is never given memory."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from purestep.cli.arguments import Plan as Command
from purestep.cli.building import Built, build, imported, keyword_arguments
from purestep.sharding.config import AcceleratorConfig, ConfigError, FSDPConfig, GradientAccumulationConfig, Topology
from purestep.sharding.plan import Plan
from purestep.sharding.rules import ShardingSpec

_OPTIMIZERS = ("adamw", "adam", "sgd")


def make_plan(command: Command) -> Plan:
    """The plan that the command asks for.

    Raises:
        ConfigError: a mistake in the arguments, or a spec that does not fit the model.
    """
    for flag, degree in (("dp-shard", command.dp_shard), ("dp-replicate", command.dp_replicate)):
        if degree < 1:
            raise ConfigError(f"--{flag} {degree}: must be at least 1")
    spec = None if command.spec is None else read_spec(command.spec)
    accelerator = _accelerator(command)
    built = build(command.target, keyword_arguments("--arg", command.arg))

    from purestep.sharding.detection import find_spec

    spec, source = find_spec(built.model, spec or built.spec)
    topology = Topology(replicate=command.dp_replicate, shard=command.dp_shard)
    plan = spec.resolve(built.model, topology, accelerator=accelerator, source=source)
    optimizer = _optimizer(command, built)
    return plan if optimizer is None else plan.with_optimizer(optimizer, ema=command.ema)


def read_spec(path: Path) -> ShardingSpec:
    """A spec from a JSON file: `ShardingSpec.to_dict()`, or a train_config.json that holds one under "spec".

    Raises:
        ConfigError: it cannot be read or is no spec.
    """
    data = read_json("--spec", path)
    data = data.get("spec") or data if isinstance(data, dict) else data
    try:
        return ShardingSpec.from_dict(data)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"--spec {path}: {error}") from None


def read_plan(path: Path) -> Plan:
    """A plan that `--json` wrote.

    Raises:
        ConfigError: it cannot be read or is no plan.
    """
    try:
        return Plan.from_dict(read_json("--diff", path))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--diff {path}: {error}") from None


def read_json(flag: str, path: Path) -> Any:
    """The contents of a JSON file.

    Raises:
        ConfigError: there is none.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {path}: cannot be read: {error}") from None


def _accelerator(command: Command) -> AcceleratorConfig:
    words: dict[str, bool] = {"yes": True, "no": False}
    reshard = words.get(command.reshard_after_forward)
    if reshard is None and not command.reshard_after_forward.isdecimal():
        given = command.reshard_after_forward
        raise ConfigError(f"--reshard-after-forward {given}: expected yes, no or a number of ranks")
    if command.accumulate < 1:
        raise ConfigError(f"--accumulate {command.accumulate}: must be at least 1")
    return AcceleratorConfig(
        fsdp=FSDPConfig(
            reshard_after_forward=int(command.reshard_after_forward) if reshard is None else reshard,
            param_dtype=command.param_dtype,
            reduce_dtype=command.reduce_dtype,
            cpu_offload=command.cpu_offload,
        ),
        gradient_accumulation=GradientAccumulationConfig(steps=command.accumulate, policy=command.policy),
    )


def _optimizer(command: Command, built: Built) -> Any:
    """The optimizer: the one that is named, else the target's own, else AdamW."""
    name, arguments = command.optimizer, keyword_arguments("--optimizer-arg", command.optimizer_arg)
    if name is None and built.optimizer is not None:
        return built.optimizer
    if name == "none":
        return None
    if name is not None and ":" in name:
        factory, defaults = imported(name), {}
    else:
        factory, defaults = _by_name(name or "adamw"), {"lr": 0.0}
    try:
        optimizer = factory(**{**defaults, **arguments})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--optimizer {name or 'adamw'}: {error}") from None
    if not callable(getattr(optimizer, "init", None)):
        raise ConfigError(f"--optimizer {name}: expected something with init(params), got {optimizer!r}")
    return optimizer


def _by_name(name: str) -> Any:
    from purestep.functional import optimizers

    if name not in _OPTIMIZERS:
        near = difflib.get_close_matches(name, _OPTIMIZERS, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--optimizer {name}: expected {', '.join(_OPTIMIZERS)}, none or package.module:name{meant}")
    return getattr(optimizers, name)
