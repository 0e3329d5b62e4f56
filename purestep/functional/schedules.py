"""Schedules: a hyperparameter as a function of the step.

The step is the number of updates already done, so the first update sees step 0. A schedule is a frozen value that
prints as the call that makes it. It takes an int and returns a float, or takes a 0-d tensor and returns one, so that a
traced step does not bake the number in. Past its end a schedule keeps its last value.
"""
# ruff: noqa: N801 - a schedule is written and printed as a call: warmup_cosine(3e-4, 100, 1000)

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Schedule = Callable[[Any], Any]
"""`step -> value`: an int gives a float, a 0-d tensor gives a 0-d tensor."""


@dataclass(frozen=True)
class constant:
    """The same value at every step.

    >>> import purestep as ps
    >>> ps.constant(0.1)(1000)
    0.1
    """

    value: float

    def __post_init__(self) -> None:
        _check_values(self, "value")

    def __call__(self, step: Any) -> Any:
        """The value at `step`."""
        return _like(step, self.value)


@dataclass(frozen=True)
class linear:
    """From `start` at step 0 in a straight line to `end` at step `steps`.

    >>> import purestep as ps
    >>> [ps.linear(1.0, 0.0, 4)(step) for step in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _check_values(self, "start", "end")
        _check_counts(self, "steps", least=1)

    def __call__(self, step: Any) -> Any:
        """The value at `step`."""
        return _line(self.start, self.end, _progress(step, 0, self.steps))


@dataclass(frozen=True)
class cosine:
    """From `peak` at step 0 along half a cosine to `final` at step `steps` (SGDR without restarts, arXiv:1608.03983).

    >>> import purestep as ps
    >>> [round(ps.cosine(1.0, 4)(step), 3) for step in (0, 1, 2, 4)]
    [1.0, 0.854, 0.5, 0.0]
    """

    peak: float
    steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        _check_values(self, "peak", "final")
        _check_counts(self, "steps", least=1)

    def __call__(self, step: Any) -> Any:
        """The value at `step`."""
        return _half_cosine(self.peak, self.final, _progress(step, 0, self.steps))


@dataclass(frozen=True)
class warmup_cosine:
    """A linear warmup to `peak`, then half a cosine to `final` at step `total_steps`.

    The warmup is `peak * (step + 1) / warmup_steps`: the first update already learns, and the update at step
    `warmup_steps - 1` is the first with the full rate. The last update, at step `total_steps - 1`, is one step of the
    cosine short of `final`.

    >>> import purestep as ps
    >>> schedule = ps.warmup_cosine(3e-4, 100, 1000)
    >>> [f"{schedule(step):.2e}" for step in (0, 49, 99, 100, 550, 1000)]
    ['3.00e-06', '1.50e-04', '3.00e-04', '3.00e-04', '1.50e-04', '0.00e+00']
    """

    peak: float
    warmup_steps: int
    total_steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        _check_values(self, "peak", "final")
        _check_counts(self, "warmup_steps", least=0)
        _check_counts(self, "total_steps", least=1)
        if self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"warmup_cosine: warmup_steps {self.warmup_steps} must be less than total_steps {self.total_steps}"
            )

    def __call__(self, step: Any) -> Any:
        """The value at `step`."""
        decay = _half_cosine(self.peak, self.final, _progress(step, self.warmup_steps, self.total_steps))
        return _warmed_up(self.peak, self.warmup_steps, step, decay)


@dataclass(frozen=True)
class warmup_stable_decay:
    """A linear warmup to `peak`, then `peak`, then over the last `decay_steps` a straight line to `final`.

    The warmup is that of `warmup_cosine`; `final` is reached at step `total_steps` (WSD, arXiv:2404.06395).

    >>> import purestep as ps
    >>> schedule = ps.warmup_stable_decay(1.0, 2, 10, 4)
    >>> [schedule(step) for step in (0, 1, 5, 6, 8, 10)]
    [0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
    """

    peak: float
    warmup_steps: int
    total_steps: int
    decay_steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        _check_values(self, "peak", "final")
        _check_counts(self, "warmup_steps", least=0)
        _check_counts(self, "total_steps", "decay_steps", least=1)
        if self.warmup_steps + self.decay_steps > self.total_steps:
            raise ValueError(
                f"warmup_stable_decay: warmup_steps {self.warmup_steps} + decay_steps {self.decay_steps} must not "
                f"exceed total_steps {self.total_steps}"
            )

    def __call__(self, step: Any) -> Any:
        """The value at `step`."""
        start = self.total_steps - self.decay_steps
        decay = _line(self.peak, self.final, _progress(step, start, self.total_steps))
        return _warmed_up(self.peak, self.warmup_steps, step, decay)


@dataclass(frozen=True)
class join:
    """One schedule after another: `schedules[i]` acts from `boundaries[i - 1]` on, and counts its steps from there.

    >>> import purestep as ps
    >>> schedule = ps.join([ps.constant(1.0), ps.linear(1.0, 0.0, 2)], [10])
    >>> [schedule(step) for step in (9, 10, 11, 12)]
    [1.0, 1.0, 0.5, 0.0]
    """

    schedules: Sequence[Schedule]
    boundaries: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedules", tuple(self.schedules))
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        if not self.schedules or len(self.boundaries) != len(self.schedules) - 1:
            raise ValueError(
                f"join: n schedules have n - 1 boundaries between them, got {len(self.schedules)} schedules and "
                f"{len(self.boundaries)} boundaries"
            )
        for schedule in self.schedules:
            if not callable(schedule):
                raise TypeError(f"join: a schedule is a function of the step, got {schedule!r}; use constant(value)")
        previous = 0
        for boundary in self.boundaries:
            if not _is_count(boundary) or boundary <= previous:
                raise ValueError(f"join: boundaries must be increasing positive integers, got {list(self.boundaries)}")
            previous = boundary

    def __call__(self, step: Any) -> Any:
        """The value at `step`."""
        starts = (0, *self.boundaries)
        if not isinstance(step, Tensor):
            index = sum(step >= boundary for boundary in self.boundaries)
            return self.schedules[index](step - starts[index])
        value = self.schedules[0](step)
        for schedule, start in zip(self.schedules[1:], self.boundaries, strict=True):
            value = torch.where(step < start, value, schedule(torch.clamp(step - start, min=0)))
        return value


def value_at(hyperparameter: float | Schedule, step: Any) -> Any:
    """The value of a hyperparameter, a number or a schedule, at `step`."""
    return hyperparameter(step) if callable(hyperparameter) else hyperparameter


def _progress(step: Any, start: int, end: int) -> Any:
    """How far `step` is from `start` to `end`, from 0 to 1."""
    if isinstance(step, Tensor):
        return torch.clamp((_wide(step) - start) / (end - start), 0.0, 1.0)
    return min(max((step - start) / (end - start), 0.0), 1.0)


def _line(start: float, end: float, progress: Any) -> Any:
    return start + (end - start) * progress


def _half_cosine(peak: float, final: float, progress: Any) -> Any:
    wave = torch.cos(progress * math.pi) if isinstance(progress, Tensor) else math.cos(progress * math.pi)
    return final + (peak - final) * (0.5 * (1.0 + wave))


def _warmed_up(peak: float, warmup_steps: int, step: Any, later: Any) -> Any:
    if isinstance(step, Tensor):
        return torch.where(step < warmup_steps, peak * ((_wide(step) + 1) / max(warmup_steps, 1)), later)
    return peak * ((step + 1) / warmup_steps) if step < warmup_steps else later


def _like(step: Any, value: float) -> Any:
    return torch.full_like(_wide(step), value) if isinstance(step, Tensor) else value


def _wide(step: Tensor) -> Tensor:
    """`step` in the precision of a Python float, where the device has it."""
    return step.to(torch.float32 if step.device.type == "mps" else torch.float64)


def _check_values(schedule: Any, *names: str) -> None:
    for name in names:
        value = getattr(schedule, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{type(schedule).__name__}: {name} must be a finite number, got {value!r}")
        object.__setattr__(schedule, name, float(value))


def _check_counts(schedule: Any, *names: str, least: int) -> None:
    for name in names:
        value = getattr(schedule, name)
        if not _is_count(value) or value < least:
            raise ValueError(f"{type(schedule).__name__}: {name} must be an integer of at least {least}, got {value!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
