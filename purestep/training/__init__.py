"""Training runs: configs, the loop, and the generated command line. Importing this package imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
