"""What a run says about itself: the record of a logged step, where its time went, and how much memory it took."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from purestep.sharding.runtime import Runtime

Record = dict[str, Any]

_OWN = ("step", "samples", "tokens_per_s", "step_time", "data_time", "memory")


class StepClock:
    """Where the time of the steps since the last record went. Evaluations and checkpoints are left out (`skip`)."""

    weight: Any
    """Tokens since the last record."""

    def __init__(self) -> None:
        self._mark = time.perf_counter()
        self._clear()

    def data_ready(self) -> None:
        """The batch is here: what passed since the last mark was spent waiting for it."""
        self.data_s += self._lap()

    def step_done(self, weight: Any) -> None:
        """The step was launched (and, if its values were read, has ended). `weight`: its tokens, over all ranks."""
        self.compute_s += self._lap()
        self.num_steps += 1
        self.weight = self.weight + weight  # stays on the device: nothing waits for it until the record

    def skip(self) -> None:
        """Forget what passed since the last mark."""
        self._lap()

    def take(self, runtime: Runtime) -> Record:
        """Seconds a step, tokens a second and bytes since the last record: the slowest rank's and the fullest one's.

        Collective where there are several processes.
        """
        seconds = self.data_s + self.compute_s
        own = [seconds / self.num_steps, self.data_s / self.num_steps, peak_memory(runtime.device)]
        # float32 where there is no other (mps); a process group is never there.
        dtype = torch.float64 if runtime.device.type != "mps" else torch.float32
        worst = runtime.all_reduce(torch.tensor(own, dtype=dtype, device=runtime.device), "max").tolist()
        rate = float(self.weight) / self.num_steps / worst[0]
        self._clear()
        return {"tokens_per_s": rate, "step_time": worst[0], "data_time": worst[1], "memory": int(worst[2])}

    def _clear(self) -> None:
        self.data_s = self.compute_s = 0.0
        self.num_steps = 0
        self.weight = 0.0

    def _lap(self) -> float:
        now = time.perf_counter()
        passed, self._mark = now - self._mark, now
        return passed


def step_record(step: int, batch_size: int, values: Mapping[str, Any], costs: Mapping[str, Any]) -> Record:
    """The line of metrics.jsonl for the step that made the state's step `step`.

    Args:
        step: updates done after it.
        batch_size: samples of the global batch.
        values: what the step returned: its own loss, not a mean over steps, so that a resumed run's lines are the same.
        costs: from `StepClock.take`.

    Raises:
        ValueError: one of the loss's metrics has a name that the record needs.
    """
    taken = [name for name in values if name in _OWN]
    if taken:
        raise ValueError(f"the loss reports a metric named {taken[0]!r}, which a record has already; rename it")
    return {"step": step, "samples": step * batch_size, **values, **costs}


def eval_record(means: Mapping[str, Any]) -> Record:
    """What an evaluation adds to the line of its step."""
    return {f"eval/{name}": float(means[name]) for name in sorted(means)}


def to_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """0-d tensors, Means and numbers as floats; waits for the device."""
    return {name: float(value) for name, value in values.items()}


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: in the device's allocator where it counts them, of resident memory on a CPU."""
    if device.type in ("cuda", "xpu"):
        return torch.get_device_module(device).max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def format_line(record: Mapping[str, Any]) -> str:
    """`record` as a line of JSON that any reader takes: full precision, and words for what JSON has no number for.

    >>> format_line({"step": 1, "loss": float("nan")})
    '{"step": 1, "loss": "NaN"}'
    """
    return json.dumps({name: _finite(value) for name, value in record.items()}, allow_nan=False)


class MetricsFile:
    """Appends records to metrics.jsonl. After `write` a line survives a kill, after `sync` a crash of the machine."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        self._file.write(format_line(record) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Wait until what was written is on the disk, so that no checkpoint outlives the lines before it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _finite(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
