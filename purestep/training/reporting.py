"""Where a run's records go: metrics.jsonl, the progress bar, the trackers, and lines for people. Rank 0 does it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm

from purestep.sharding.runtime import Runtime
from purestep.training.config import TrainConfig
from purestep.training.config_json import flatten, to_json
from purestep.training.metrics import MetricsFile, Record
from purestep.training.run_directory import RunDirectory


def say(runtime: Runtime, message: str) -> None:
    """A line on stderr, from rank 0, above the progress bar."""
    if runtime.is_main:
        tqdm.write(message, file=sys.stderr)


class Reporter:
    """Sends each record of a run to its places, from the step it starts at. A context manager."""

    def __init__(self, config: TrainConfig, directory: RunDirectory, runtime: Runtime, *, start: int) -> None:
        self.last: Record = {}
        """The last value of everything that was written, on every rank."""
        self._config = config
        self._runtime = runtime
        self._file = MetricsFile(directory.metrics_path) if runtime.is_main else None
        self._bar = tqdm(
            total=config.steps,
            initial=start,
            unit="step",
            disable=not runtime.is_main,
            dynamic_ncols=True,
            mininterval=0.1 if sys.stderr.isatty() else 10.0,  # in a log file every refresh is a line
        )
        self._start_trackers(start)

    def step_done(self) -> None:
        """One step further."""
        self._bar.update()

    def write(self, record: Record) -> None:
        """Log a record everywhere."""
        self.last.update(record)
        if self._file is not None:
            self._file.write(record)
        shown = {name: self.last[name] for name in ("loss", "eval/loss") if name in self.last}
        self._bar.set_postfix(shown, refresh=False)
        if self._config.log_with:
            self._runtime.accelerator.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])  # type: ignore[union-attr]

    def sync(self) -> None:
        """Records written so far are on the disk when this returns."""
        if self._file is not None:
            self._file.sync()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._file is not None:
            self._file.close()

    def _start_trackers(self, start: int) -> None:
        if not self._config.log_with:
            return
        output_dir = self._config.output_dir.resolve()
        named = {"name": output_dir.name}
        self._runtime.accelerator.init_trackers(  # type: ignore[union-attr]
            "purestep",
            config=_hyperparameters(self._config),
            init_kwargs={
                "tensorboard": {"purge_step": start + 1}
                if start
                else {},  # drop what an interrupted run logged after it
                "wandb": {**named, "dir": str(output_dir)},
                "trackio": named,
            },
        )


def _hyperparameters(config: TrainConfig) -> Mapping[str, Any]:
    """The config as one level of the types that every tracker takes."""
    flat = flatten(to_json(config))
    return {k: v if isinstance(v, bool | int | float | str) else json.dumps(v) for k, v in flat.items()}
