"""Engines: how a state is bound into a module, run forward and backward, and read back out.

One engine a topology, one shape for all: a *session* binds parameters and buffers, offers the module as `model`, runs
`backward`, and hands back gradients and new buffers. Whatever happens inside, the module is usable afterwards and the
bound state untouched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from purestep.sharding.leaves import Leaf, ModuleLeaves
from purestep.sharding.runtime import Runtime
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
        self._train: bool | None = None  # the mode of the innermost open session
        self._entered = False  # whether the microbatch called the model, where the engine could see it
        self._shapes = [leaf.shape for leaf in leaves.params.values()]
        self._depth = 0

    @contextmanager
    def session(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, train: bool, grad: bool
    ) -> Iterator[Session]:
        """Bind a state: `train` sets the module's mode, `grad` asks for gradients of the trainable parameters."""
        check_names("params", params, self.leaves.params)
        check_names("buffers", buffers, self.leaves.buffers)
        if [params[name].shape for name in self.leaves.params] != self._shapes:
            _refuse_shapes("params", params, self.leaves.params)
        _refuse_shapes("buffers", buffers, self.leaves.buffers)
        constants = {name: _slot_buffer(leaf) for name, leaf in self.leaves.constants.items()}
        versions = {name: tensor._version for name, tensor in constants.items()}
        old = {name: _slot_buffer(leaf) for name, leaf in self.leaves.buffers.items()}
        clones = {name: buffers[name].clone() for name in old}
        outer = self._train
        self._depth += 1
        try:
            self._set_mode(train)
            with self.bound(params, grad=grad):
                _put_buffers(self.leaves.buffers, clones)
                yield Session(self)
        finally:
            self._depth -= 1
            _put_buffers(self.leaves.buffers, old)
            written = [
                name
                for name, tensor in constants.items()
                if _slot_buffer(self.leaves.constants[name]) is not tensor or tensor._version != versions[name]
            ]
            _put_buffers(self.leaves.constants, constants)
            self._set_mode(outer)
        if written:
            raise RuntimeError(
                f"forward wrote the non-persistent buffer {written[0]!r}, which no state holds; "
                "register it with persistent=True to make it a leaf of the state"
            )

    @contextmanager
    def applying(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, train: bool
    ) -> Iterator[Session]:
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
        self._entered = False
        return nullcontext()

    def _refuse_bypass(self) -> None:
        if not self._entered:
            raise RuntimeError(f"the loss used parameters without calling the model; {self._entry_advice()}")

    def _entry_advice(self) -> str:
        return (
            f"in a {self.runtime.topology.kind} topology gradients are reduced over ranks only through model(...) and "
            "declared methods: call one of these, or declare another, ShardingSpec(forward_methods=(name,))"
        )

    def abstract_params(self) -> dict[str, Tensor]:
        """Meta tensors placed as the parameters are."""
        return {n: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for n, leaf in self.leaves.params.items()}

    def _set_mode(self, train: bool | None) -> None:
        """Put the module into train or eval mode; None, which no session left behind, leaves it as it is."""
        self._train = train
        if train is not None:
            for module, pinned in self._modes:
                module.__dict__["training"] = train and not pinned

    def _refuse_nesting(self) -> None:
        if self._depth > 1:
            raise RuntimeError(
                f"a {self.runtime.topology.kind} module is bound to one state at a time, and this call would bind "
                "another inside a step; use the model that the loss was given, or a second module (ps.shard) for the "
                "other state"
            )

    def _refuse_grad(self, params: Mapping[str, Tensor]) -> None:
        if not torch.is_grad_enabled():
            return
        for name, tensor in params.items():
            if tensor.requires_grad or _is_wrapped(tensor):
                raise RuntimeError(
                    f"apply cannot differentiate with respect to {name!r} in a {self.runtime.topology.kind} "
                    "topology: the gradient would miss the other ranks; use ps.value_and_grad(module, loss), or pass "
                    "detached parameters"
                )


class LocalEngine(Engine):
    """One process: the state's tensors take the parameters' places for the length of a session, hook-free."""

    def __init__(self, model: nn.Module, leaves: ModuleLeaves, runtime: Runtime):
        super().__init__(model, leaves, runtime)
        self._places = [
            (slot.module._parameters, slot.attr, name) for name, leaf in leaves.params.items() for slot in leaf.slots
        ]
        self._leaves_of_graph: dict[str, Tensor] = {}

    @contextmanager
    def bound(self, params: Mapping[str, Tensor], *, grad: bool) -> Iterator[None]:
        outer = self._leaves_of_graph
        bound: Mapping[str, Tensor] = params
        if grad:
            self._leaves_of_graph = {name: params[name].detach().requires_grad_() for name in self.trainable}
            bound = {**params, **self._leaves_of_graph}
        try:
            with self._swapped_in(bound):
                yield
        except BaseException as error:
            _explain_dtensor(error, params)
            raise
        finally:
            self._leaves_of_graph = outer

    @contextmanager
    def _swapped_in(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Context in which `tensors` take the places of the module's parameters."""
        old = [table[attr] for table, attr, _ in self._places]
        try:
            for table, attr, name in self._places:
                table[attr] = tensors[name]  # type: ignore[assignment]
            yield
        finally:
            for (table, attr, _), tensor in zip(self._places, old, strict=True):
                table[attr] = tensor

    def backward(self, total: Tensor, *, last: bool) -> None:
        total.backward()

    def gradients(self) -> dict[str, Tensor]:
        return {name: leaf.grad for name, leaf in self._leaves_of_graph.items() if leaf.grad is not None}


def check_names(what: str, given: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise unless `given` has exactly the names of `expected`."""
    if given.keys() != expected.keys():
        missing, unknown = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
        raise ValueError(
            f"{what} does not fit the module:"
            + (f" missing {', '.join(missing)}" if missing else "")
            + (f"{';' if missing else ''} unknown {', '.join(unknown)}" if unknown else "")
        )


def _refuse_shapes(what: str, given: Mapping[str, Tensor], expected: Mapping[str, Leaf]) -> None:
    for name, leaf in expected.items():
        if given[name].shape != leaf.shape:
            raise ValueError(
                f"{what}[{name!r}] does not fit the module: got shape {tuple(given[name].shape)}, "
                f"expected {tuple(leaf.shape)}"
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
