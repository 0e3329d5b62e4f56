"""SHA-256 of a stream of bytes, computed by a thread of its own while the stream is read or written."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Any

from purestep.state.workers import Job, Pool

_INLINE = 1 << 16  # a thread is not worth its wake-up for less
_AHEAD = 4  # parts that may wait to be hashed


class StreamHash:
    """SHA-256 of what `update` is given, in order. The memory given must stay as it is until `wait` or `hexdigest`.

    Args:
        in_thread: whether to hash beside the caller; with as many files in hand as there are cores, that gains nothing.
    """

    def __init__(self, *, in_thread: bool = True) -> None:
        self._in_thread = in_thread
        self._sha = hashlib.sha256()
        self._pool: Pool | None = None
        self._waiting: deque[Job[None]] = deque()

    def update(self, data: Any) -> None:
        """Append the bytes of a buffer; large ones are hashed while the caller goes on."""
        if len(data) < _INLINE or not self._in_thread:
            self.wait()
            self._sha.update(data)
            return
        if self._pool is None:
            self._pool = Pool(1)
        if len(self._waiting) == _AHEAD:
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(self._sha.update, data))

    def wait(self) -> None:
        """Return when everything given so far has been hashed."""
        while self._waiting:
            self._waiting.popleft().result()

    def hexdigest(self) -> str:
        """The sum of everything so far."""
        self.wait()
        return self._sha.hexdigest()

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
