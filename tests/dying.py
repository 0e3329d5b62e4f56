"""Processes that are killed at a chosen moment of their writing to disk."""

from __future__ import annotations

import os
import signal

from purestep.state.files import commit

_CHANGES = ((os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"), (commit, "_swap"))


def die_at(moment: int) -> None:
    """Let SIGKILL end this process at the `moment`-th point from now where a file or directory changes on disk."""
    left = moment

    def counted(function):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for module, name in _CHANGES:
        setattr(module, name, counted(getattr(module, name)))
