"""Derivatives beyond the gradient, on local modules: directional, Hessian times a vector, and those of each sample."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from purestep.functional.gradients import Loss, ambient, call_loss
from purestep.sharding.pure_module import PureModule
from purestep.state.keys import Key

Params = Mapping[str, Tensor]


def jvp(module: PureModule, loss: Loss) -> Callable[..., tuple[Tensor, Tensor]]:
    """The derivative of a loss along a direction in parameter space, in one forward pass (`torch.func.jvp`).

    Args:
        module: from `ps.shard`, in a local topology.
        loss: see `value_and_grad`; what is differentiated is its mean over the batch.

    Returns:
        `(params, buffers, batch, key, tangents) -> (loss, derivative)`, two 0-d tensors. `tangents` maps names of
        parameters to tensors of their shapes; names it lacks stand still.

    Raises:
        ValueError: the topology is not local; or, when called, a tangent without a parameter like it.

    >>> import torch, purestep as ps
    >>> module = ps.shard(torch.nn.Linear(1, 1, bias=False))
    >>> slope = ps.jvp(module, lambda model, x, key: model(x).square().mean())
    >>> slope({"weight": torch.full((1, 1), 3.0)}, {}, torch.ones(2, 1), ps.key(0), {"weight": torch.ones(1, 1)})
    (tensor(9.), tensor(6.))
    """
    _require_local(module, "jvp")

    def along(params: Params, buffers: Params, batch: Any, key: Key, tangents: Params) -> tuple[Tensor, Tensor]:
        _check_like("tangent", tangents, params)
        value = _value_of(module, loss, params, buffers, batch, key)
        chosen = {name: params[name].detach() for name in tangents}
        loss_value, slope = _forward_mode(value, chosen, tangents)
        return loss_value, slope.to(loss_value.dtype)  # forward mode promotes where numbers are mixed in

    return along


def hvp(module: PureModule, loss: Loss) -> Callable[..., dict[str, Tensor]]:
    """The Hessian of a loss times a vector, without the Hessian: forward mode over reverse mode.

    Args:
        module: from `ps.shard`, in a local topology.
        loss: see `value_and_grad`; what is differentiated is its mean over the batch.

    Returns:
        `(params, buffers, batch, key, vector) -> product`. `vector` maps names of parameters to tensors of their
        shapes; the product has the same names, and is of the Hessian with respect to these parameters.

    Raises:
        ValueError: the topology is not local; or, when called, a name without a parameter like it.

    >>> import torch, purestep as ps
    >>> module = ps.shard(torch.nn.Linear(1, 1, bias=False))
    >>> product = ps.hvp(module, lambda model, x, key: model(x).pow(3).mean())
    >>> product({"weight": torch.full((1, 1), 2.0)}, {}, torch.ones(2, 1), ps.key(0), {"weight": torch.ones(1, 1)})
    {'weight': tensor([[12.]])}
    """
    _require_local(module, "hvp")

    def times(params: Params, buffers: Params, batch: Any, key: Key, vector: Params) -> dict[str, Tensor]:
        _check_like("vector", vector, params)
        gradient = torch.func.grad(_value_of(module, loss, params, buffers, batch, key))
        chosen = {name: params[name].detach() for name in vector}
        product = _forward_mode(gradient, chosen, vector)[1]
        return {name: row.to(params[name].dtype) for name, row in product.items()}

    return times


def per_sample_grads(
    module: PureModule, loss: Loss, *, chunk_size: int | None = None
) -> Callable[..., dict[str, Tensor]]:
    """The gradient of the loss of each sample by itself, vectorized (`torch.func.vmap`).

    Args:
        module: from `ps.shard`, in a local topology.
        loss: see `value_and_grad`; it is called on batches of one row. Random numbers differ from row to row.
        chunk_size: rows computed at once; default all.

    Returns:
        `(params, buffers, batch, key) -> {name: tensor of shape (rows, *shape of the parameter)}` for the trainable
        parameters. The tensors of `batch` have one leading dim.

    Raises:
        ValueError: the topology is not local; or, when called, the batch has no leading dim.

    >>> import torch, purestep as ps
    >>> module = ps.shard(torch.nn.Linear(1, 1, bias=False))
    >>> grads = ps.per_sample_grads(module, lambda model, x, key: model(x).sum())
    >>> grads({"weight": torch.ones(1, 1)}, {}, torch.tensor([[1.0], [3.0]]), ps.key(0))["weight"].flatten()
    tensor([1., 3.])
    """
    _require_local(module, "per_sample_grads")

    def of_each(params: Params, buffers: Params, batch: Any, key: Key) -> dict[str, Tensor]:
        flat, structure = pytree.tree_flatten(batch)
        mapped = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and x.ndim]
        if len({flat[i].shape[0] for i in mapped}) != 1:
            raise ValueError("per_sample_grads needs a batch whose tensors have one leading dim, of its samples")
        chosen = {name: params[name].detach() for name in module.trainable}

        def gradient(*rows: Tensor) -> dict[str, Tensor]:
            by_index = dict(zip(mapped, rows, strict=True))
            one = [by_index[i].unsqueeze(0) if i in by_index else x for i, x in enumerate(flat)]
            value = _value_of(module, loss, params, buffers, pytree.tree_unflatten(one, structure), key)
            return torch.func.grad(value)(chosen)

        vectorized = torch.func.vmap(gradient, randomness="different", chunk_size=chunk_size)
        return vectorized(*(flat[i] for i in mapped))

    return of_each


def _value_of(
    module: PureModule, loss: Loss, params: Params, buffers: Params, batch: Any, key: Key
) -> Callable[[Params], Tensor]:
    """The mean loss as a function of some of the parameters, that torch.func can transform."""
    own_key = key.fold_in("microbatch", 0, "rank", 0)  # as in value_and_grad

    def value(chosen: Params) -> Tensor:
        scope, autocast = ambient(own_key).scope(module.runtime.device), module.runtime.autocast()
        with module.binding({**params, **chosen}, buffers) as session, scope, autocast:
            mean = call_loss(loss, session.model, batch, own_key)[""]
        return torch.as_tensor(mean.value)

    return value


def _forward_mode(function: Callable[[Params], Any], at: Params, along: Params) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script")  # torch's own, on its first use
        return torch.func.jvp(function, (at,), (dict(along),))


def _require_local(module: PureModule, name: str) -> None:
    if not isinstance(module, PureModule):
        raise TypeError(f"ps.{name} takes a module made by ps.shard, got {type(module).__name__}")
    if module.topology.kind != "local":
        raise ValueError(
            f"ps.{name} differentiates a module on one process: this one is {module.topology}, whose engine knows the "
            "gradient of ps.value_and_grad only; make one for it with ps.shard(model) without a runtime"
        )


def _check_like(what: str, given: Params, params: Params) -> None:
    for name, tensor in given.items():
        if name not in params or tensor.shape != params[name].shape or tensor.dtype != params[name].dtype:
            wanted = f"{tuple(params[name].shape)} {params[name].dtype}" if name in params else "no such parameter"
            raise ValueError(f"{what} {name!r}: got {tuple(tensor.shape)} {tensor.dtype}, the parameter is {wanted}")
