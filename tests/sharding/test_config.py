"""Degrees to topologies: the whole table, and errors that echo what was asked."""

import dataclasses
import subprocess
import sys

import pytest

from purestep.sharding.config import (
    AcceleratorConfig,
    ActivationCheckpointing,
    ConfigError,
    DDPConfig,
    FSDPConfig,
    GradientAccumulationConfig,
    LossScaleConfig,
    ParallelismConfig,
    ProcessGroupConfig,
    Topology,
)

TABLE = [  # (dp_replicate, dp_shard), processes, topology, kind
    ((1, 1), 1, (1, 1), "local"),
    ((1, -1), 1, (1, 1), "local"),
    ((-1, 1), 1, (1, 1), "local"),
    ((1, 1), 2, (2, 1), "ddp"),
    ((1, 1), 7, (7, 1), "ddp"),
    ((4, 1), 4, (4, 1), "ddp"),
    ((-1, 1), 4, (4, 1), "ddp"),
    ((1, 4), 4, (1, 4), "fsdp2"),
    ((1, -1), 4, (1, 4), "fsdp2"),
    ((1, -1), 3, (1, 3), "fsdp2"),
    ((-1, 4), 4, (1, 4), "fsdp2"),
    ((2, 4), 8, (2, 4), "hsdp"),
    ((2, -1), 8, (2, 4), "hsdp"),
    ((-1, 4), 8, (2, 4), "hsdp"),
    ((3, -1), 3, (3, 1), "ddp"),
]


@pytest.mark.parametrize(("degrees", "world", "expected", "kind"), TABLE)
def test_the_table(degrees, world, expected, kind):
    config = ParallelismConfig(*degrees)
    topology = config.resolve(world)
    assert (topology.replicate, topology.shard) == expected
    assert topology.kind == kind
    assert topology.world_size == topology.dp_size == world
    assert topology.is_sharded == (kind in ("fsdp2", "hsdp"))
    assert (config.dp_replicate, config.dp_shard) == degrees  # "infer it" stays "infer it"
    assert str(topology) == f"{kind} (replicate {expected[0]} x shard {expected[1]})"


@pytest.mark.parametrize("world", range(1, 13))
@pytest.mark.parametrize("shard", [-1, 1, 2, 3, 4, 6])
@pytest.mark.parametrize("replicate", [-1, 1, 2, 3, 4])
def test_every_answer_fits_and_keeps_what_was_asked(replicate, shard, world):
    config = ParallelismConfig(replicate, shard)
    known = (1 if replicate == -1 else replicate) * (1 if shard == -1 else shard)
    inferred = [replicate, shard].count(-1)
    impossible = world % known != 0 if inferred else (world != known and known != 1)
    if inferred == 2 or impossible:
        with pytest.raises(ConfigError, match=f"--parallelism.dp-replicate {replicate} --parallelism.dp-shard {shard}"):
            config.resolve(world)
        return
    topology = config.resolve(world)
    assert topology.replicate * topology.shard == world
    if (replicate, shard) != (1, 1):
        assert replicate in (-1, topology.replicate)
        assert shard in (-1, topology.shard)


ERRORS = [  # degrees, processes, what the message says besides the degrees
    ((2, 1), 1, "does not fit 1 process: .*start 2 processes"),
    ((1, 4), 2, "does not fit 2 processes: .*start 4 processes"),
    ((2, 2), 8, "does not fit 8 processes: .*start 4 processes"),
    ((2, 4), 4, "does not fit 4 processes: .*start 8 processes"),
    ((2, -1), 3, "does not fit 3 processes: .*start a multiple of 2"),
    ((-1, 4), 6, "does not fit 6 processes: .*start a multiple of 4"),
    ((-1, 4), 2, "does not fit 2 processes: .*start a multiple of 4"),
    ((-1, -1), 4, "only one degree can be inferred; set the other"),
]


@pytest.mark.parametrize(("degrees", "world", "message"), ERRORS)
def test_what_does_not_fit_is_refused_with_each_degree(degrees, world, message):
    asked = f"--parallelism.dp-replicate {degrees[0]} --parallelism.dp-shard {degrees[1]}"
    with pytest.raises(ConfigError, match=f"{asked}.*{message}"):
        ParallelismConfig(*degrees).resolve(world)


@pytest.mark.parametrize("degree", [0, -2, -7])
@pytest.mark.parametrize("field", ["dp_replicate", "dp_shard"])
def test_a_degree_is_positive_or_inferred(field, degree):
    flag = field.replace("_", "-")
    with pytest.raises(ConfigError, match=f"--parallelism.{flag} {degree}: a degree is a positive number, or -1"):
        ParallelismConfig(**{field: degree}).resolve(4)


@pytest.mark.parametrize("degree", [-1, 0, 2])
@pytest.mark.parametrize("field", ["tp", "cp"])
def test_reserved_degrees_are_refused(field, degree):
    with pytest.raises(ConfigError, match=f"--parallelism.{field} {degree}: this degree is reserved and must be 1"):
        ParallelismConfig(**{field: degree}).resolve(4)


BAD_FIELDS = {
    "--accelerator.gradient-accumulation.steps 0: must be at least 1": lambda: GradientAccumulationConfig(steps=0),
    "--accelerator.ddp.bucket-cap-mb 0: must be at least 1": lambda: DDPConfig(bucket_cap_mb=0),
    "--accelerator.process-group.timeout-s 0: must be positive": lambda: ProcessGroupConfig(timeout_s=0),
    "--accelerator.process-group.timeout-s -1.0: must be positive": lambda: ProcessGroupConfig(timeout_s=-1.0),
    "--accelerator.process-group.timeout-s nan: must be positive": lambda: ProcessGroupConfig(timeout_s=float("nan")),
    "--accelerator.activation-checkpointing.every 0: must be at least 1": lambda: ActivationCheckpointing(every=0),
    "--accelerator.activation-checkpointing.mode some: expected none, full or selective": lambda: (
        ActivationCheckpointing("some")  # type: ignore[arg-type]
    ),
    "--accelerator.activation-checkpointing.save-ops aten.mm: acts only with .*mode selective, not with full": lambda: (
        ActivationCheckpointing("full", save_ops=("aten.mm",))
    ),
    "--accelerator.activation-checkpointing.modules mlp: acts only with .*mode full or selective": lambda: (
        ActivationCheckpointing(modules=("mlp",))
    ),
    "--accelerator.fsdp.reshard-after-forward 1: as a number it is the ranks to reshard over, at least 2": lambda: (
        FSDPConfig(reshard_after_forward=1)
    ),
    "--accelerator.fsdp.prefetch -1: must be at least 0": lambda: FSDPConfig(prefetch=-1),
    "--accelerator.fsdp.param-dtype fp16: without --accelerator.mixed-precision fp16": lambda: AcceleratorConfig(
        fsdp=FSDPConfig(param_dtype="fp16")
    ),
    "--accelerator.fsdp.reduce-dtype fp16: without": lambda: AcceleratorConfig(fsdp=FSDPConfig(reduce_dtype="fp16")),
    "--accelerator.ddp.reduce-dtype fp16: without": lambda: AcceleratorConfig(
        mixed_precision="bf16", ddp=DDPConfig(reduce_dtype="fp16")
    ),
    "--accelerator.loss-scale.init 0: must be positive and finite": lambda: LossScaleConfig(init=0),
    "--accelerator.loss-scale.init inf: must be positive and finite": lambda: LossScaleConfig(init=float("inf")),
    "--accelerator.loss-scale.growth-factor 0.5: must be at least 1": lambda: LossScaleConfig(growth_factor=0.5),
    "--accelerator.loss-scale.backoff-factor 1.0: must be between 0 and 1": lambda: LossScaleConfig(backoff_factor=1.0),
    "--accelerator.loss-scale.growth-interval 0: must be at least 1": lambda: LossScaleConfig(growth_interval=0),
    "--accelerator.loss-scale.min 8.0: must be positive, and at most": lambda: LossScaleConfig(init=4.0, min=8.0),
}


def test_a_string_is_not_a_tuple_of_globs():
    with pytest.raises(TypeError, match=r"ActivationCheckpointing.modules is a tuple of globs, got 'mlp'"):
        ActivationCheckpointing("full", modules="mlp")  # type: ignore[arg-type]
    assert ActivationCheckpointing("full", modules=["mlp"]) == ActivationCheckpointing("full", modules=("mlp",))  # type: ignore[arg-type]


@pytest.mark.parametrize("message", BAD_FIELDS)
def test_bad_values_are_refused_when_the_config_is_made(message):
    with pytest.raises(ConfigError, match=message):
        BAD_FIELDS[message]()


def test_configs_are_frozen_values():
    assert AcceleratorConfig() == AcceleratorConfig()
    assert hash(ParallelismConfig(2, 2)) == hash(ParallelismConfig(2, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        ParallelismConfig().dp_shard = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Topology(1, 1).shard = 2
    assert issubclass(ConfigError, ValueError)


def test_parsing_a_config_imports_neither_torch_nor_accelerate():
    modules = "purestep.sharding.config, purestep.sharding.rules, purestep.sharding.plan"
    code = f"import sys, {modules}; print(sorted({{'torch', 'accelerate', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
