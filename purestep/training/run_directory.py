"""The directory of a run: made whole or not at all, never taken over by accident, and its history when it is resumed.

    train_config.json   the config that reproduces the run
    metrics.jsonl       a line a logged step
    resumes.jsonl       a line a resume: from which step, and what was changed
    loss.png            the curve of metrics.jsonl
    checkpoints/        step-00000100, ...

Nothing here imports torch. In a run of several processes rank 0 makes these calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from purestep.sharding.config import ConfigError
from purestep.state.files.commit import sync_directory
from purestep.training.config import TrainConfig
from purestep.training.config_json import changes, dumps, read_tree, to_json

_CONFIG = "train_config.json"
_STALE_S = 3600.0  # age at which a leftover of a killed start is surely nobody's


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run and what may be done to them."""

    path: Path

    @property
    def config_path(self) -> Path:
        """The full config."""
        return self.path / _CONFIG

    @property
    def metrics_path(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def resumes_path(self) -> Path:
        """One JSON object a resume."""
        return self.path / "resumes.jsonl"

    @property
    def plot_path(self) -> Path:
        """The loss curve."""
        return self.path / "loss.png"

    @property
    def checkpoints_path(self) -> Path:
        """Parent of the checkpoints."""
        return self.path / "checkpoints"

    def refuse_existing(self) -> None:
        """Raise `ConfigError` unless a new run may be made here: nothing is here, or an empty directory."""
        if self.config_path.exists():
            raise ConfigError(
                f"--output-dir {self.path} exists; pass --resume to continue it or choose another --output-dir"
            )
        if os.path.lexists(self.path) and not _is_empty_directory(self.path):
            raise ConfigError(
                f"--output-dir {self.path} exists and holds something else than a run; choose another --output-dir"
            )

    def refuse_missing(self) -> None:
        """Raise `ConfigError` unless there is a run here."""
        if not self.config_path.is_file():
            what = f"holds no run (no {_CONFIG})" if self.path.exists() else "does not exist"
            raise ConfigError(
                f"--resume: --output-dir {self.path} {what}; name the directory of a run, or drop --resume to start one"
            )

    def create(self, config: TrainConfig) -> None:
        """Make the directory with its config, in one step: a kill leaves a whole run directory or none.

        Raises:
            ConfigError: something is here already.
        """
        self.refuse_existing()
        target, text = self.path.resolve(), dumps(_recorded(config))
        if target.is_dir():  # an empty one, perhaps a mount point: it stays, the config appears in it
            write_atomically(target / _CONFIG, text)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        temporary = target.with_name(f".{target.name}.new-{secrets.token_hex(8)}")
        temporary.mkdir()
        try:
            write_atomically(temporary / _CONFIG, text)
            os.rename(temporary, target)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            self.refuse_existing()  # somebody else's run got here first
            raise
        sync_directory(target.parent)

    def continue_from(self, step: int, config: TrainConfig, **context: Any) -> dict[str, list[Any]]:
        """Bring the directory back to what it was after `step`, record the resume, and make `config` the run's config.

        Args:
            step: the step that was restored.
            config: the full config that the run goes on with.
            context: what else to record, e.g. the topology.

        Returns:
            Fields of the config that change: `{path: [old, new]}`.
        """
        new = to_json(_recorded(config))
        changed = changes(read_tree(self.config_path), new)
        truncate_metrics(self.metrics_path, step)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        append_line(self.resumes_path, {"step": step, "time": now, **context, "changed": changed})
        if changed:
            write_atomically(self.config_path, dumps(_recorded(config)))
        return changed


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, without a line that a kill cut short. Empty when there is no file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    records = []
    for line in text.split("\n")[:-1]:  # what follows the last newline was cut short
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


def truncate_metrics(path: Path, step: int) -> None:
    """Drop the lines after `step`, and one that was cut short: the steps they tell of are about to be done again."""
    if not path.exists():
        return
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    text = "".join(json.dumps(record) + "\n" for record in kept)
    if text.encode() != path.read_bytes():
        write_atomically(path, text)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append `record` as one line, on disk when this returns."""
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":  # a kill cut the last line short
                file.write(b"\n")
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader, or a crash, finds the old file or the new one, never a part."""
    replace_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def replace_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` make a file beside `path`, then put it in the place of `path`."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def _recorded(config: TrainConfig) -> TrainConfig:
    """`resume` tells how one command began, not what the run is: a run that starts from the file is a new one."""
    return dataclasses.replace(config, resume=False)


def _is_empty_directory(path: Path) -> bool:
    """Whether `path` is a directory with nothing in it but what a killed `create` left."""
    prefix = f".{Path(_CONFIG).stem}."
    return path.is_dir() and all(child.name.startswith(prefix) for child in path.iterdir())


def _sweep(target: Path) -> None:
    """Remove old leftovers of starts that were killed while they made `target`."""
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.new-*"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _STALE_S:
                shutil.rmtree(leftover)
