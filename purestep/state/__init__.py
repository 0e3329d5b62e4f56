"""What a run is, and how it is kept."""

from purestep.state.digests import check_replicas
from purestep.state.keys import Key, key
from purestep.state.mappings import ConsumedStateError, FrozenDict
from purestep.state.train_state import TrainState

__all__ = ["ConsumedStateError", "FrozenDict", "Key", "TrainState", "check_replicas", "key"]
