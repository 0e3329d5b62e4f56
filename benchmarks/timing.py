"""Interleaved timing: contenders take turns, so that a machine that slows down slows them all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable


def interleave(
    contenders: dict[str, Callable[[], object]],
    *,
    rounds: int = 5,
    steps: int = 30,
    warmups: int = 5,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds a step of each contender, one figure a round (the median of its steps), after a warm-up of each.

    `before` is called before every step; its time does not count.
    """
    for contender in contenders.values():
        for _ in range(warmups):
            before()
            contender()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            gc.collect()
            times = []
            for _ in range(steps):
                before()
                start = time.perf_counter()
                contender()
                times.append(time.perf_counter() - start)
            seconds[name].append(statistics.median(times))
    return seconds


def report(seconds: dict[str, list[float]], reference: str) -> dict[str, float]:
    """Print a table and return, for each contender, the median over rounds of its ratio to `reference`."""
    ratios = {
        name: statistics.median(a / b for a, b in zip(times, seconds[reference], strict=True))
        for name, times in seconds.items()
    }
    width = max(map(len, seconds))
    for name, times in seconds.items():
        spread = f"{min(times) * 1e3:.2f}-{max(times) * 1e3:.2f}"
        print(f"{name:{width}}  {statistics.median(times) * 1e3:8.2f} ms ({spread})  {ratios[name]:.3f}x")
    return ratios
