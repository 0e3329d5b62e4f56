"""The engine of copies: torch's DDP for gradients, the local engine for everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from purestep.sharding.engines import LocalEngine, Session
from purestep.sharding.leaves import ModuleLeaves
from purestep.sharding.reduction import mean_in
from purestep.sharding.runtime import Runtime
from purestep.sharding.spec import ShardingSpec
from purestep.state.placement import is_dtensor


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
    def applying(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, train: bool
    ) -> Iterator[Session]:
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
        with self._swapped_in(self._parameters):
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
        if last:
            self._refuse_bypass()
        total.backward()
        if last:
            self._check_reduced()

    def gradients(self) -> dict[str, Tensor]:
        grads = {name: self._parameters[name].grad for name in self.trainable}
        return {name: grad for name, grad in grads.items() if grad is not None}

    def window(self, *, last: bool) -> Any:
        assert self._ddp is not None
        self._entered = False
        return nullcontext() if last else self._ddp.no_sync()

    def _check_reduced(self) -> None:
        """Raise if a bucket still waits for an unused parameter: DDP says so one step later, with the step done."""
        assert self._ddp is not None
        try:
            self._ddp._check_reducer_finalized()
        except RuntimeError:
            unused = [name for name in self.trainable if self._parameters[name].grad is None]
            raise RuntimeError(
                f"the loss did not use every parameter ({', '.join(unused) or 'in the last microbatch'}), so DDP did "
                "not reduce the gradients; set --accelerator.ddp.find-unused-parameters, or freeze what is never used "
                "(requires_grad=False)"
            ) from None

    def _bind_parameters(self, params: Mapping[str, Tensor]) -> None:
        """Point DDP's own parameters, which its reducer holds on to, at the state's storage."""
        for name, leaf in self.leaves.params.items():
            tensor = params[name].detach()
            if is_dtensor(tensor):
                raise TypeError(
                    f"params[{name!r}] is a DTensor, but this module is not sharded; restore it as plain tensors"
                )
            bound = self._parameters.get(name)
            if bound is None:
                self._parameters[name] = nn.Parameter(tensor, requires_grad=leaf.trainable)
            else:
                bound.data = tensor

    def _build_ddp(self) -> nn.parallel.DistributedDataParallel:
        device = self.runtime.device
        accelerator = self.runtime.accelerator
        assert accelerator is not None
        options = accelerator.ddp_handler.to_kwargs() if accelerator.ddp_handler is not None else {}
        ddp = nn.parallel.DistributedDataParallel
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in signature(ddp).parameters else "broadcast_buffers"
        # Syncing copies rank 0's values over the others': a state is equal on all ranks already, and not ours to write.
        built = ddp(
            self._entry,
            device_ids=[device.index] if device.type == "cuda" else None,
            **{**options, buffers: False, "init_sync": False},
        )
        reduce_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.runtime.config.ddp.reduce_dtype)
        if reduce_dtype is not None:
            built.register_comm_hook(None, mean_in(reduce_dtype))
        return built

    def _route(self, method: str) -> None:
        """Let `model.method(...)` inside a differentiated session go through DDP, so that its reducer takes part."""
        original = getattr(self.model, method)

        def routed(*args: Any, **kwargs: Any) -> Any:
            if not self._differentiating or self._entry.active:
                return original(*args, **kwargs)
            self._entered |= torch.is_grad_enabled()
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
