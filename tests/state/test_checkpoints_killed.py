"""SIGKILL at every moment of a run's saves and removals: the newest complete step loads, and the next run goes on."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from purestep.state.checkpoint.checkpoints import Checkpoints
from purestep.state.files import commit
from purestep.state.files.integrity import verify
from purestep.state.keys import key
from purestep.state.train_state import TrainState
from tests.dying import die_at
from tests.ranks import run_ranks

STEPS, LOSSES = (1, 2, 2, 3), (2.0, 1.0, 1.0, 3.0)  # a first save, a step saved again, and at the end a removal
_RULES = {"keep_last": 2, "keep_best": ("loss", "min")}


def state_of(step: int, save: int) -> TrainState:
    """What the `save`-th save of a run holds: each leaf tells which it was."""
    leaves = {name: torch.full((5,), float(save)) for name in ("a", "b")}
    moments = {"exp_avg": {name: torch.full((5,), save + 0.5) for name in leaves}}
    return TrainState(step=step, params=leaves, buffers={}, opt_state={"adamw": moments}, key=key(0))


def saves(directory: str, async_save: bool) -> Iterator[int]:
    """A run; yields how many of its saves are known to be whole on disk."""
    with Checkpoints(directory, async_save=async_save, **_RULES) as checkpoints:
        for i, step in enumerate(STEPS):
            checkpoints.save(state_of(step, i), metrics={"loss": LOSSES[i]})
            yield i if async_save else i + 1
    yield len(STEPS)


def check(directory: str, num_saved: int) -> int:
    """Look at what a run that was killed left, go on in it, and return the step that was found (0: none)."""
    like = state_of(0, 0)
    with Checkpoints(directory, **_RULES) as checkpoints:
        found = 0
        if checkpoints.steps():
            restored = checkpoints.restore_latest(like)
            found, save = restored.step, int(restored.params["a"][0])
            assert STEPS[save] == found, "a mixture of two steps"
            assert restored.digest() == state_of(found, save).digest(), "a mixture of two saves"
            assert save >= num_saved - 1, "older than one that was whole"
            assert checkpoints.latest() == checkpoints.path(found)
            for step in checkpoints.steps():
                verify(checkpoints.path(step))  # one that was being removed is whole, or gone
        else:
            assert num_saved == 0, "what was whole is gone"
        checkpoints.save(state_of(5, 9))
        assert checkpoints.restore_latest(like).step == 5
        kept = checkpoints.steps()
    assert sorted(os.listdir(directory)) == [f"step-{step:08d}" for step in kept], "leftovers"
    return found


def _killed_run(directory: str, async_save: bool, moment: int) -> tuple[bool, int]:
    """Whether SIGKILL came at `moment` of a run in a process of its own, and how many saves it knew to be whole."""
    receiver, sender = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads: the harness's watchdog is one
        child = os.fork()
    if child == 0:
        try:
            die_at(moment)
            for num_saved in saves(directory, async_save):
                os.write(sender, bytes([num_saved]))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(sender)
    with os.fdopen(receiver, "rb") as known:
        num_saved = [0, *known.read()][-1]
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0, num_saved


def _killed_at_every_moment(directory: str, async_save: bool, exchange: bool) -> list[int]:
    if not exchange:
        commit._swap = lambda new, old: False
    found: list[int] = []
    killed = True
    while killed:
        path = f"{directory}/{len(found)}"
        killed, num_saved = _killed_run(path, async_save, len(found))
        Path(path).mkdir(exist_ok=True)
        found.append(check(path, num_saved))
        shutil.rmtree(path)
    return found


@pytest.mark.parametrize(("async_save", "exchange"), [(False, True), (True, True), (False, False)])
def test_killed_at_every_moment(tmp_path, async_save, exchange):
    (found,) = run_ranks(_killed_at_every_moment, 1, str(tmp_path), async_save, exchange)
    assert set(found) == {0, 1, 2, 3}
    assert found == sorted(found), "a later kill leaves no older step"
    assert len(found) > 60
