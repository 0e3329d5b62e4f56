"""Which checkpoints stay: a pure function of what is there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

METRICS = "metrics"
"""Where a checkpoint's metadata keeps its metrics."""

Mode = Literal["min", "max"]
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Retention:
    """What to keep; with nothing given, everything. A checkpoint stays if any of the rules keeps it.

    Raises:
        ValueError: a number below 1, or a `keep_best` that is no (name, "min" or "max").

    >>> measured = {step: {"loss": loss} for step, loss in {10: 3.0, 20: 1.0, 30: 2.0, 40: float("nan")}.items()}
    >>> Retention(keep_last=2, keep_best=("loss", "min")).expired(40, measured)
    [10]
    """

    keep_last: int | None = None
    """How many of the newest stay."""
    keep_every: int | None = None
    """Steps that are a multiple of this stay for good."""
    keep_best: tuple[str, Mode] | None = None
    """Name of a metric, and whether less of it is better or more: the best one stays."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(
                    f"{name} must be a whole number of at least 1, or None for no such rule; got {value!r}"
                )
        best = self.keep_best
        if best is not None and not (
            isinstance(best, (tuple, list))
            and len(best) == 2
            and isinstance(best[0], str)
            and best[1] in ("min", "max")
        ):
            raise ValueError(
                f"keep_best must be (name of a metric, 'min' or 'max'), e.g. ('loss', 'min'); got {best!r}"
            )

    @property
    def keeps_all(self) -> bool:
        """Whether no rule is given."""
        return self.keep_last is None and self.keep_every is None and self.keep_best is None

    def expired(self, saved: int, metrics: Mapping[int, Metrics | None]) -> list[int]:
        """The steps to remove, ascending, after the step `saved` was saved. It is never among them.

        Steps after it are left alone: they are what a run that went back to an older checkpoint has yet to reach, and
        one of them may be the newest valid one. So are those that cannot be read, which count for no rule either: an
        error in reading is no reason to delete.

        Args:
            saved: the step that is known to be whole on disk.
            metrics: of each step that has a checkpoint; None where it cannot be read.
        """
        if self.keeps_all:
            return []
        readable = sorted(step for step, values in metrics.items() if values is not None and step < saved)
        kept = set(readable[max(0, len(readable) - (self.keep_last - 1)) :]) if self.keep_last else set()
        if self.keep_every:
            kept |= {step for step in readable if step % self.keep_every == 0}
        if self.keep_best:
            until_now = {step: values for step, values in metrics.items() if step <= saved}
            kept |= set(best_first(until_now, *self.keep_best)[:1])
        return [step for step in readable if step not in kept]


def best_first(metrics: Mapping[int, Metrics | None], name: str, mode: Mode) -> list[int]:
    """The steps whose metric `name` is a finite number, best first; of equals, the earlier."""
    values = {step: found[name] for step, found in metrics.items() if found is not None and name in found}
    sign = 1 if mode == "min" else -1
    return sorted((s for s in values if math.isfinite(values[s])), key=lambda step: (sign * values[step], step))


def encode_metrics(metrics: Mapping[str, Any]) -> dict[str, float | str]:
    """Metrics (numbers, 0-d tensors, means) as JSON has them: what is not finite as a string.

    Raises:
        TypeError: one is no number; names it.

    >>> encode_metrics({"loss": 0.5, "ratio": float("nan")})
    {'loss': 0.5, 'ratio': 'nan'}
    """
    encoded: dict[str, float | str] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"metric {name!r} must be a number, got {value!r:.60}") from None
        encoded[name] = number if math.isfinite(number) else repr(number)
    return encoded


def decode_metrics(metadata: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in a checkpoint's metadata; what is no number is left out."""
    found = metadata.get(METRICS)
    decoded = {}
    for name, value in found.items() if isinstance(found, dict) else ():
        if value in ("nan", "inf", "-inf") or type(value) in (int, float):
            decoded[name] = float(value)
    return decoded
