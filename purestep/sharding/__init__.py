"""Where a run lives: topology, runtime, specs and plans, and modules as pure functions.

Names load on first use, so that a program can parse its configuration without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from purestep._lazy import attach

_SOURCES = {
    "ParallelismConfig": "config",
    "Topology": "config",
    "AcceleratorConfig": "config",
    "GradientAccumulationConfig": "config",
    "FSDPConfig": "config",
    "DDPConfig": "config",
    "ProcessGroupConfig": "config",
    "ConfigError": "config",
    "Runtime": "runtime",
    "start": "runtime",
    "ShardingSpec": "spec",
    "ShardingError": "spec",
    "Unit": "spec",
    "Plan": "plan",
    "PureModule": "pure_module",
    "shard": "pure_module",
    "init": "initialization",
    "abstract_state": "initialization",
}

__all__ = list(_SOURCES)


__getattr__, __dir__ = attach(__name__, _SOURCES)


if TYPE_CHECKING:
    from purestep.sharding.config import (
        AcceleratorConfig as AcceleratorConfig,
    )
    from purestep.sharding.config import (
        ConfigError as ConfigError,
    )
    from purestep.sharding.config import (
        DDPConfig as DDPConfig,
    )
    from purestep.sharding.config import (
        FSDPConfig as FSDPConfig,
    )
    from purestep.sharding.config import (
        GradientAccumulationConfig as GradientAccumulationConfig,
    )
    from purestep.sharding.config import (
        ParallelismConfig as ParallelismConfig,
    )
    from purestep.sharding.config import (
        ProcessGroupConfig as ProcessGroupConfig,
    )
    from purestep.sharding.config import (
        Topology as Topology,
    )
    from purestep.sharding.initialization import abstract_state as abstract_state
    from purestep.sharding.initialization import init as init
    from purestep.sharding.plan import Plan as Plan
    from purestep.sharding.pure_module import PureModule as PureModule
    from purestep.sharding.pure_module import shard as shard
    from purestep.sharding.runtime import Runtime as Runtime
    from purestep.sharding.runtime import start as start
    from purestep.sharding.spec import ShardingError as ShardingError
    from purestep.sharding.spec import ShardingSpec as ShardingSpec
    from purestep.sharding.spec import Unit as Unit
