"""A directory of checkpoints, one a step, of which the newest valid one counts."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from purestep.state.checkpoint import open_together, restore, save
from purestep.state.collective import from_rank_zero
from purestep.state.commit import remove_leftovers
from purestep.state.integrity import SUMS
from purestep.state.manifest import FORMATS, CheckpointError, DamagedCheckpointError
from purestep.state.placement import default_rank
from purestep.state.train_state import TrainState

_logger = logging.getLogger("purestep")
_PREFIX = "step-"


class Checkpoints:
    """The checkpoints of a run: `directory/step-00000100` and so on.

    Nothing here points at the latest one: it is found by looking, so no link can be left wrong. In a process group
    every method is a collective call; rank 0 looks, and all ranks get its answer.

    Args:
        directory: where they are, or will be.
        format: what `save` writes; see `ps.save`. Reading takes any format.

    >>> import tempfile, torch, purestep as ps
    >>> state = ps.TrainState(step=3, params={"w": torch.ones(2)}, buffers={}, opt_state={}, key=ps.key(0))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     checkpoints = ps.Checkpoints(directory)
    ...     for step in (3, 6):
    ...         _ = checkpoints.save(state.replace(step=step))
    ...     print(checkpoints.steps(), checkpoints.latest().name, checkpoints.restore_latest(state).step)
    [3, 6] step-00000006 6
    """

    def __init__(self, directory: str | os.PathLike, *, format: str = "safetensors") -> None:
        if format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))}, got {format!r}")
        self.directory = Path(directory)
        self.format = format

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.directory / f"{_PREFIX}{step:08d}"

    def save(self, state: TrainState, *, metadata: Mapping[str, Any] | None = None) -> Path:
        """Write `state` as the checkpoint of its step; see `ps.save`. Leftovers of runs that died are removed."""
        path = save(self.path(state.step), state, format=self.format, metadata=metadata)
        from_rank_zero(lambda: remove_leftovers(self.directory, _PREFIX))
        return path

    def steps(self) -> list[int]:
        """Steps that have a finished checkpoint, ascending. Only `latest` looks whether they are undamaged."""
        return from_rank_zero(self._steps)

    def latest(self) -> Path | None:
        """The newest checkpoint whose every file is what was saved, or None.

        Those passed over are logged, with the damage, to the logger `purestep`.
        """
        for path in self._newest_first():
            try:
                open_together(path)
            except DamagedCheckpointError as error:
                _skip(path, error)
            else:
                return path
        return None

    def restore_latest(self, abstract_state: TrainState, *, device: torch.device | str | None = None) -> TrainState:
        """Restore the newest undamaged checkpoint; see `ps.restore`. Those passed over are logged.

        Raises:
            CheckpointError: there is none (names each candidate and its damage); or the newest undamaged one does not
                fit `abstract_state`: no older one is tried then.
        """
        damaged = []
        for path in self._newest_first():
            try:
                return restore(path, abstract_state, device=device)
            except DamagedCheckpointError as error:
                _skip(path, error)
                damaged.append(str(error))
        found = "".join(f"\n  {line}" for line in damaged) or " (there is none)"
        raise CheckpointError(f"no undamaged checkpoint {_PREFIX}* in {self.directory}:{found}")

    def _newest_first(self) -> Iterator[Path]:
        return (self.path(step) for step in reversed(self.steps()))

    def _steps(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        names = [re.fullmatch(rf"{_PREFIX}(\d{{8,}})", path.name) for path in self.directory.iterdir()]
        return sorted(int(name[1]) for name in names if name and (self.directory / name[0] / SUMS).exists())


def _skip(path: Path, error: CheckpointError) -> None:
    if default_rank() == 0:
        _logger.warning("skipping %s: %s", path, error)
