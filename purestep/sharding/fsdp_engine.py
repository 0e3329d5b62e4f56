"""The engine of shards: FSDP2 units, with the state's own shards bound in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from purestep.sharding import _fsdp
from purestep.sharding.engines import Engine, Session
from purestep.sharding.leaves import ModuleLeaves
from purestep.sharding.plan import Plan
from purestep.sharding.runtime import Runtime
from purestep.state.placement import is_dtensor


class FSDPEngine(Engine):
    """Shards of the state: FSDP2 units, with the state's own shards bound in."""

    def __init__(self, model: nn.Module, leaves: ModuleLeaves, runtime: Runtime, plan: Plan):
        super().__init__(model, leaves, runtime)
        _fully_shard(model, plan, runtime)
        _fsdp.leave_meta(model, runtime.device)
        by_id = _fsdp.fsdp_params(model)
        self.params = {
            name: by_id[id(leaf.slots[0].module._parameters[leaf.slots[0].attr])]
            for name, leaf in leaves.params.items()
        }
        self._bound: dict[str, Tensor | None] = dict.fromkeys(self.params)
        for method in ("forward", *plan.forward_methods):
            self._watch(method)

    @contextmanager
    def applying(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, train: bool
    ) -> Iterator[Session]:
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
                self._bound[name] = leaf if _fsdp.bind(param, leaf) else None
        self._entered = False
        try:
            yield
        except BaseException as error:
            if not self._entered and "DTensor" in str(error):
                error.add_note(f"parameters were used without calling the model; {self._entry_advice()}")
            _fsdp.recover(self.model)
            raise
        _fsdp.reshard(self.model)

    def backward(self, total: Tensor, *, last: bool) -> None:
        self._refuse_bypass()
        # Every microbatch reduces: partial sums then live as shards, not as whole gradients.
        total.backward()

    def gradients(self) -> dict[str, Tensor]:
        return _fsdp.take_gradients(self.params.items())

    def abstract_params(self) -> dict[str, Tensor]:
        return {name: _fsdp.abstract(param) for name, param in self.params.items()}

    def _watch(self, method: str) -> None:
        """Note calls of `model.method`."""
        original = getattr(self.model, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._entered = True
            return original(*args, **kwargs)

        self.model.__dict__[method] = watched

    def _check(self, name: str, leaf: Tensor, expected: Any) -> None:
        kind = self.runtime.topology.kind
        if not is_dtensor(leaf):
            raise TypeError(
                f"params[{name!r}] is a plain tensor, but this module is {kind}: its states hold DTensors; "
                "make them with ps.init(module, ...) or ps.restore(path, ps.abstract_state(module, ...))"
            )
        given = (tuple(leaf.shape), leaf.dtype, leaf.placements, leaf.device_mesh)  # type: ignore[attr-defined]
        wanted = (tuple(expected.shape), expected.dtype, expected.placements, expected.device_mesh)
        if given != wanted:
            raise ValueError(f"params[{name!r}] does not fit this {kind} module: got {given}, expected {wanted}")


def _fully_shard(model: nn.Module, plan: Plan, runtime: Runtime) -> None:
    dtypes = {"fp32": None, "bf16": torch.bfloat16}
    knobs = runtime.config.fsdp
    policy = MixedPrecisionPolicy(
        param_dtype=dtypes[knobs.param_dtype],
        reduce_dtype=torch.float32
        if knobs.reduce_dtype == "fp32" and knobs.param_dtype == "bf16"
        else dtypes[knobs.reduce_dtype],
        cast_forward_inputs=runtime.config.mixed_precision == "no",  # autocast has its own rules
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
