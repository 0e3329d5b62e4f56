"""SIGTERM during training: seen by one rank, obeyed by all at the same step."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

import torch

from purestep.sharding.runtime import Runtime
from purestep.state.checkpoint.staging import destroy_groups

SIGTERM_CODE = 143
"""What a process exits with after SIGTERM: 128 and the signal's number."""


class StopRequest:
    """While it is entered, a first SIGTERM is noted for `agreed`; a second one ends the process at once.

    Outside the main thread, which is the one that signals are for, it notes nothing.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Collective in a process group."""
        # On the host and in a group of its own, so that asking each step waits for no device.
        self._group: Any = None
        if runtime.world_size > 1:
            timeout = timedelta(seconds=runtime.config.process_group.timeout_s)
            self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        self._noted = False
        self._before: Any = None
        self._owner = os.getpid()

    def agreed(self) -> bool:
        """Whether SIGTERM has reached any rank: the same answer on all. Collective."""
        if self._group is None:
            return self._noted
        noted = torch.tensor(int(self._noted))
        torch.distributed.all_reduce(noted, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return bool(noted.item())

    def __enter__(self) -> StopRequest:
        try:
            self._before = signal.signal(signal.SIGTERM, self._note)
        except ValueError:  # not the main thread
            self._before = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        destroy_groups([] if self._group is None else [self._group])
        self._group = None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a forked process that has not set up handlers of its own yet
            os._exit(SIGTERM_CODE)
        self._noted = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
