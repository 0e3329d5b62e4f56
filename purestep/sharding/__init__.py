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
    "LossScaleConfig": "config",
    "CompileConfig": "config",
    "ConfigError": "config",
    "Runtime": "runtime",
    "start": "runtime",
    "ShardingSpec": "rules",
    "ShardingError": "rules",
    "Unit": "rules",
    "ActivationCheckpointing": "rules",
    "Plan": "plan",
    "PureModule": "pure_module",
    "shard": "pure_module",
    "init": "initialization",
    "initial_loss_scale": "loss_scale",
    "next_loss_scale": "loss_scale",
    "abstract_state": "initialization",
    "load_params": "loading",
    "LoadReport": "load_matching",
}

__all__ = list(_SOURCES)


__getattr__, __dir__ = attach(__name__, _SOURCES)


if TYPE_CHECKING:
    from purestep.sharding.config import (
        AcceleratorConfig as AcceleratorConfig,
    )
    from purestep.sharding.config import CompileConfig as CompileConfig
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
    from purestep.sharding.config import LossScaleConfig as LossScaleConfig
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
    from purestep.sharding.load_matching import LoadReport as LoadReport
    from purestep.sharding.loading import load_params as load_params
    from purestep.sharding.loss_scale import initial_loss_scale as initial_loss_scale
    from purestep.sharding.loss_scale import next_loss_scale as next_loss_scale
    from purestep.sharding.plan import Plan as Plan
    from purestep.sharding.pure_module import PureModule as PureModule
    from purestep.sharding.pure_module import shard as shard
    from purestep.sharding.rules import ActivationCheckpointing as ActivationCheckpointing
    from purestep.sharding.rules import ShardingError as ShardingError
    from purestep.sharding.rules import ShardingSpec as ShardingSpec
    from purestep.sharding.rules import Unit as Unit
    from purestep.sharding.runtime import Runtime as Runtime
    from purestep.sharding.runtime import start as start
