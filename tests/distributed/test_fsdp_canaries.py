"""Canaries: facts about torch's FSDP2 and DDP that the engines rely on, one test each.

A torch release that changes one fails here by name, with the place that relies on it. They are facts, not wishes: where
one is a defect of torch, its end means that the guard against it can go.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import RanksFailed, run_ranks

_CANARIES: dict[str, tuple[Callable[[], Any], str]] = {}


def canary(relied_on_by: str) -> Callable:
    """Register a function that runs on 2 ranks and asserts one fact."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        _CANARIES[function.__name__] = (function, relied_on_by)
        return function

    return register


def _sharded(model: nn.Module | None = None) -> nn.Module:
    model = model if model is not None else nn.Linear(2, 3, bias=False)
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def _param(model: nn.Module) -> Any:
    state = model._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    (param,) = (groups[0] if groups is not None else state._fsdp_param_group).fsdp_params
    return param


def _filled(model: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            getattr(parameter, "_local_tensor", parameter).fill_(value)
    return model


def _bind(param: Any, value: float) -> None:
    """What purestep.sharding._fsdp.bind does: 3 rows over 2 ranks, padded to 2 rows each."""
    flat = torch.full((4,), value)
    param.sharded_param._local_tensor = flat.view(2, 2)[: param.sharded_param._local_tensor.shape[0]]
    param._sharded_param_data = flat


X = torch.ones(1, 2)


@canary("_fsdp._groups")
def units_give_their_state_and_its_parameter_groups() -> None:
    state = _sharded()._get_fsdp_state()
    assert hasattr(state, "_fsdp_param_groups") or hasattr(state, "_fsdp_param_group")
    assert state._is_root is None  # until the first forward


@canary("_fsdp.bind, leave_meta, recover")
def an_fsdp_param_has_the_attributes_that_binding_writes() -> None:
    param = _param(_sharded())
    names = ("sharded_param", "_sharded_param_data", "padded_sharded_param_size", "unsharded_accumulated_grad")
    assert [name for name in names if not hasattr(param, name)] == []
    assert [name for name in ("_setattr_on_modules", "reset_sharded_param") if not callable(getattr(param, name))] == []
    assert tuple(param.padded_sharded_param_size) == (2, 2)
    assert param._sharded_param_data.shape == (4,)
    assert param.unsharded_accumulated_grad is None
    assert isinstance(param.sharded_param, nn.Parameter)
    assert param.sharded_param._local_tensor.shape[0] == (2, 1)[dist.get_rank()]


@canary("_fsdp.bind")
def two_assignments_bind_a_shard() -> None:
    model = _filled(_sharded(), 1.0)
    assert model(X).tolist() == [[2.0] * 3]
    model.reshard()
    for value in (5.0, 7.0):
        _bind(_param(model), value)
        assert model(X).tolist() == [[2 * value] * 3]
        model.reshard()


@canary("_fsdp.bind: both attributes are needed")
def all_gathers_read_the_flat_storage_not_the_parameter() -> None:
    model = _filled(_sharded(), 1.0)
    model(X)
    model.reshard()
    param = _param(model)
    param.sharded_param._local_tensor = torch.full_like(param.sharded_param._local_tensor, 5.0)
    assert model(X).tolist() == [[2.0] * 3]


@canary("_fsdp.bind, FSDPEngine.bound: writes into a bound state need no binding")
def a_bound_shard_is_read_anew_by_each_gather() -> None:
    model = _sharded()
    param = _param(model)
    _bind(param, 5.0)
    model(X)
    model.reshard()
    param._sharded_param_data.fill_(6.0)
    assert model(X).tolist() == [[12.0] * 3]


@canary("_fsdp.take_gradients")
def gradients_arrive_at_the_sharded_parameter_averaged() -> None:
    model = _sharded()
    param = _param(model)
    _bind(param, 5.0)
    model(X * (1 + dist.get_rank())).sum().backward()
    grad = param.sharded_param.grad
    assert isinstance(grad, DTensor)
    assert grad.full_tensor().tolist() == [[1.5, 1.5]] * 3


@canary("FSDPEngine.backward: every microbatch reduces")
def a_second_backward_adds_to_the_sharded_gradient() -> None:
    model = _sharded()
    for _ in range(2):
        model(X).sum().backward()
    assert _param(model).sharded_param.grad.full_tensor().tolist() == [[2.0, 2.0]] * 3


@canary("_fsdp.leave_meta")
def a_meta_parameter_takes_an_identity_on_the_device_and_then_a_shard() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 3, bias=False)
    param = _param(_sharded(model))
    assert param.sharded_param.is_meta
    spec = param.sharded_param._spec
    rows = param.sharded_param._local_tensor.shape[0]
    new = nn.Parameter(DTensor(torch.empty(2, 2)[:rows], spec, requires_grad=False))
    param.sharded_param = new
    param._setattr_on_modules(new)
    param.reset_sharded_param()
    assert model.weight is new
    param._sharded_param_data.untyped_storage().resize_(0)
    _bind(param, 5.0)
    model(X).sum().backward()
    assert param.sharded_param.grad is not None
    assert model.weight is new


@canary("placement.from_local")
def a_dtensor_is_made_of_a_local_tensor_and_a_spec_without_a_copy() -> None:
    parameter = _param(_sharded()).sharded_param
    made = DTensor(parameter._local_tensor.detach(), parameter._spec, requires_grad=False)
    assert made.untyped_storage is not None
    assert made._local_tensor.data_ptr() == parameter._local_tensor.data_ptr()
    assert (made.shape, made.placements) == (parameter.shape, parameter.placements)


@canary("DESIGN: why states are bound and not passed through functional_call")
def functional_call_silently_ignores_parameters_of_a_used_module() -> None:
    model = _filled(_sharded(), 1.0)
    model(X)
    model.reshard()
    other = {"weight": _filled(_sharded(), 100.0).weight.detach()}
    assert torch.func.functional_call(model, other, (X,)).tolist() == [[2.0] * 3]


@canary("ps.init: one key makes the replicas' values, torch does not")
def fully_shard_broadcasts_nothing() -> None:
    model = nn.Linear(2, 3, bias=False)
    model = _sharded(_filled(model, 1.0 + dist.get_rank()))
    assert model.weight.full_tensor().flatten().tolist() == [1.0] * 4 + [2.0] * 2
    assert model(X).tolist() == [[2.0, 2.0, 4.0]]


class _Faulty(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.ones(2, requires_grad=True)
        x.register_hook(_raise)
        return super().forward(x)


def _raise(grad: Tensor) -> None:
    raise RuntimeError("planted")


@canary("_fsdp.recover")
def an_aborted_backward_leaves_gradients_that_a_reset_does_not_clear() -> None:
    model = _sharded(_Faulty(2, 3, bias=False))
    with pytest.raises(RuntimeError, match="planted"):
        model(X).sum().backward()
    if hasattr(model, "reset_iter_state"):  # torch >= 2.13
        model.reset_iter_state()
    assert _param(model)._unsharded_param.grad is not None


@canary("_fsdp.recover: the guard on _is_root")
def a_reset_before_the_first_forward_fails() -> None:
    model = _sharded()
    if hasattr(model, "reset_iter_state"):  # torch >= 2.13
        with pytest.raises((AttributeError, RuntimeError, AssertionError)):
            model.reset_iter_state()
        model(X)
        model.reset_iter_state()
    assert model._get_fsdp_state()._is_root is (True if hasattr(model, "reset_iter_state") else None)


@canary("fsdp_engine._fully_shard: ps.shard refuses what is sharded already")
def sharding_twice_is_refused() -> None:
    model = _sharded()
    with pytest.raises((AssertionError, ValueError)):
        fully_shard(model)


# DDP.


def _buffers_argument() -> str:
    names = inspect.signature(DistributedDataParallel).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"


def _ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **{"init_sync": False, _buffers_argument(): False, **options})


@canary("DDPEngine._build_ddp")
def ddp_can_be_told_to_copy_nothing_between_ranks() -> None:
    model = nn.BatchNorm1d(2)
    rank = dist.get_rank()
    with torch.no_grad():
        model.weight.fill_(1.0 + rank)
        model.running_mean.fill_(1.0 + rank)
    ddp = _ddp(model.eval())
    ddp(torch.ones(2, 2)).sum().backward()
    assert model.weight.tolist() == [1.0 + rank] * 2
    assert model.running_mean.tolist() == [1.0 + rank] * 2


@canary("DDPEngine._bind_parameters")
def the_reducer_follows_parameters_whose_data_is_exchanged() -> None:
    model = nn.Linear(2, 1, bias=False)
    ddp = _ddp(model)
    rank = dist.get_rank()
    for value in (5.0, 7.0):
        model.weight.data = torch.full((1, 2), value)
        model.weight.grad = None
        out = ddp(X * (1 + rank))
        assert out.item() == 2 * value * (1 + rank)
        out.square().sum().backward()
        # The gradient is 2 * (w . x) * x: 4 v on rank 0, 16 v on rank 1.
        assert model.weight.grad.tolist() == [[10 * value] * 2]


@canary("DDPEngine._swapped_in: the module holds other tensors between sessions")
def the_reducer_follows_parameters_that_leave_the_module_and_return() -> None:
    model = nn.Linear(2, 1, bias=False)
    ddp, own = _ddp(model), model.weight
    for _ in range(2):
        model._parameters["weight"] = nn.Parameter(torch.zeros(1, 2))
        model._parameters["weight"] = own
        own.grad = None
        ddp(X * (1 + dist.get_rank())).sum().backward()
        assert own.grad.tolist() == [[1.5, 1.5]]


class _Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@canary("DDPEngine._check_reduced")
def an_unfinished_reduction_can_be_asked_for() -> None:
    complete, half = _ddp(nn.Linear(2, 1)), _ddp(_Half())
    complete(X).sum().backward()
    complete._check_reducer_finalized()
    half(X * (1 + dist.get_rank())).sum().backward()
    assert half.module.used.weight.grad.tolist() == [[1.0 + dist.get_rank()] * 2]  # not reduced, without an error
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        half._check_reducer_finalized()
    found = _ddp(_Half(), find_unused_parameters=True)
    found(X * (1 + dist.get_rank())).sum().backward()
    found._check_reducer_finalized()
    assert found.module.used.weight.grad.tolist() == [[1.5, 1.5]]


@canary("Engine._refuse_bypass")
def ddp_does_not_reduce_what_did_not_pass_through_it() -> None:
    ddp = _ddp(nn.Linear(2, 1))
    ddp.module(X * (1 + dist.get_rank())).sum().backward()
    ddp._check_reducer_finalized()  # nothing tells
    assert ddp.module.weight.grad.tolist() == [[1.0 + dist.get_rank()] * 2]


def _fly() -> dict[str, str | None]:
    dist.init_process_group("gloo")
    results: dict[str, str | None] = {}
    for name, (function, _) in _CANARIES.items():
        try:
            function()
            results[name] = None
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return results


@functools.cache
def _flown() -> list[dict[str, str | None]] | Exception:
    try:
        return run_ranks(_fly, 2)
    except RanksFailed as error:
        return error


@pytest.mark.xdist_group("canaries")
@pytest.mark.parametrize("name", _CANARIES)
def test_canary(name):
    everyone = _flown()
    if isinstance(everyone, Exception):
        raise everyone
    for rank, results in enumerate(everyone):
        assert results[name] is None, (
            f"in torch {torch.__version__} it no longer holds that {name.replace('_', ' ')}, which "
            f"{_CANARIES[name][1]} relies on (rank {rank}): {results[name]}"
        )
