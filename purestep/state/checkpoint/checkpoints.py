"""A directory of checkpoints, one a step, of which the newest valid one counts."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from purestep.state.checkpoint.background import Background
from purestep.state.checkpoint.opening import naming, open_together, together
from purestep.state.checkpoint.restoring import restore
from purestep.state.checkpoint.retention import (
    METRICS,
    Metrics,
    Mode,
    Retention,
    best_first,
    decode_metrics,
    encode_metrics,
)
from purestep.state.checkpoint.run_lock import RunLock
from purestep.state.checkpoint.saving import refuse_unsaveable, save
from purestep.state.checkpoint.staging import Staging
from purestep.state.checkpoint.tying import as_ties
from purestep.state.collective import from_rank_zero, on_every_rank
from purestep.state.digests import check_replicas as refuse_differing_replicas
from purestep.state.files.commit import discard, held_for_reading, recover, remove_leftovers
from purestep.state.files.integrity import SUMS, describe
from purestep.state.files.manifest import FORMATS, MANIFEST, CheckpointError, DamagedCheckpointError
from purestep.state.placement import default_rank
from purestep.state.train_state import TrainState

_logger = logging.getLogger("purestep")
_PREFIX = "step-"


class Checkpoints:
    """The checkpoints of a run: `directory/step-00000100` and so on. A context manager.

    Nothing here points at the latest one: it is found by looking, so no link can be left wrong. In a process group
    every method is a collective call; rank 0 looks, and all ranks get its answer.

    From the first save until `close` the directory is locked: a second run that saves into it is refused. Reading
    needs no lock.

    Retention: with none of the three rules every checkpoint stays; otherwise one stays if any rule keeps it. After a
    save is whole on disk, older ones that no rule keeps are removed. The newest valid one never is, nor one that is
    being restored, here or in another process, nor one that cannot be read.

    Args:
        directory: where they are, or will be.
        format: what `save` writes; see `ps.save`. Reading takes any format.
        keep_last: how many of the newest stay.
        keep_every: steps that are a multiple of this stay for good.
        keep_best: (name of a metric, "min" or "max"): the best one stays. Only finite values count. The metrics are
            kept in the checkpoints, so that a restarted run knows the best one of all.
        async_save: `save` returns once the state is copied to host memory, and writes in a thread. One save is in
            flight at most. Its failure is raised by the next `save`, `wait`, `restore_latest` or `close`, and a program
            that ends without one of them exits with code 1. In a process group the constructor is a collective call.
        ties: what the module ties, `module.ties`; recorded by `save` and used by `restore_latest`, see `ps.restore`.
        lock: lock the directory now, not at the first save.

    Raises:
        ValueError: an unknown format, or a rule that is none.

    >>> import tempfile, torch, purestep as ps
    >>> state = ps.TrainState(step=0, params={"w": torch.ones(2)}, buffers={}, opt_state={}, key=ps.key(0))
    >>> with (
    ...     tempfile.TemporaryDirectory() as directory,
    ...     ps.Checkpoints(directory, keep_last=2, keep_best=("loss", "min"), async_save=True) as checkpoints,
    ... ):
    ...     for step, loss in [(3, 0.9), (6, 0.1), (9, 0.5), (12, 0.4)]:
    ...         _ = checkpoints.save(state.replace(step=step), metrics={"loss": loss})
    ...     checkpoints.wait()
    ...     print(checkpoints.steps(), checkpoints.latest().name, checkpoints.best().name)
    ...     print(checkpoints.restore_latest(state).step)
    [6, 9, 12] step-00000012 step-00000006
    12
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        format: str = "safetensors",
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, Mode] | None = None,
        async_save: bool = False,
        ties: Iterable[Sequence[str]] = (),
        lock: bool = False,
    ) -> None:
        if format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))}, got {format!r}")
        self.directory = Path(directory)
        self.format = format
        self.ties = as_ties(ties)
        self.retention = Retention(keep_last, keep_every, keep_best)
        self._background = Background() if async_save else None
        self._staging = Staging()
        self._run_lock: RunLock | None = None  # on rank 0
        self._locked = False
        self._closed = False
        self._known: dict[int, tuple[Any, Metrics]] = {}
        if lock:
            self.lock()

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.directory / f"{_PREFIX}{step:08d}"

    def save(
        self,
        state: TrainState,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        check_replicas: bool = False,
    ) -> Path:
        """Write `state` as the checkpoint of its step; see `ps.save`. Then remove what retention does not keep.

        With `async_save` this returns as soon as `state` may change or be donated; the checkpoint is there after the
        next `wait`.

        Args:
            state: what to write.
            metrics: numbers or 0-d tensors that were measured on this very state; None: it was not measured, and does
                not count for `keep_best`.
            metadata: your own JSON values, kept in `state.json`, beside the metrics (under "metrics").
            check_replicas: first compare what ranks should hold in common, see `ps.check_replicas`.

        Returns:
            Where the checkpoint is, or will be.

        Raises:
            CheckpointError: this save or the one before it could not be written, another run saves into the directory,
                replicas differ, or `close` was called.
            ValueError: `metrics` lacks the one of `keep_best`; or see `ps.save`.
            TypeError: a metric that is no number; or see `ps.save`.
        """
        self.wait()
        path = self.path(state.step)
        kept = together(path, lambda: self._metadata(metrics, metadata))
        if self._closed:
            raise CheckpointError(f"the Checkpoints of {self.directory} were closed: make new ones to save more")
        self.lock()
        if self._background is None:
            self._write(path, state, kept, check_replicas)
        else:
            refuse_unsaveable(path, state, format=self.format, metadata=kept, ties=self.ties)
            self._staging.prepare(state)
            staged = together(path, lambda: self._staging.copy(state))
            self._background.start(str(path), lambda: self._write(path, staged, kept, check_replicas))
        return path

    def lock(self) -> None:
        """Keep other runs from saving into the directory from now on, as the first save would.

        Raises:
            CheckpointError: another run saves into it; says which process, where, and since when.
        """

        def take() -> None:
            self._run_lock = RunLock(self.directory)

        if not self._locked:
            from_rank_zero(lambda: naming(self.directory, take))
            self._locked = True

    def wait(self) -> None:
        """Wait until the save in flight, if there is one, is whole on disk.

        Raises:
            CheckpointError: it failed; on every rank.
        """
        if self._background is not None:
            on_every_rank(self._background.wait)

    def close(self) -> None:
        """Wait for the save in flight and unlock the directory. Reading goes on working. Safe to call twice.

        Raises:
            CheckpointError: the save in flight failed; on every rank.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # What failed may have failed on this rank alone: no collective call here.
        self._closed = True
        failure = None if self._background is None else self._background.join()
        if failure is not None:
            error.add_note(f"besides, a save in the background failed: {failure}")
        self._release()

    def steps(self) -> list[int]:
        """Steps that have a finished checkpoint, ascending. Only `latest` looks whether they are undamaged."""
        return from_rank_zero(self._steps)

    def latest(self) -> Path | None:
        """The newest checkpoint whose every file is what was saved, or None.

        Those passed over are logged, with the damage, to the logger `purestep`.
        """
        return self._first_undamaged(reversed(self.steps()))

    def best(self) -> Path | None:
        """The undamaged checkpoint with the best finite value of the metric of `keep_best`, or None.

        Raises:
            ValueError: there is no `keep_best`.
        """
        rule = self.retention.keep_best
        if rule is None:
            raise ValueError("best() needs to know what is best: Checkpoints(..., keep_best=('loss', 'min')), say")
        return self._first_undamaged(from_rank_zero(lambda: best_first(self._metrics(self._steps()), *rule)))

    def restore_latest(
        self, abstract_state: TrainState, *, device: torch.device | str | None = None, **options: Any
    ) -> TrainState:
        """Restore the newest undamaged checkpoint, after waiting for a save in flight. Those passed over are logged.

        Args:
            abstract_state: says what to make; see `ps.restore`.
            device: where plain leaves go; see `ps.restore`.
            options: further keyword arguments of `ps.restore`: `strict`, `rename` and so on.

        Raises:
            CheckpointError: there is none (names each candidate and its damage); or the newest undamaged one does not
                fit `abstract_state`: no older one is tried then.
        """
        self.wait()
        damaged = []
        for step in reversed(self.steps()):
            path = self.path(step)
            try:
                return restore(path, abstract_state, device=device, **{"ties": self.ties, **options})
            except DamagedCheckpointError as error:
                _skip(path, error)
                damaged.append(str(error))
        found = "".join(f"\n  {line}" for line in damaged) or " (there is none)"
        raise CheckpointError(f"no undamaged checkpoint {_PREFIX}* in {self.directory}:{found}")

    def _metadata(self, metrics: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
        kept = dict(metadata or {})
        if metrics is None:
            return kept
        if METRICS in kept:
            raise ValueError(f"metadata has {METRICS!r}, where the metrics are kept: name it differently")
        rule = self.retention.keep_best
        if rule is not None and rule[0] not in metrics:
            raise ValueError(
                f"keep_best is by {rule[0]!r}, which is not among the metrics: {', '.join(metrics) or 'none'}"
            )
        return {**kept, METRICS: encode_metrics(metrics)}

    def _write(self, path: Path, state: TrainState, metadata: dict[str, Any], check_replicas: bool) -> None:
        if check_replicas:
            try:
                refuse_differing_replicas(state)
            except RuntimeError as error:
                raise CheckpointError(f"step {state.step}: {error}; no checkpoint was written") from error
        save(path, state, format=self.format, metadata=metadata, ties=self.ties)
        from_rank_zero(lambda: self._tidy(state.step))

    def _tidy(self, saved: int) -> None:
        """Remove what is not kept. The save is whole already, so failing in this does not make it fail."""
        try:
            remove_leftovers(self.directory, _PREFIX)
            if self.retention.keeps_all:
                return
            for step in self.retention.expired(saved, self._metrics(self._steps())):
                if not discard(self.path(step)):
                    _logger.info("%s stays until the next save: it is being read", self.path(step))
        except OSError as error:
            _logger.warning("could not remove what is not kept in %s: %s", self.directory, error)

    def _release(self) -> None:
        self._staging.close()
        if self._background is not None:
            self._background.close()
        if self._run_lock is not None:
            self._run_lock.release()
        self._run_lock, self._locked = None, False

    def _first_undamaged(self, steps: Iterable[int]) -> Path | None:
        for path in map(self.path, steps):
            try:
                with held_for_reading(path):
                    open_together(path)
            except DamagedCheckpointError as error:
                _skip(path, error)
            else:
                return path
        return None

    def _steps(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        try:
            recover(self.directory)
        except OSError as error:
            _logger.warning("could not put back a checkpoint that was being replaced: %s", error)
        names = [re.fullmatch(rf"{_PREFIX}(\d{{8,}})", path.name) for path in self.directory.iterdir()]
        return sorted(int(name[1]) for name in names if name and (self.directory / name[0] / SUMS).exists())

    def _metrics(self, steps: Iterable[int]) -> dict[int, Metrics | None]:
        """The metrics of each step; None where its tables cannot be read."""
        return {step: self._metrics_of(step) for step in steps}

    def _metrics_of(self, step: int) -> Metrics | None:
        path = self.path(step)
        try:
            found = os.stat(path / MANIFEST)
            version = (found.st_ino, found.st_mtime_ns, found.st_size)
            if self._known.get(step, (None,))[0] != version:
                self._known[step] = version, decode_metrics(describe(path).metadata)
        except (CheckpointError, OSError):
            return None
        return self._known[step][1]


def _skip(path: Path, error: CheckpointError) -> None:
    if default_rank() == 0:
        _logger.warning("skipping %s: %s", path, error)
