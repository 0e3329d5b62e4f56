"""What the commands of `purestep` are asked: a class each, whose fields are its arguments."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from purestep.sharding.rules import Dtype
from purestep.training.flags import FlagError, with_one_line_errors

_Path = tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="PATH")]]
_A = tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="A")]]
_B = tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="B")]]
_Source = tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="SOURCE")]]
_Target = tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="TARGET")]]
_DType = Annotated[Literal["float64", "float32", "bfloat16", "float16"] | None, tyro.conf.arg(metavar="DTYPE")]
_Size = Annotated[str, tyro.conf.arg(metavar="SIZE")]
_Builder = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="TARGET")]]
_Number = Annotated[int, tyro.conf.arg(metavar="N")]
_Words = tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE")]]
_Policy = Annotated[Literal["sync_each", "defer_all_reduce", "defer_all"], tyro.conf.arg(metavar="POLICY")]
_Precision = Annotated[Dtype, tyro.conf.arg(metavar="DTYPE")]


@dataclass(frozen=True)
class Inspect:
    """Show what a checkpoint holds, from its tables alone."""

    path: _Path
    """A checkpoint (step-00000100), a folder of checkpoints or a run: then the newest valid one."""
    leaves: bool = False
    """List every leaf, with placement and digest, instead of groups."""
    json: bool = False
    """Print one JSON object, every leaf included."""


@dataclass(frozen=True)
class Verify:
    """Read every byte of a checkpoint and compare it with what was saved."""

    path: _Path
    """A checkpoint (step-00000100), a folder of checkpoints or a run: then the newest, and on until one is valid."""
    all: bool = False
    """Of a folder of checkpoints or a run, verify every one."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class Diff:
    """Compare two checkpoints: step, key, leaves and their digests."""

    a: _A
    """A checkpoint, a folder of checkpoints or a run: then the newest valid one."""
    b: _B
    """What to compare it with."""
    values: bool = False
    """Also read the leaves that differ, and tell by how much."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class Convert:
    """Write a model, verified, to a folder of safetensors files that anything in the field opens."""

    source: _Source
    """As for inspect; or a safetensors file, a Hugging Face folder, or a DCP folder (pytorch_model_fsdp_0)."""
    target: _Target
    """The folder to make: model.safetensors, or several and their index; and config.json if the source has one."""
    max_shard_size: _Size = "5GB"
    """Largest file: bytes, or a size like 500MB."""
    dtype: _DType = None
    """Cast floating point tensors: float64, float32, bfloat16 or float16."""
    include_ema: bool = False
    """Also write the averaged params, to the folder ema in the target."""
    ema_only: bool = False
    """Write the averaged params in the place of the params."""
    overwrite: bool = False
    """Replace the target, if it is a model folder."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class Plan:
    """Tell what each rank of a run would hold and send, without ranks or weights."""

    target: _Builder
    """What builds the model: package.module:name or file.py:name. A class, a function, a transformers model class."""
    dp_shard: _Number = 1
    """Processes one copy of the model is sharded over (FSDP2)."""
    dp_replicate: _Number = 1
    """Copies of the model (DDP, or HSDP with --dp-shard)."""
    arg: _Words = ()
    """An argument for the builder, or for the config of a transformers model; may be repeated."""
    spec: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """How the model maps to units, as JSON; default: the model's own sharding_spec, else what is detected."""
    optimizer: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """adamw, adam, sgd, none, or package.module:name; default: the target's own, else adamw."""
    optimizer_arg: _Words = ()
    """An argument for the optimizer; may be repeated."""
    ema: bool = False
    """Also count averaged parameters."""
    accumulate: _Number = 1
    """Microbatches a step."""
    policy: Annotated[Literal["sync_each", "defer_all_reduce", "defer_all"], tyro.conf.arg(metavar="POLICY")] = (
        "sync_each"
    )
    """When sharded gradients of microbatches are reduced: sync_each, defer_all_reduce or defer_all."""
    reshard_after_forward: Annotated[str, tyro.conf.arg(metavar="HOW")] = "yes"
    """Free gathered units between forward and backward: yes, no, or a number of ranks to keep them sharded over."""
    param_dtype: _Precision = "fp32"
    """Dtype in which units are gathered: fp32, bf16 or fp16."""
    reduce_dtype: _Precision = "fp32"
    """Dtype in which gradients are reduced: fp32, bf16 or fp16."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state on the host."""
    diff: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Compare with a plan saved as JSON: print what differs, exit with 1 if anything does."""
    json: bool = False
    """Print one JSON object, every parameter included."""


_DESCRIPTION = """\
Look at checkpoints, check them, compare them, convert them; plan what a run will need.

Exit code 0: fine, or equal. 1: damaged, different, or failed. 2: a mistake in the arguments."""
Command = Inspect | Verify | Diff | Convert | Plan
_COMMANDS: dict[str, type] = {"inspect": Inspect, "verify": Verify, "diff": Diff, "convert": Convert, "plan": Plan}
_Commands = (
    Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Diff, tyro.conf.subcommand("diff")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
)


def parse(argv: Sequence[str]) -> Command:
    """The command that `argv` asks for. `--help` prints and exits.

    Raises:
        FlagError: the arguments could not be understood; one line.
    """
    name = argv[0] if argv else ""
    if name not in (*_COMMANDS, "-h", "--help"):
        raise FlagError(_unknown_command(name))
    known = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(_COMMANDS.get(name, Inspect))]
    return with_one_line_errors(lambda: _parse(argv), known)


def _parse(argv: Sequence[str]) -> Command:
    return tyro.cli(
        _Commands,
        prog="purestep",
        description=_DESCRIPTION,
        args=list(argv),
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def _unknown_command(name: str) -> str:
    commands = ", ".join(_COMMANDS)
    if not name:
        return f"which command? One of {commands} (--help tells what they do)"
    close = difflib.get_close_matches(name, _COMMANDS, n=1)
    meant = f"; did you mean {close[0]}?" if close else f": there are {commands}"
    return f"unknown command {name!r}{meant} (--help tells what they do)"
