"""What every optimizer and transform promises on shards and replicas, for each of `properties.CASES`."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import purestep as ps
from purestep.state.placement import copy_block, empty_leaf, local_tensor
from purestep.state.train_state import padded_storage
from tests.functional.properties import (
    CASES,
    ROUNDED,
    advance,
    differences,
    flat,
    gradients,
    optimizer_of,
    random_leaves,
)
from tests.ranks import run_on

TOPOLOGIES = {"ddp": (2, 1), "fsdp2": (1, 2)}


def placed(tree: dict[str, Tensor], mesh) -> dict[str, Tensor]:
    """The leaves as a module on `mesh` has them: plain on replicas, rows split over shards (0-d ones whole)."""
    if mesh.size(1) == 1:
        return dict(tree)
    return {name: sharded(leaf, mesh) if leaf.ndim else leaf for name, leaf in tree.items()}


def sharded(whole: Tensor, mesh) -> Tensor:
    """As FSDP2 does it: uneven shards are padded in storage."""
    leaf = empty_leaf(distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None))
    copy_block(leaf, whole)
    return leaf


def wholes(tree):
    leaves = flat(tree)
    return {path: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for path, leaf in leaves.items()}


def geometry(leaf):
    local = local_tensor(leaf)
    padded = local.device.type != "meta" and padded_storage(local) is not None
    return leaf.shape, leaf.dtype, getattr(leaf, "placements", None), tuple(local.shape), padded


def check(case, mesh):
    """What is wrong with the case on this mesh."""
    optimizer = optimizer_of(case)
    local = random_leaves(0)
    local_state = optimizer.init(local)
    params = placed(local, mesh)
    opt_state = optimizer.init(params)
    problems = [f"init: {text}" for text in differences(wholes(opt_state), flat(local_state))]
    abstract = flat(optimizer.init({name: leaf.to("meta") for name, leaf in params.items()}))
    kept = {path: geometry(leaf)[:4] for path, leaf in flat(opt_state).items()}
    if {path: geometry(leaf)[:4] for path, leaf in abstract.items()} != kept or list(abstract) != list(kept):
        problems.append("abstract init: other leaves, or placed otherwise")
    before = {name: geometry(leaf) for name, leaf in params.items()}
    donated, donated_state = copy_of(params), copy_of(opt_state)
    for step in range(4):
        grads, old = placed(gradients(step), mesh), copy_of({"params": params, "state": opt_state})
        local, local_state = optimizer.update(gradients(step), local_state, local, step=step)
        new, new_state = optimizer.update(grads, opt_state, params, step=step)
        for name, unchanged in (("params", params), ("state", opt_state), ("grads", grads)):
            was = placed(gradients(step), mesh) if name == "grads" else old[name]
            problems += [f"step {step} changed {name}: {text}" for text in differences(wholes(unchanged), wholes(was))]
        donated, donated_state = optimizer.update(
            placed(gradients(step), mesh), donated_state, donated, step=step, inplace=True
        )
        both = {"params": donated, "state": donated_state}, {"params": new, "state": new_state}
        problems += [f"step {step} donated: {text}" for text in differences(*map(wholes, both))]
        params, opt_state = new, new_state
    if {name: geometry(leaf) for name, leaf in params.items()} != before:
        problems.append("dtype, placement, shard or padding of a parameter changed")
    if {path: geometry(leaf)[:4] for path, leaf in flat(opt_state).items()} != kept:
        problems.append("dtype, placement or shard of a slot changed")
    got, wanted = wholes({"params": params, "state": opt_state}), flat({"params": local, "state": local_state})
    if case not in ROUNDED:
        problems += [f"local and sharded differ: {text}" for text in differences(got, wanted)]
    else:
        try:
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
        except AssertionError as error:
            problems.append(f"local and sharded differ by more than rounding: {error}")
    return [f"{case}: {problem}" for problem in problems]


def copy_of(tree):
    """A tree of leaves in storage of its own, padding kept."""
    from purestep.functional.shards import copies_of

    return {key: copy_of(value) if isinstance(value, dict) else copies_of([value])[0] for key, value in tree.items()}


def check_all(topology, cases):
    mesh = init_device_mesh("cpu", topology, mesh_dim_names=("replicate", "shard"))
    return [problem for case in cases for problem in check(case, mesh)]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_case_is_on_ranks_what_it_is_in_one_process(topology):
    for problems in run_on(TOPOLOGIES[topology], check_all, list(CASES), timeout=240):
        assert not problems, "\n".join(problems)


def resumed(topology, cases, directory):
    mesh = init_device_mesh("cpu", topology, mesh_dim_names=("replicate", "shard"))
    problems = []
    for number, case in enumerate(cases):
        optimizer, params = optimizer_of(case), placed(random_leaves(0), mesh)
        params, opt_state = steps(optimizer, params, optimizer.init(params), range(2), mesh)
        state = ps.TrainState(step=2, params=params, buffers={}, opt_state=opt_state, key=ps.key(0))
        path = ps.save(f"{directory}/{topology[1]}-{number}", state)
        meta = {name: leaf.to("meta") for name, leaf in params.items()}
        restored = ps.restore(path, state.replace(params=meta, opt_state=optimizer.init(meta)))
        wanted = steps(optimizer, params, opt_state, range(2, 4), mesh)
        got = steps(optimizer, restored.params, restored.opt_state, range(2, 4), mesh)
        for ours, theirs in zip(got, wanted, strict=True):
            problems += [f"{case}: {text}" for text in differences(wholes(ours), wholes(theirs))]
        # On another topology: what one process makes of the same checkpoint.
        alone = {name: leaf.to("meta") for name, leaf in random_leaves(0).items()}
        plain = ps.restore(path, state.replace(params=alone, opt_state=optimizer.init(alone)))
        ours, _ = advance(optimizer, plain.params, plain.opt_state, range(2, 4))
        for name, leaf in ours.items():
            torch.testing.assert_close(leaf, wholes(wanted[0])[f"/{name}"], rtol=1e-5, atol=1e-6)
    return problems


def steps(optimizer, params, opt_state, numbers, mesh):
    for step in numbers:
        params, opt_state = optimizer.update(placed(gradients(step), mesh), opt_state, params, step=step)
    return params, opt_state


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_case_resumes_on_ranks_and_in_one_process(topology, tmp_path):
    for problems in run_on(TOPOLOGIES[topology], resumed, list(CASES), str(tmp_path), timeout=240):
        assert not problems, "\n".join(problems)
