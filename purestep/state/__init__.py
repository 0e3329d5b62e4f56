"""What a run is, and how it is kept.

Names load on first use: a checkpoint can be described and verified without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from purestep._lazy import attach

_SOURCES = {
    "TrainState": "train_state",
    "Key": "keys",
    "key": "keys",
    "FrozenDict": "mappings",
    "ConsumedStateError": "mappings",
    "check_replicas": "digests",
    "save": "checkpoint",
    "restore": "restoring",
    "RestoreReport": "matching",
    "describe": "integrity",
    "verify": "integrity",
    "diff": "comparison",
    "Comparison": "comparison",
    "convert": "conversion",
    "import_params": "importing",
    "Checkpoints": "checkpoints",
    "CheckpointError": "manifest",
}

__all__ = list(_SOURCES)


__getattr__, __dir__ = attach(__name__, _SOURCES)


if TYPE_CHECKING:
    from purestep.state.checkpoint import save as save
    from purestep.state.checkpoints import Checkpoints as Checkpoints
    from purestep.state.comparison import Comparison as Comparison
    from purestep.state.comparison import diff as diff
    from purestep.state.conversion import convert as convert
    from purestep.state.digests import check_replicas as check_replicas
    from purestep.state.importing import import_params as import_params
    from purestep.state.integrity import describe as describe
    from purestep.state.integrity import verify as verify
    from purestep.state.keys import Key as Key
    from purestep.state.keys import key as key
    from purestep.state.manifest import CheckpointError as CheckpointError
    from purestep.state.mappings import ConsumedStateError as ConsumedStateError
    from purestep.state.mappings import FrozenDict as FrozenDict
    from purestep.state.matching import RestoreReport as RestoreReport
    from purestep.state.restoring import restore as restore
    from purestep.state.train_state import TrainState as TrainState
