"""from_torch on shards: state in another dtype than its parameter, and gathered against elementwise updates."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import purestep as ps
from tests.distributed.test_properties_ranks import placed, wholes
from tests.functional.properties import differences, flat, gradients, random_leaves
from tests.ranks import run_on
from tests.toys import Net, leaf_table, net_batch, net_loss, rank_slice, runtime_on


class WithMasters(torch.optim.Optimizer):
    """SGD on fp32 copies of 16-bit parameters, as mixed-precision optimizers keep them."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                master = self.state[p].setdefault("master", p.float())
                master.add_(p.grad.float(), alpha=-self.param_groups[0]["lr"])
                p.copy_(master)


def steps(optimizer, params, mesh):
    opt_state = optimizer.init(params)
    for step in range(4):
        grads = gradients(step, torch.bfloat16)
        grads = placed(grads, mesh) if mesh else grads
        params, opt_state = optimizer.update(grads, opt_state, params, step=step)
    return params, opt_state


def masters_on_shards(topology, directory):
    mesh = init_device_mesh("cpu", topology, mesh_dim_names=("replicate", "shard"))
    local = random_leaves(0, torch.bfloat16)
    wanted = steps(ps.from_torch(WithMasters), local, None)
    for elementwise in (True, False):
        optimizer = ps.from_torch(WithMasters, elementwise=elementwise)
        params, opt_state = steps(optimizer, placed(local, mesh), mesh)
        assert not differences(wholes(params), flat(wanted[0]))
        assert not differences(wholes(opt_state), flat(wanted[1]))
        for name, master in opt_state["WithMasters"]["master"].items():
            assert master.dtype == torch.float32
            assert isinstance(master, DTensor) == bool(local[name].ndim)
            if local[name].ndim:
                assert master.placements == params[name].placements
                assert master._spec.tensor_meta.dtype == torch.float32
    state = ps.TrainState(step=4, params=params, buffers={}, opt_state=opt_state, key=ps.key(0))
    path = ps.save(f"{directory}/masters", state)
    meta = {name: leaf.to("meta") for name, leaf in params.items()}
    restored = ps.restore(path, state.replace(params=meta, opt_state=optimizer.init(meta)))
    assert not differences(wholes(restored.opt_state), flat(wanted[1]))
    return restored.digest() == state.digest()


def test_state_in_another_dtype_is_sharded_like_its_parameter(tmp_path):
    assert run_on((1, 2), masters_on_shards, str(tmp_path)) == [True, True]


def trained(topology):
    """Digest of the first state, whether the abstract state names its leaves, and the leaves after three steps."""
    companion = ps.from_torch(torch.optim.NAdam, lr=0.01, foreach=True)
    optimizer = ps.chain(clip=ps.clip_by_global_norm(1.0), muon=ps.muon(0.02, owns=("blocks.**",), companion=companion))
    with runtime_on(topology) as runtime:
        module = ps.shard(Net(), runtime=runtime)
        state = ps.init(module, optimizer, ps.key(0))
        first = state.digest()
        same_leaves = list(ps.abstract_state(module, optimizer).leaves()) == list(state.leaves())
        step = ps.train_step(module, net_loss, optimizer, donate=True)
        for number in range(3):
            state, _ = step(state, rank_slice(runtime, net_batch(number)))
        return first, same_leaves, {name: leaf.tolist() for name, leaf in leaf_table(state).items()}


def test_muon_with_a_lifted_companion_trains_alike_in_every_topology():
    ((first, _, wanted),) = run_on((1, 1), trained)
    assert wanted["opt_state/muon/NAdam/step/head.weight"] == 3.0
    for topology in ((2, 1), (1, 2)):
        for digest, same_leaves, leaves in run_on(topology, trained):
            assert digest == first
            assert same_leaves
            # The Newton-Schulz iterations are in bf16, which magnifies what a reduced gradient differs by.
            assert leaves.keys() == wanted.keys()
            for name, values in leaves.items():
                torch.testing.assert_close(torch.tensor(values), torch.tensor(wanted[name]), rtol=1e-2, atol=1e-3)
