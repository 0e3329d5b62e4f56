"""`shard`: a module becomes a pure function of its state."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from purestep.sharding.config import Topology
from purestep.sharding.detection import find_spec
from purestep.sharding.engines import Engine, LocalEngine, Session
from purestep.sharding.initialization import constructed_values, initialize_constants, kept_digests
from purestep.sharding.leaves import leaves_of
from purestep.sharding.plan import Plan
from purestep.sharding.reduction import mean_buffers
from purestep.sharding.rules import ShardingSpec
from purestep.sharding.runtime import Runtime, local_runtime
from purestep.sharding.spec import frozen_names
from purestep.sharding.wrapping import wrap_units
from purestep.state.keys import Key

_log = logging.getLogger("purestep")


class PureModule:
    """A module whose parameters and buffers are arguments. Made by `ps.shard`.

    The wrapped `nn.Module` is structure only: what it computes with is what each call is given, in every topology.
    """

    def __init__(self, model: nn.Module, spec: ShardingSpec, plan: Plan, runtime: Runtime):
        self.module = model
        self.spec = spec
        self.plan = plan
        self.runtime = runtime
        self.leaves = leaves_of(model)
        self.kept = kept_digests(model, self.leaves) if runtime.world_size > 1 else {}
        initialize_constants(model, self.leaves, runtime.device)
        self._training = model.training
        wrap_units(model, plan, compile_mode=runtime.config.compile.mode)
        self._engine = self._build_engine()
        # Held here, because a sharded module's own parameters become those of the state it was last bound to.
        self.constructed = constructed_values(self.leaves)

    @property
    def topology(self) -> Topology:
        """How the processes divide the work."""
        return self.runtime.topology

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the parameters that require a gradient."""
        return self._engine.trainable

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """The names of each tied parameter or buffer; under the first a state holds it. For `ps.save`, `ps.restore`."""
        leaves = {**self.leaves.params, **self.leaves.buffers}.values()
        return tuple(tuple(slot.name for slot in leaf.slots) for leaf in leaves if len(leaf.slots) > 1)

    def apply(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        *args: Any,
        method: str | None = None,
        train: bool | None = None,
        key: Key | None = None,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Call the module as a function of a state. Collective where there are several processes.

        Args:
            params: every parameter by name, placed as this module's states are.
            buffers: every persistent buffer by name; not written.
            args: positional arguments of the call.
            method: the model's method to call; default its forward. Beside it, `spec.forward_methods`.
            train: the module's mode; default the one it had when it was sharded.
            key: where the call's random numbers come from; default torch's ambient generator.
            kwargs: keyword arguments of the call.

        Returns:
            The output, and the buffers after the call: in train mode floating-point ones are the mean over ranks,
            others the maximum, so that they are equal on every rank.

        Raises:
            ValueError: names or shapes do not fit the module, or the method is not declared.
            RuntimeError: a gradient with respect to `params` is asked for where only `ps.value_and_grad` gives it
                (several processes), or forward wrote a non-persistent buffer.

        >>> import torch, purestep as ps
        >>> module = ps.shard(torch.nn.Linear(2, 1))
        >>> out, _ = module.apply({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, {}, torch.ones(3, 2))
        >>> out.T
        tensor([[2., 2., 2.]])
        """
        self._check_method(method)
        train = self._training if train is None else train
        scope = nullcontext() if key is None else key.fold_in("apply", self.runtime.dp_rank).scope(self.runtime.device)
        with self._engine.applying(params, buffers, train=train) as session, scope:
            target = session.model if method is None else getattr(session.model, method)
            with self.runtime.autocast():
                out = target(*args, **kwargs)
            new_buffers = session.new_buffers()
        return out, mean_buffers(self.runtime, new_buffers, buffers)() if train else new_buffers

    @contextmanager
    def session(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, train: bool = True
    ) -> Iterator[Session]:
        """Bind a state for gradients; what `ps.value_and_grad` is made of."""
        if not self.trainable:
            raise ValueError("nothing to train: no parameter of the module requires a gradient")
        with self._engine.session(params, buffers, train=train, grad=True) as session:
            yield session

    @contextmanager
    def evaluation(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, train: bool = False
    ) -> Iterator[Session]:
        """Bind a state for calls without gradients, in eval mode."""
        with torch.no_grad(), self._engine.applying(params, buffers, train=train) as session:
            yield session

    @contextmanager
    def binding(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, train: bool = True
    ) -> Iterator[Session]:
        """Bind a state for calls that torch's own autograd, or torch.func, sees through: in local topologies."""
        with self._engine.applying(params, buffers, train=train) as session:
            yield session

    def abstract_params(self) -> dict[str, Tensor]:
        """Meta tensors (meta DTensors when sharded) with the names, shapes, dtypes and placements of the parameters."""
        return self._engine.abstract_params()

    def abstract_buffers(self) -> dict[str, Tensor]:
        """Meta tensors with the names, shapes and dtypes of the persistent buffers."""
        return {
            name: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for name, leaf in self.leaves.buffers.items()
        }

    def _build_engine(self) -> Engine:
        topology = self.runtime.topology
        if topology.kind == "local":
            return LocalEngine(self.module, self.leaves, self.runtime)
        # Imported where needed: FSDP2 alone takes a second to import.
        if topology.kind == "ddp":
            from purestep.sharding.ddp_engine import DDPEngine

            return DDPEngine(self.module, self.leaves, self.runtime, self.spec)
        from purestep.sharding.fsdp_engine import FSDPEngine

        return FSDPEngine(self.module, self.leaves, self.runtime, self.plan)

    def _check_method(self, method: str | None) -> None:
        if method is None or method in ("forward", *self.spec.forward_methods):
            return
        if not callable(getattr(self.module, method, None)):
            raise ValueError(f"method {method!r} is not a method of the model")
        if self.topology.kind != "local":
            raise ValueError(
                f"method {method!r} is not an entry point of this {self.topology.kind} module; declare it: "
                f"ShardingSpec(forward_methods=({method!r},))"
            )

    def __repr__(self) -> str:
        count = sum(leaf.numel for leaf in self.leaves.params.values())
        return f"PureModule({type(self.module).__name__}, {count:,} parameters, {self.topology})"


def shard(model: nn.Module, spec: ShardingSpec | None = None, runtime: Runtime | None = None) -> PureModule:
    """Map a module to where it lives, and make it a pure function.

    The module is taken over: in FSDP2 and HSDP topologies its units are sharded in place, elsewhere its methods may be
    routed through DDP. A meta-device model is never materialized here.

    Args:
        model: any module, on any device, not yet wrapped in DDP or FSDP.
        spec: how it maps to units; default the model's own `sharding_spec`, else what is found in the model. What it
            freezes does not require a gradient from here on.
        runtime: from `ps.start`; default this process alone.

    Raises:
        ShardingError: the spec does not fit the model.
        ValueError: the model is wrapped in DDP, or sharded already.

    >>> import torch, purestep as ps
    >>> ps.shard(torch.nn.Linear(2, 1))
    PureModule(Linear, 3 parameters, local (replicate 1 x shard 1))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"ps.shard takes an nn.Module, got {type(model).__name__}")
    _refuse_wrapped(model)
    runtime = runtime if runtime is not None else local_runtime(_device_of(model))
    spec, source = find_spec(model, spec)
    plan = spec.resolve(model, runtime.topology, accelerator=runtime.config, source=source)
    _freeze(model, spec)
    if runtime.topology.is_sharded:
        _log_source(model, plan)
        _lay_out(model, runtime.device)
    return PureModule(model, spec, plan, runtime)


def _freeze(model: nn.Module, spec: ShardingSpec) -> None:
    """Freeze the parameters that a rule takes, a tied one by any of its names."""
    leaves = leaves_of(model)
    for name in frozen_names(spec, leaves):
        slot = leaves.params[name].slots[0]
        slot.module._parameters[slot.attr].requires_grad_(False)  # type: ignore[union-attr]


def _log_source(model: nn.Module, plan: Plan) -> None:
    """Say where the units come from if nobody wrote them down for this model."""
    if plan.source not in ("config", "model"):
        _log.info(
            "sharding %s into %d units; spec from %s", type(model).__name__, len(plan.units), plan.source or "nothing"
        )


def _refuse_wrapped(model: nn.Module) -> None:
    wrappers = {"FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel", "DataParallel"}
    for path, module in model.named_modules():
        found = wrappers.intersection(cls.__name__ for cls in type(module).__mro__)
        if found:
            raise ValueError(
                f"{path or 'the model'} is a {found.pop()} already, and only a plain module can be mapped to "
                "a topology; build the model anew"
            )


def _device_of(model: nn.Module) -> torch.device:
    devices = {tensor.device for tensor in model.parameters() if not tensor.is_meta}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def _lay_out(model: nn.Module, device: torch.device) -> None:
    """Move what is real to `device` and make it row-major, in place: FSDP2 takes only what is so already."""
    for parameter in model.parameters():
        if not parameter.is_meta and parameter.device != device:
            parameter.data = parameter.data.to(device)
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
