"""Which checkpoint a path means: itself, or the newest valid one of a folder of checkpoints or of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from purestep.sharding.config import ConfigError
from purestep.state.files.integrity import SUMS, Description, describe
from purestep.state.files.manifest import MANIFEST, CheckpointError, DamagedCheckpointError

T = TypeVar("T")
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Found(Generic[T]):
    """The first of some checkpoints that an action did not find damaged."""

    asked: Path
    """The path that was given."""
    path: Path
    """The checkpoint."""
    result: T
    """What the action made of it."""
    skipped: tuple[tuple[Path, str], ...] = ()
    """Newer ones that are damaged, and how."""


def checkpoints_at(path: Path) -> tuple[Path, ...]:
    """The checkpoint at `path`, or those in it, newest first; empty if there is none.

    Raises:
        ConfigError: nothing is at `path`.
    """
    if not os.path.lexists(path):
        raise ConfigError(f"there is nothing at {path}: name a checkpoint, a folder of checkpoints or a run")
    if (path / SUMS).exists() or (path / MANIFEST).exists() or (path.is_dir() and _STEP.fullmatch(path.name)):
        return (path,)
    for folder in (path, path / "checkpoints"):
        if steps := _steps(folder):
            return tuple(folder / name for _, name in steps)
    return ()


def newest_valid(path: Path, action: Callable[[Path], T], tell: Callable[[str], None]) -> Found[T]:
    """Do `action` with the newest checkpoint at `path` that it does not find damaged.

    Args:
        path: a checkpoint, a folder of checkpoints, or a run.
        action: raises `DamagedCheckpointError` for a damaged one.
        tell: gets a line for what is passed over, and one for what is taken.

    Raises:
        CheckpointError: there is none, or all are damaged; or what `action` raises.
        ConfigError: nothing is at `path`.
    """
    candidates = checkpoints_at(path)
    if not candidates:
        raise CheckpointError(
            f"{path} is no checkpoint and holds none; expected step-00000100 with {SUMS}, a folder of such, or a run"
        )
    if candidates == (path,):
        return Found(path, path, action(path))
    skipped: list[tuple[Path, str]] = []
    for candidate in candidates:
        try:
            result = action(candidate)
        except DamagedCheckpointError as error:
            tell(f"skipping {candidate}: {error}")
            skipped.append((candidate, str(error)))
        else:
            tell(f"the newest valid checkpoint of {path} is {candidate}")
            return Found(path, candidate, result, tuple(skipped))
    raise DamagedCheckpointError(f"all {len(candidates)} checkpoints of {path} are damaged")


def describe_whole(path: Path) -> Description:
    """`describe`, and every file compared with its size: what can be known without reading them.

    Raises:
        CheckpointError: damaged tables, or files that are missing or have another size; names them.
    """
    description = describe(path)
    wrong = wrong_sizes(description)
    if wrong:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged: {'; '.join(wrong)}")
    return description


def wrong_sizes(description: Description) -> Sequence[str]:
    """One line for each file that is missing or has not the size it was saved with."""
    lines = []
    for name, size in description.files.items():
        try:
            found = (description.path / name).stat().st_size
        except OSError as error:
            lines.append(f"{name} cannot be read: {error.strerror}")
        else:
            if found != size:
                lines.append(f"{name} has {found} bytes instead of {size}")
    return lines


def _steps(folder: Path) -> list[tuple[int, str]]:
    """(step, name) of the checkpoints of a folder, newest first."""
    names = os.listdir(folder) if folder.is_dir() else []
    matches = [match for match in map(_STEP.fullmatch, names) if match and (folder / match[0]).is_dir()]
    return sorted(((int(match[1]), match[0]) for match in matches), reverse=True)
