"""What a run is, and how it is kept.

Names load on first use: a checkpoint can be described and verified without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_SOURCES = {
    "TrainState": "train_state",
    "Key": "keys",
    "key": "keys",
    "FrozenDict": "mappings",
    "ConsumedStateError": "mappings",
    "check_replicas": "digests",
    "save": "checkpoint",
    "restore": "checkpoint",
    "describe": "integrity",
    "verify": "integrity",
    "Checkpoints": "checkpoints",
    "CheckpointError": "manifest",
}

__all__ = list(_SOURCES)


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_SOURCES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from purestep.state.checkpoint import restore as restore
    from purestep.state.checkpoint import save as save
    from purestep.state.checkpoints import Checkpoints as Checkpoints
    from purestep.state.digests import check_replicas as check_replicas
    from purestep.state.integrity import describe as describe
    from purestep.state.integrity import verify as verify
    from purestep.state.keys import Key as Key
    from purestep.state.keys import key as key
    from purestep.state.manifest import CheckpointError as CheckpointError
    from purestep.state.mappings import ConsumedStateError as ConsumedStateError
    from purestep.state.mappings import FrozenDict as FrozenDict
    from purestep.state.train_state import TrainState as TrainState
