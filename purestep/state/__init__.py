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
    "save": "checkpoint.saving",
    "restore": "checkpoint.restoring",
    "RestoreReport": "checkpoint.matching",
    "describe": "files.integrity",
    "verify": "files.integrity",
    "diff": "checkpoint.comparison",
    "Comparison": "checkpoint.comparison",
    "convert": "exchange.conversion",
    "import_params": "exchange.importing",
    "Checkpoints": "checkpoint.checkpoints",
    "CheckpointError": "files.manifest",
}

__all__ = list(_SOURCES)


__getattr__, __dir__ = attach(__name__, _SOURCES)


if TYPE_CHECKING:
    from purestep.state.checkpoint.checkpoints import Checkpoints as Checkpoints
    from purestep.state.checkpoint.comparison import Comparison as Comparison
    from purestep.state.checkpoint.comparison import diff as diff
    from purestep.state.checkpoint.matching import RestoreReport as RestoreReport
    from purestep.state.checkpoint.restoring import restore as restore
    from purestep.state.checkpoint.saving import save as save
    from purestep.state.digests import check_replicas as check_replicas
    from purestep.state.exchange.conversion import convert as convert
    from purestep.state.exchange.importing import import_params as import_params
    from purestep.state.files.integrity import describe as describe
    from purestep.state.files.integrity import verify as verify
    from purestep.state.files.manifest import CheckpointError as CheckpointError
    from purestep.state.keys import Key as Key
    from purestep.state.keys import key as key
    from purestep.state.mappings import ConsumedStateError as ConsumedStateError
    from purestep.state.mappings import FrozenDict as FrozenDict
    from purestep.state.train_state import TrainState as TrainState
