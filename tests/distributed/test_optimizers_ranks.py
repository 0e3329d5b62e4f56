"""Norms and optimizers on shards: the numbers of one process, on every rank."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import purestep as ps
from purestep.state.placement import copy_block, empty_leaf
from purestep.state.train_state import padded_storage
from tests.ranks import run_on

TOPOLOGIES = [(1, 2), (2, 2)]
on_each_topology = pytest.mark.parametrize("topology", TOPOLOGIES, ids=["fsdp2", "hsdp"])

# Rows for both ranks, uneven rows, a row for rank 0 only (rank 1 holds nothing), a vector, several dims.
SHAPES = {"even": (4, 3), "uneven": (5, 3), "one_row": (1, 3), "bias": (7,), "conv": (3, 2, 3)}


def make_mesh(topology):
    return init_device_mesh("cpu", topology, mesh_dim_names=("replicate", "shard"))


def sharded(whole: Tensor, mesh) -> Tensor:
    """A DTensor as FSDP2 makes it: rows split over the shard axis, uneven ones padded in storage."""
    spec = distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None)
    leaf = empty_leaf(spec)
    copy_block(leaf, whole)
    return leaf


def random_leaves(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def wholes(tree):
    return {name: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for name, leaf in tree.items()}


def is_plain_number(norm, value):
    return type(norm) is Tensor and norm.shape == () and norm.item() == value


def norms_by_hand(mesh):
    first = sharded(torch.tensor([[3.0, 0.0], [4.0, 0.0], [12.0, 0.0]]), mesh)
    second = sharded(torch.tensor([[84.0, 0.0, 0.0]]), mesh)
    assert second.to_local().numel() == (3 if mesh.get_local_rank("shard") == 0 else 0)
    assert is_plain_number(ps.global_norm({"a": first}), 13.0)
    assert is_plain_number(ps.global_norm({"a": first, "b": second}), 85.0)
    assert is_plain_number(ps.global_norm({"a": first, "b": second}, math.inf), 84.0)
    assert is_plain_number(ps.global_norm({"b": second}), 84.0)
    # A plain tensor is the same on every rank, and counts once; so does a replicated DTensor.
    plain = torch.tensor([84.0])
    assert is_plain_number(ps.global_norm({"a": first, "b": plain}), 85.0)
    replicated = distribute_tensor(plain, mesh, [Replicate(), Replicate()], src_data_rank=None)
    assert is_plain_number(ps.global_norm({"a": first, "b": replicated}), 85.0)
    split_twice = distribute_tensor(torch.full((4, 4), 21.0), mesh, [Shard(0), Shard(1)], src_data_rank=None)
    assert is_plain_number(ps.global_norm({"a": first, "b": split_twice}), 85.0)


def clipped_update(mesh):
    params = {"w": sharded(torch.zeros(3, 2), mesh), "u": sharded(torch.zeros(1, 3), mesh)}
    grads = {"w": sharded(torch.tensor([[3.0, 0.0], [4.0, 0.0], [12.0, 0.0]]), mesh)}
    optimizer = ps.chain(clip=ps.clip_by_global_norm(1.0), sgd=ps.sgd(1.0))
    for inplace in (False, True):
        metrics = {}
        new, _ = optimizer.update(grads, {}, params, step=0, inplace=inplace, metrics=metrics)
        assert is_plain_number(metrics["grad_norm"], 13.0)
        wanted = -torch.tensor([[3.0, 0.0], [4.0, 0.0], [12.0, 0.0]]) / 13
        torch.testing.assert_close(new["w"].full_tensor(), wanted)
        assert new["u"] is params["u"]
        assert bool((params["w"].full_tensor() == 0).all()) != inplace


def norms_and_clipping(topology):
    norms_by_hand(make_mesh(topology))
    clipped_update(make_mesh(topology))


@on_each_topology
def test_norms_and_clipping_are_those_of_the_whole_tensors(topology):
    run_on(topology, norms_and_clipping)


OPTIMIZERS = [
    ps.adamw(0.1, weight_decay=0.1),
    ps.adam(0.1, amsgrad=True),
    ps.sgd(0.1),
    ps.sgd(0.1, momentum=0.9, nesterov=True),
    ps.sgd(0.1, momentum=0.9, dampening=0.3),
]


def same_as_local(topology):
    mesh = make_mesh(topology)
    for optimizer in OPTIMIZERS:
        for implementation in ("fused", "foreach", "for-loop"):
            chosen = dataclasses.replace(optimizer, implementation=implementation)
            # torch's fused CPU kernels round differently in and after a vector loop, and shards end elsewhere.
            tolerance = {"rtol": 1e-6, "atol": 1e-7} if implementation == "fused" else {"rtol": 0, "atol": 0}
            for inplace in (False, True):
                compare_with_local(chosen, mesh, inplace, tolerance)


def compare_with_local(optimizer, mesh, inplace, tolerance):
    local = random_leaves(0)
    params = {name: sharded(leaf, mesh) for name, leaf in local.items()}
    local_state, opt_state = optimizer.init(local), optimizer.init(params)
    for step in range(3):
        local_grads = random_leaves(step + 1)
        if step == 1:
            del local_grads["bias"]
        grads = {name: sharded(leaf, mesh) for name, leaf in local_grads.items()}
        before = wholes(params), wholes(grads)
        local, local_state = optimizer.update(local_grads, local_state, local, step=step)
        new, opt_state = optimizer.update(grads, opt_state, params, step=step, inplace=inplace)
        if not inplace:
            for old, tree in zip(before, (params, grads), strict=True):
                assert all(torch.equal(leaf, old[name]) for name, leaf in wholes(tree).items())
        params = new
    torch.testing.assert_close(wholes(params), wholes(local), **tolerance)
    for name, slots in local_state.items():
        for slot, wanted in slots.items():
            torch.testing.assert_close(wholes(opt_state[name][slot]), wanted, **tolerance)


@on_each_topology
def test_sharded_updates_are_the_local_ones(topology):
    run_on(topology, same_as_local)


def placements_and_padding(topology):
    mesh = make_mesh(topology)
    optimizer = ps.adamw(0.1)
    params = {name: sharded(leaf, mesh) for name, leaf in random_leaves(0).items()}
    grads = {name: sharded(leaf, mesh) for name, leaf in random_leaves(1).items()}
    meta = {name: leaf.to("meta") for name, leaf in params.items()}
    opt_state, abstract = optimizer.init(params)["adamw"], optimizer.init(meta)["adamw"]
    for slot in ("exp_avg", "exp_avg_sq"):
        for name, leaf in params.items():
            for made in (opt_state[slot][name], abstract[slot][name]):
                assert isinstance(made, DTensor)
                assert (made.shape, made.placements, made.device_mesh) == (leaf.shape, leaf.placements, mesh)
                assert made.to_local().shape == leaf.to_local().shape
            assert abstract[slot][name].to_local().is_meta
    for step in opt_state["step"].values():
        assert type(step) is Tensor
        assert step.shape == ()
    assert all(step.is_meta for step in abstract["step"].values())
    new, state = optimizer.update(grads, {"adamw": opt_state}, params, step=0)
    assert all(step == 1 for step in state["adamw"]["step"].values())  # of empty shards too
    for name, leaf in params.items():
        old, made = leaf._local_tensor, new[name]._local_tensor
        assert made.untyped_storage().nbytes() == old.untyped_storage().nbytes()
        assert made.untyped_storage().data_ptr() != old.untyped_storage().data_ptr() or old.numel() == 0
        assert (padded_storage(made) is None) == (padded_storage(old) is None)
        assert isinstance(new[name], DTensor)
        assert new[name].placements == leaf.placements
        assert not new[name].requires_grad
    return sum(padded_storage(leaf._local_tensor) is not None for leaf in params.values())


@on_each_topology
def test_slots_live_where_their_parameters_do_and_padding_stays(topology):
    padded = run_on(topology, placements_and_padding)
    assert any(padded)  # otherwise the test has tested nothing


def unlike_gradients(topology):
    mesh = make_mesh(topology)
    optimizer = ps.adamw(0.1)
    params = {"w": sharded(torch.zeros(4, 3), mesh)}
    whole = torch.ones(4, 3)
    for grad in (whole, distribute_tensor(whole, mesh, [Replicate(), Replicate()], src_data_rank=None)):
        with pytest.raises(ValueError, match=r"gradient of 'w' must be like its parameter: .*placed as .*Shard"):
            optimizer.update({"w": grad}, optimizer.init(params), params, step=0)
    partial = DTensor.from_local(whole, mesh, [Replicate(), torch.distributed.tensor.Partial()], run_check=False)
    with pytest.raises(ValueError, match="reduce partial sums first"):
        ps.global_norm({"w": partial})


def test_a_gradient_placed_otherwise_is_refused():
    run_on((1, 2), unlike_gradients)
