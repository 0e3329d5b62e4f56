"""Runs to look at, and damage to find."""

from __future__ import annotations

from pathlib import Path

import purestep as ps
from tests.state.test_checkpoint import make_state


def make_run(folder: Path, steps: tuple[int, ...] = (1, 2), **changes) -> ps.Checkpoints:
    checkpoints = ps.Checkpoints(folder / "checkpoints")
    for step in steps:
        checkpoints.save(make_state(step=step, **changes))
    return checkpoints


def damage(checkpoint: Path) -> Path:
    """Flip a bit of a parameter."""
    file = checkpoint / "model/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return checkpoint
