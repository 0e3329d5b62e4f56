"""`main`: a config class becomes a program. Imports no torch before the arguments are parsed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from purestep.sharding.config import ConfigError
from purestep.sharding.launching import launched_world_size
from purestep.training import config_json
from purestep.training.config import Experiment, TrainConfig, check_trackers
from purestep.training.flags import any_below, is_on, parse_flags, path_of, value_of, without
from purestep.training.resuming import refit
from purestep.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from purestep.training.loop import Run

C = TypeVar("C", bound=TrainConfig)

_GRACE_S = 3.0


def main(config_class: type[C], build: Callable[[C], Experiment], argv: Sequence[str] | None = None) -> Run:
    """The command line of a training program: parse the flags, start the runtime, build, fit.

    Every field of `config_class` is a flag. `--config FILE` takes the defaults from a `train_config.json`; `--resume`
    takes them from the run in `--output-dir`. A failed start leaves nothing behind.

    Args:
        config_class: `TrainConfig`, or a subclass with the program's own fields.
        build: makes the experiment from the config, on every rank. Import torch in it, not at the top of the program,
            and `--help` takes no time.
        argv: arguments; default the process's own.

    Returns:
        The finished run. Its runtime is closed: what needs every rank, such as a sharded state's digest, belongs into
        the experiment's `on_end`.

    Raises:
        SystemExit: 2 for a mistake in the flags or the config, 1 for a failure of the run that a line explains, 130 and
            143 after SIGINT and SIGTERM. What nobody foresaw keeps its traceback.
    """
    with _exits() as stop_note:
        config = read_arguments(config_class, sys.argv[1:] if argv is None else argv)
        directory = RunDirectory(config.output_dir)
        if config.resume:
            directory.refuse_missing()
        else:
            directory.refuse_existing()
        check_trackers(config)
        stop_note.append(directory)

        from purestep.sharding.runtime import start
        from purestep.training.loop import fit

        log_with: list[str] | None = list(config.log_with) or None
        with start(config.parallelism, config.accelerator, log_with=log_with, project_dir=config.output_dir) as runtime:
            return fit(config, _build_together(build, config), runtime)


def read_arguments(config_class: type[C], argv: Sequence[str]) -> C:
    """The config that the arguments ask for, on top of the defaults of the class, of a file, or of a run to resume.

    Raises:
        ConfigError: names the flag or the field, and the fix.
    """
    file = path_of(argv, "config")
    flags = without(argv, "config")
    if file is None and len(flags) < len(argv):
        raise ConfigError("--config needs a file: the train_config.json to take the defaults from")
    if {"-h", "--help"} & set(flags):
        return parse_flags(config_class, flags)
    if not is_on(flags, "resume"):
        default = None if file is None else config_json.load(config_class, file)
        return parse_flags(config_class, flags, default=default)
    if file is not None:
        raise ConfigError("--config and --resume both choose the defaults; drop --config (flags beside --resume win)")
    saved = _saved_config(config_class, value_of(flags, "output-dir"))
    config = parse_flags(config_class, flags, default=saved)
    if not any_below(flags, "parallelism"):
        parallelism, note = refit(config.parallelism, launched_world_size())
        config = dataclasses.replace(config, parallelism=parallelism)
        if note and _rank() == 0:
            print(note, file=sys.stderr)
    return config


def _saved_config(config_class: type[C], output_dir: str | None) -> C:
    if output_dir is None:
        (field,) = (field for field in dataclasses.fields(config_class) if field.name == "output_dir")
        if field.default is dataclasses.MISSING:
            raise ConfigError("--resume needs --output-dir: the directory of the run to continue")
        output_dir = field.default
    directory = RunDirectory(Path(output_dir))
    directory.refuse_missing()
    # The directory may have been moved since: where it is found is where it is.
    return dataclasses.replace(config_json.load(config_class, directory.config_path), output_dir=directory.path)


def _build_together(build: Callable[[C], Experiment], config: C) -> Experiment:
    """`build(config)` on every rank; when it fails on some, the lowest of them tells, and all stop."""
    from purestep.state.collective import gather_objects

    experiment, error = None, None
    try:
        experiment = build(config)
        if not isinstance(experiment, Experiment):
            raise TypeError(f"build returns an Experiment, got {type(experiment).__name__}")
    except Exception as caught:
        error = caught
    codes = gather_objects(None if error is None else _exit_code(error) or 1)
    failed = [rank for rank, code in enumerate(codes) if code is not None]
    if failed and failed[0] != _rank():
        _leave(None, codes[failed[0]])
    if error is not None:
        if _exit_code(error) is None:
            raise error
        _leave(error, codes[failed[0]])
    assert experiment is not None
    return experiment


@contextlib.contextmanager
def _exits() -> Iterator[list[RunDirectory]]:
    """Turn what ends a run into an exit code and one line. The list is for the run's directory, once it is known."""
    directory: list[RunDirectory] = []
    with _sigterm_raises():
        try:
            yield directory
        except KeyboardInterrupt:
            _leave_interrupted("SIGINT", 130, directory)
        except _Terminated:
            _leave_interrupted("SIGTERM", 143, directory)
        except Exception as error:
            code = _exit_code(error)
            if code is None:
                raise
            # Ranks agree on configs and checkpoints, so one speaks for all; a file may be missing on one machine only.
            speaks = _rank() == 0 or isinstance(error, OSError)
            _leave(error if speaks else None, code)


class _Terminated(BaseException):
    """SIGTERM arrived."""


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM unwind the run as SIGINT does, so that worker processes, files and the process group are closed."""
    owner = os.getpid()

    def terminate(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked worker
            os._exit(143)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one does not wait for the unwinding
        raise _Terminated

    try:
        before = signal.signal(signal.SIGTERM, terminate)
    except ValueError:  # not the main thread: signals are somebody else's
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit_code(error: BaseException) -> int | None:
    """2 for a mistake in what was asked for, 1 for a failure that its message explains, None for anything else."""
    if isinstance(error, ConfigError):
        return 2
    if isinstance(error, OSError):
        return 1
    if "torch" in sys.modules:  # else the run has not come to where these are raised
        from purestep.state.files.manifest import CheckpointError
        from purestep.training.loop import RunError

        if isinstance(error, CheckpointError | RunError):
            return 1
    return None


def _leave_interrupted(signal_name: str, code: int, directory: list[RunDirectory]) -> NoReturn:
    hint = ""
    if directory and directory[0].config_path.exists():
        hint = f"; continue with --resume --output-dir {directory[0].path}"
    if _rank() == 0:
        print(f"stopped by {signal_name}{hint}", file=sys.stderr)
    raise SystemExit(code)


def _leave(error: Any, code: int) -> NoReturn:
    """Exit with `code`; with an error, after one line about it."""
    if error is not None:
        rank = f"rank {_rank()}: " if _rank() else ""
        print(f"error: {rank}{' '.join(str(error).split())}", file=sys.stderr, flush=True)
    else:
        # A launcher ends all processes when one exits: let the one that speaks be first.
        with contextlib.suppress(_Terminated, KeyboardInterrupt):
            time.sleep(_GRACE_S)
    raise SystemExit(code)


def _rank() -> int:
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0
