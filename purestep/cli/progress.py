"""A progress bar on stderr, for work that takes longer than a second."""

from __future__ import annotations

from typing import Any

_DELAY_S = 1.0


class Bar:
    """Shows how many bytes are done. Call it with what is being done, bytes done and bytes in all; close it."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._what = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        """Say how far the work is."""
        from tqdm import tqdm

        if self._bar is None or what != self._what:
            self.close()
            self._what = what
            # The time counts from the first news on, which comes after the first file or tensor.
            self._bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, delay=_DELAY_S, leave=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
