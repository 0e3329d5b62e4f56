"""Training runs: configs, the loop, and the generated command line. Importing this package imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from purestep._lazy import attach

if TYPE_CHECKING:
    from purestep.training.command_line import main as main
    from purestep.training.config import CheckpointConfig as CheckpointConfig
    from purestep.training.config import DataConfig as DataConfig
    from purestep.training.config import Experiment as Experiment
    from purestep.training.config import TrainConfig as TrainConfig
    from purestep.training.loop import Run as Run
    from purestep.training.loop import fit as fit

_HOMES = {
    "TrainConfig": "config",
    "DataConfig": "config",
    "CheckpointConfig": "config",
    "Experiment": "config",
    "fit": "loop",
    "Run": "loop",
    "main": "command_line",
}

__all__ = list(_HOMES)


__getattr__, __dir__ = attach(__name__, _HOMES)
