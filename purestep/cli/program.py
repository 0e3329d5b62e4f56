"""The commands, and what the shell hears of them: 0 fine or equal, 1 damaged, different or failed, 2 a mistake."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from purestep._sizes import size
from purestep.cli.arguments import Command, Convert, Diff, Inspect, Plan, Verify, parse
from purestep.cli.inspection import as_table, as_text, printable
from purestep.cli.locating import Found, checkpoints_at, describe_whole, newest_valid, wrong_sizes
from purestep.cli.progress import Bar
from purestep.sharding.config import ConfigError
from purestep.state.files.commit import held_for_reading
from purestep.state.files.integrity import Description, describe, verify
from purestep.state.files.manifest import CheckpointError

_FINE, _FAILED, _MISTAKE, _INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run `purestep ARGUMENTS`.

    Args:
        argv: the arguments; default the process's own.

    Returns:
        The exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        _never_fail_to_print(stream)
    command: Command | None = None
    try:
        command = parse(sys.argv[1:] if argv is None else argv)
        code = _RUN[type(command)](command)
        sys.stdout.flush()
        return code
    except SystemExit:  # --help has printed
        return _FINE
    except BrokenPipeError:  # whoever read this has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    except ConfigError as error:
        return _fail(command, error, _MISTAKE)
    except (CheckpointError, OSError) as error:
        return _fail(command, error, _FAILED)


def _inspect(command: Inspect) -> int:
    """`purestep inspect`: 1 for a checkpoint that was named itself and misses something; it is shown all the same."""
    named = checkpoints_at(command.path) == (command.path,)
    found = newest_valid(command.path, describe if named else describe_whole, _note)
    problems = wrong_sizes(found.result)
    if command.json:
        _print_json(_where(found) | as_table(found.result) | {"problems": list(problems)})
    else:
        _print(as_text(found.result, leaves=command.leaves))
    for problem in problems:
        _note(f"damaged: {problem}")
    return _FAILED if problems else _FINE


def _verify(command: Verify) -> int:
    """`purestep verify`: 1 if anything that was looked at is damaged."""
    if command.all:
        return _verify_all(command)
    found = newest_valid(command.path, _verified, _note)
    if command.json:
        _print_json(_where(found) | {"valid": True, **_summary(found.result)})
    else:
        _print(_valid_line(found.result))
    return _FAILED if found.skipped else _FINE


def _diff(command: Diff) -> int:
    """`purestep diff`: 1 if the checkpoints hold different states."""
    from purestep.state.checkpoint.comparison import diff

    a, b = (newest_valid(path, describe_whole, _note) for path in (command.a, command.b))
    with Bar() as bar:
        report = diff(a.path, b.path, values=command.values, progress=bar)
    if command.json:
        _print_json({"equal": report.equal, **dataclasses.asdict(report), "a": _where(a), "b": _where(b)})
    else:
        _print(str(report))
    return _FINE if report.equal else _FAILED


def _convert(command: Convert) -> int:
    """`purestep convert`."""
    if not os.path.lexists(command.source):
        raise ConfigError(f"there is nothing at {command.source}: name what to convert")
    from purestep.state.exchange.conversion import convert

    def run(source: Path) -> Any:
        options = {name: value for name, value in vars(command).items() if name not in ("source", "target", "json")}
        with Bar() as bar, _flags_named():
            return convert(source, command.target, **options, progress=bar)

    if checkpoints_at(command.source):
        found = newest_valid(command.source, run, _note)
    else:
        found = Found(command.source, command.source, run(command.source))
    if command.json:
        _print_json(_where(found) | found.result.to_dict())
    else:
        _print(str(found.result))
    return _FINE


def _plan(command: Plan) -> int:
    """`purestep plan`: 1 if it is compared with another plan and differs."""
    from purestep.cli.planning import make_plan, read_plan

    other = None if command.diff is None else read_plan(command.diff)
    plan = make_plan(command)
    if other is None:
        _print_json(plan.to_dict()) if command.json else _print(str(plan))
        return _FINE
    difference = other.diff(plan)
    if command.json:
        _print_json({"equal": not difference, "diff": difference.splitlines()})
    else:
        _print(difference or f"equal to {command.diff}")
    return _FAILED if difference else _FINE


_RUN: dict[type, Callable[[Any], int]] = {
    Inspect: _inspect,
    Verify: _verify,
    Diff: _diff,
    Convert: _convert,
    Plan: _plan,
}


def _verify_all(command: Verify) -> int:
    rows, damaged = [], 0
    for path in checkpoints_at(command.path):
        try:
            description = _verified(path)
        except CheckpointError as error:
            damaged += 1
            rows.append({"checkpoint": str(path), "valid": False, "error": str(error)})
            _note(str(error))
        else:
            rows.append({"checkpoint": str(path), "valid": True, **_summary(description)})
            if not command.json:
                _print(_valid_line(description))
    if not rows:
        raise CheckpointError(f"{command.path} is no checkpoint and holds none")
    if command.json:
        _print_json({"asked": str(command.path), "valid": not damaged, "checkpoints": rows})
    return _FAILED if damaged else _FINE


def _verified(path: Path) -> Description:
    total = sum(describe(path).files.values())
    with Bar() as bar, held_for_reading(path):
        done = 0

        def tell(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            bar(f"verifying {path.name}", done, total)

        tell(0)
        return verify(path, on_read=tell)


def _valid_line(description: Description) -> str:
    num = len(description.files) + 2
    return f"{description.path}: valid, step {description.step}, {num} files, {size(description.bytes)}"


def _summary(description: Description) -> dict[str, Any]:
    return {"step": description.step, "digest": description.digest, "bytes": description.bytes}


def _where(found: Found) -> dict[str, Any]:
    return {
        "asked": str(found.asked),
        "checkpoint": str(found.path),
        "skipped": [{"checkpoint": str(path), "error": error} for path, error in found.skipped],
    }


@contextlib.contextmanager
def _flags_named() -> Iterator[None]:
    """What `convert` says about its arguments, as a mistake in the flags."""
    try:
        yield
    except (ValueError, FileExistsError) as error:
        text = str(error)
        for name in ("max_shard_size", "include_ema", "ema_only"):
            text = text.replace(name, f"--{name.replace('_', '-')}")
        raise ConfigError(text.replace("or overwrite it", "or pass --overwrite")) from None


def _fail(command: Command | None, error: Exception, code: int) -> int:
    if command is not None and command.json:
        with contextlib.suppress(BrokenPipeError):
            _print_json(({"valid": False} if isinstance(command, Verify) else {}) | {"error": str(error)})
    print(f"error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
    return code


def _note(line: str) -> None:
    print(printable(" ".join(line.split())), file=sys.stderr)


def _print(text: str) -> None:
    print(printable(text))


def _print_json(table: dict[str, Any]) -> None:
    print(json.dumps(_finite(table), indent=2))


def _finite(value: Any) -> Any:
    """`value` with floats that JSON has no number for as text."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _never_fail_to_print(stream: TextIO) -> None:
    """Where a terminal's encoding lacks a character, write its escape."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")
