"""Engines: how a state is bound into a module, run forward and backward, and read back out.

One engine a topology, one shape for all: a *session* binds parameters and buffers, offers the module as `model`, runs
`backward`, and hands back gradients and new buffers. Whatever happens inside, the module is usable afterwards and the
bound state untouched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from purestep.sharding.leaves import Leaf, ModuleLeaves
from purestep.sharding.plan import Plan
from purestep.sharding.runtime import Runtime
from purestep.sharding.spec import ShardingSpec
from purestep.state.placement import is_dtensor


class Session:
    """A module bound to one state, for the length of a `with` block."""

    def __init__(self, engine: Engine):
        self.model = engine.model
        self._engine = engine
        self._buffers = engine.leaves.buffers

    def backward(self, total: Tensor, *, last: bool) -> None:
        """Add the gradient of `total`; on the `last` of a window, finish its reduction over ranks."""
        self._engine.backward(total, last=last)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of this window by name, averaged over data-parallel ranks; absent where there was none."""
        return self._engine.gradients()

    def window(self, *, last: bool) -> Any:
        """The context in which one microbatch runs forward and backward."""
        return self._engine.window(last=last)

    def new_buffers(self) -> dict[str, Tensor]:
        """The buffers as forward left them."""
        return {name: leaf.slots[0].module._buffers[leaf.slots[0].attr] for name, leaf in self._buffers.items()}  # type: ignore[misc]

    @contextmanager
    def discarding_buffers(self) -> Iterator[None]:
        """Run a body whose writes to buffers do not count."""
        before = self.new_buffers()
        _put_buffers(self._buffers, {name: tensor.clone() for name, tensor in before.items()})
        try:
            yield
        finally:
            _put_buffers(self._buffers, before)


class Engine(ABC):
    """What all topologies share: buffers, train mode, and what must not change."""

    def __init__(self, model: nn.Module, leaves: ModuleLeaves, runtime: Runtime):
        self.model = model
        self.leaves = leaves
        self.runtime = runtime
        self.trainable = tuple(name for name, leaf in leaves.params.items() if leaf.trainable)
        # Modules frozen into eval mode before sharding (BatchNorm of a frozen backbone, say) stay in it.
        self._modes = [(module, model.training and not module.training) for module in model.modules()]
        self._depth = 0

    @contextmanager
    def session(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, train: bool, grad: bool
    ) -> Iterator[Session]:
        """Bind a state: `train` sets the module's mode, `grad` asks for gradients of the trainable parameters."""
        check_names("params", params, self.leaves.params)
        check_names("buffers", buffers, self.leaves.buffers)
        for module, pinned in self._modes:
            module.__dict__["training"] = train and not pinned
        constants = [(name, _slot_buffer(leaf), _slot_buffer(leaf)._version) for name, leaf in self.leaves.constants.items()]
        old = {name: _slot_buffer(leaf) for name, leaf in self.leaves.buffers.items()}
        clones = {name: buffers[name].clone() for name in old}
        self._depth += 1
        try:
            with self.bound(params, grad=grad):
                _put_buffers(self.leaves.buffers, clones)
                yield Session(self)
        finally:
            self._depth -= 1
            _put_buffers(self.leaves.buffers, old)
        for name, tensor, version in constants:
            if _slot_buffer(self.leaves.constants[name]) is not tensor or tensor._version != version:
                raise RuntimeError(
                    f"forward wrote the non-persistent buffer {name!r}, which no state holds; "
                    "register it with persistent=True to make it a leaf of the state"
                )

    @contextmanager
    def applying(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, train: bool) -> Iterator[Session]:
        """A session for one call without gradients of this engine's own."""
        with self.session(params, buffers, train=train, grad=False) as session:
            yield session

    @abstractmethod
    def bound(self, params: Mapping[str, Tensor], *, grad: bool) -> Any:
        """Context in which the module computes with `params`."""

    @abstractmethod
    def backward(self, total: Tensor, *, last: bool) -> None:
        """See `Session.backward`."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """See `Session.gradients`."""

    def window(self, *, last: bool) -> Any:
        """See `Session.window`."""
        return nullcontext()

    def _refuse_nesting(self) -> None:
        if self._depth > 1:
            raise RuntimeError(
                f"a {self.runtime.topology.kind} module is bound to one state at a time, and this call would bind another "
                "inside a step; use the model that the loss was given, or a second module (ps.shard) for the other state"
            )

    def _refuse_grad(self, params: Mapping[str, Tensor]) -> None:
        if not torch.is_grad_enabled():
            return
        for name, tensor in params.items():
            if tensor.requires_grad or _is_wrapped(tensor):
                raise RuntimeError(
                    f"apply cannot differentiate with respect to {name!r} in a {self.runtime.topology.kind} topology: the "
                    "gradient would miss the other ranks; use ps.value_and_grad(module, loss), or pass detached parameters"
                )


class LocalEngine(Engine):
    """One process: the state's tensors take the parameters' places for the length of a session, hook-free."""

    def __init__(self, model: nn.Module, leaves: ModuleLeaves, runtime: Runtime):
        super().__init__(model, leaves, runtime)
        self._places = [(slot.module._parameters, slot.attr, name) for name, leaf in leaves.params.items() for slot in leaf.slots]
        self._leaves_of_graph: dict[str, Tensor] = {}

    @contextmanager
    def bound(self, params: Mapping[str, Tensor], *, grad: bool) -> Iterator[None]:
        outer = self._leaves_of_graph
        bound: Mapping[str, Tensor] = params
        if grad:
            self._leaves_of_graph = {name: params[name].detach().requires_grad_() for name in self.trainable}
            bound = {**params, **self._leaves_of_graph}
        old = [table[attr] for table, attr, _ in self._places]
        try:
            for table, attr, name in self._places:
                table[attr] = bound[name]  # type: ignore[assignment]
            yield
        except BaseException as error:
            _explain_dtensor(error, params)
            raise
        finally:
            for (table, attr, _), tensor in zip(self._places, old, strict=True):
                table[attr] = tensor
            self._leaves_of_graph = outer

    def backward(self, total: Tensor, *, last: bool) -> None:
        total.backward()

    def gradients(self) -> dict[str, Tensor]:
        return {name: leaf.grad for name, leaf in self._leaves_of_graph.items() if leaf.grad is not None}


class DDPEngine(LocalEngine):
    """Copies of the state: torch's DDP for gradients, the local engine for everything else."""

    def __init__(self, model: nn.Module, leaves: ModuleLeaves, runtime: Runtime, spec: ShardingSpec):
        super().__init__(model, leaves, runtime)
        self._entry = _DDPEntry(model)
        self._ddp: nn.parallel.DistributedDataParallel | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._differentiating = False
        for method in ("forward", *spec.forward_methods):
            self._route(method)

    @contextmanager
    def applying(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, train: bool) -> Iterator[Session]:
        self._refuse_grad(params)
        with super().applying(params, buffers, train=train) as session:
            yield session

    @contextmanager
    def bound(self, params: Mapping[str, Tensor], *, grad: bool) -> Iterator[None]:
        if self._depth > 1 and (grad or self._differentiating):
            self._refuse_nesting()
        if not grad:
            with super().bound(params, grad=False):
                yield
            return
        self._bind_parameters(params)
        with self._swapped_in():
            if self._ddp is None:
                self._ddp = self._build_ddp()
            self._differentiating = True
            try:
                yield
            except BaseException:
                self._ddp = None  # a reducer that was interrupted does not recover: build another
                raise
            finally:
                self._differentiating = False
                for parameter in self._parameters.values():
                    parameter.grad = None

    def backward(self, total: Tensor, *, last: bool) -> None:
        total.backward()

    def gradients(self) -> dict[str, Tensor]:
        grads = {name: self._parameters[name].grad for name in self.trainable}
        return {name: grad for name, grad in grads.items() if grad is not None}

    def window(self, *, last: bool) -> Any:
        assert self._ddp is not None
        return nullcontext() if last else self._ddp.no_sync()

    def _bind_parameters(self, params: Mapping[str, Tensor]) -> None:
        """Point DDP's own parameters, which its reducer holds on to, at the state's storage."""
        for name, leaf in self.leaves.params.items():
            tensor = params[name].detach()
            if is_dtensor(tensor):
                raise TypeError(f"params[{name!r}] is a DTensor, but this module is not sharded; restore it as plain tensors")
            bound = self._parameters.get(name)
            if bound is None:
                self._parameters[name] = nn.Parameter(tensor, requires_grad=leaf.trainable)
            else:
                bound.data = tensor

    @contextmanager
    def _swapped_in(self) -> Iterator[None]:
        old = [table[attr] for table, attr, _ in self._places]
        try:
            for table, attr, name in self._places:
                table[attr] = self._parameters[name]
            yield
        finally:
            for (table, attr, _), tensor in zip(self._places, old, strict=True):
                table[attr] = tensor

    def _build_ddp(self) -> nn.parallel.DistributedDataParallel:
        device = self.runtime.device
        accelerator = self.runtime.accelerator
        assert accelerator is not None
        options = accelerator.ddp_handler.to_kwargs() if accelerator.ddp_handler is not None else {}
        ddp = nn.parallel.DistributedDataParallel
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in signature(ddp).parameters else "broadcast_buffers"
        # Syncing copies rank 0's values over the others': a state is equal on all ranks already, and not ours to write.
        return ddp(
            self._entry,
            device_ids=[device.index] if device.type == "cuda" else None,
            **{**options, buffers: False, "init_sync": False},
        )

    def _route(self, method: str) -> None:
        """Let `model.method(...)` inside a differentiated session go through DDP, so that its reducer takes part."""
        original = getattr(self.model, method)

        def routed(*args: Any, **kwargs: Any) -> Any:
            if not self._differentiating or self._entry.active:
                return original(*args, **kwargs)
            return self._ddp(original, *args, **kwargs)  # type: ignore[misc]

        self.model.__dict__[method] = routed


class _DDPEntry(nn.Module):
    """What DDP wraps: calls any of the model's methods as its own forward."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.active = False

    def forward(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.active = True
        try:
            return method(*args, **kwargs)
        finally:
            self.active = False


class FSDPEngine(Engine):
    """Shards of the state: FSDP2 units, with the state's own shards bound in."""

    def __init__(self, model: nn.Module, leaves: ModuleLeaves, runtime: Runtime, plan: Plan):
        from purestep.sharding import _fsdp

        super().__init__(model, leaves, runtime)
        self._fsdp = _fsdp
        _fully_shard(model, plan, runtime)
        _fsdp.leave_meta(model, runtime.device)
        by_id = _fsdp.fsdp_params(model)
        self.params = {
            name: by_id[id(leaf.slots[0].module._parameters[leaf.slots[0].attr])] for name, leaf in leaves.params.items()
        }
        self._bound: dict[str, Tensor | None] = dict.fromkeys(self.params)

    @contextmanager
    def applying(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, train: bool) -> Iterator[Session]:
        self._refuse_grad(params)
        with torch.no_grad(), super().applying(params, buffers, train=train) as session:
            yield session

    @contextmanager
    def bound(self, params: Mapping[str, Tensor], *, grad: bool) -> Iterator[None]:
        self._refuse_nesting()
        for name, param in self.params.items():
            leaf = params[name]
            if leaf is not self._bound[name]:
                self._check(name, leaf, param.sharded_param)
                self._bound[name] = leaf if self._fsdp.bind(param, leaf) else None
        try:
            yield
        except BaseException:
            self._fsdp.recover(self.model)
            raise
        self._fsdp.reshard(self.model)

    def backward(self, total: Tensor, *, last: bool) -> None:
        # Every microbatch reduces: partial sums then live as shards, not as whole gradients.
        total.backward()

    def gradients(self) -> dict[str, Tensor]:
        return self._fsdp.take_gradients(self.params.items())

    def _check(self, name: str, leaf: Tensor, expected: Any) -> None:
        kind = self.runtime.topology.kind
        if not is_dtensor(leaf):
            raise TypeError(
                f"params[{name!r}] is a plain tensor, but this module is {kind}: its states hold DTensors; make them with "
                "ps.init(module, ...) or ps.restore(path, ps.abstract_state(module, ...))"
            )
        given = (tuple(leaf.shape), leaf.dtype, leaf.placements, leaf.device_mesh)  # type: ignore[attr-defined]
        wanted = (tuple(expected.shape), expected.dtype, expected.placements, expected.device_mesh)
        if given != wanted:
            raise ValueError(f"params[{name!r}] does not fit this {kind} module: got {given}, expected {wanted}")


def _fully_shard(model: nn.Module, plan: Plan, runtime: Runtime) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    dtypes = {"fp32": None, "bf16": torch.bfloat16}
    knobs = runtime.config.fsdp
    policy = MixedPrecisionPolicy(
        param_dtype=dtypes[knobs.param_dtype],
        reduce_dtype=torch.float32 if knobs.reduce_dtype == "fp32" and knobs.param_dtype == "bf16" else dtypes[knobs.reduce_dtype],
        cast_forward_inputs=False,
    )
    modules = dict(model.named_modules())
    for unit in sorted(plan.units, key=lambda unit: -unit.path.count(".") if unit.path else 1):
        fully_shard(
            modules[unit.path],
            mesh=runtime.mesh,
            reshard_after_forward=unit.reshard_after_forward,
            mp_policy=policy,
        )
    for method in plan.forward_methods:
        register_fsdp_forward_method(model, method)


def check_names(what: str, given: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise unless `given` has exactly the names of `expected`."""
    if given.keys() != expected.keys():
        missing, unknown = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
        raise ValueError(
            f"{what} does not fit the module:"
            + (f" missing {', '.join(missing)}" if missing else "")
            + (f"{';' if missing else ''} unknown {', '.join(unknown)}" if unknown else "")
        )


def _put_buffers(leaves: Mapping[str, Leaf], tensors: Mapping[str, Tensor]) -> None:
    for name, leaf in leaves.items():
        for slot in leaf.slots:
            slot.module._buffers[slot.attr] = tensors[name]


def _slot_buffer(leaf: Leaf) -> Tensor:
    tensor = leaf.slots[0].module._buffers[leaf.slots[0].attr]
    assert tensor is not None
    return tensor


def _is_wrapped(tensor: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _explain_dtensor(error: BaseException, params: Mapping[str, Tensor]) -> None:
    sharded = [name for name, tensor in params.items() if is_dtensor(tensor)]
    if sharded:
        error.add_note(
            f"params[{sharded[0]!r}] is a DTensor, but this module is not sharded: shard the module over the same mesh "
            "(ps.shard(model, spec, runtime)), or restore the state as plain tensors"
        )
