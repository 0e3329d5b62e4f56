"""Digests: everything that makes a state another state changes them, where it lives does not."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from purestep.state import TrainState, check_replicas, key
from purestep.state.digests import digest_of_table, leaf_digests
from purestep.state.sums import CHUNK_BYTES
from tests.ranks import run_ranks


def state_of(**changes) -> TrainState:
    fields = {
        "step": 1,
        "params": {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(2)},
        "buffers": {"n": torch.tensor(3)},
        "opt_state": {"adamw": {"exp_avg": {"a": torch.ones(2, 3)}}},
        "key": key(0),
        "extra": {"note": "x"},
    }
    return TrainState(**(fields | changes))


PARAMS = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(2)}
CHANGES = {
    "step": {"step": 2},
    "key": {"key": key(1)},
    "a value": {"params": {**PARAMS, "a": PARAMS["a"] + torch.eye(2, 3) * 1e-6}},
    "the last bits": {"params": {**PARAMS, "a": PARAMS["a"].nextafter(torch.tensor(9.0))}},
    "a sign of zero": {"params": {**PARAMS, "b": torch.tensor([0.0, -0.0])}},
    "two values exchanged": {"params": {**PARAMS, "a": torch.tensor([[1.0, 0, 2], [3, 4, 5]])}},
    "a shape": {"params": {**PARAMS, "a": torch.arange(6.0).view(3, 2)}},
    "a trailing dim": {"params": {**PARAMS, "b": torch.zeros(2, 1)}},
    "a length of zeros": {"params": {**PARAMS, "b": torch.zeros(3)}},
    "a dtype": {"params": {**PARAMS, "b": torch.zeros(2, dtype=torch.int32)}},
    "a name": {"params": {"a": torch.arange(6.0).view(2, 3), "c": torch.zeros(2)}},
    "names exchanged": {"params": {"b": torch.arange(6.0).view(2, 3), "a": torch.zeros(2)}},
    "a leaf more": {"params": {**PARAMS, "c": torch.empty(0)}},
    "a leaf less": {"params": {"a": torch.arange(6.0).view(2, 3)}},
    "a buffer": {"buffers": {"n": torch.tensor(4)}},
    "a slot's name": {"opt_state": {"adamw": {"exp_avg_sq": {"a": torch.ones(2, 3)}}}},
    "a transform's name": {"opt_state": {"adam": {"exp_avg": {"a": torch.ones(2, 3)}}}},
    "ema": {"ema": {"a": torch.ones(2, 3)}},
    "a plain value": {"extra": {"note": "y"}},
    "a plain value's type": {"extra": {"note": True}},
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_changes_the_digest(name):
    assert state_of(**CHANGES[name]).digest() != state_of().digest()


def test_digests_are_pairwise_different_and_64_hex_digits():
    digests = [state_of(**change).digest() for change in CHANGES.values()]
    assert len(set(digests)) == len(digests)
    assert all(len(bytes.fromhex(d)) == 32 for d in digests)


def test_what_does_not_matter_does_not_change_it():
    state = state_of()
    params = {"b": torch.zeros(2), "a": torch.arange(6.0).view(2, 3)}
    assert state_of(params=params).digest() == state.digest()  # order of names
    strided = torch.arange(6.0).view(2, 3).T.contiguous().T
    assert strided.stride() != state.params["a"].stride()
    assert state_of(params={**params, "a": strided}).digest() == state.digest()  # layout
    assert state_of(params={**params, "a": torch.nn.Parameter(params["a"])}).digest() == state.digest()
    assert digest_of_table(state, leaf_digests(state.leaves())) == state.digest()


def test_integers_and_floats_of_the_same_bits_differ_only_by_dtype():
    bits = torch.tensor([1.5, -2.0])
    leaves = {"f": bits, "i": bits.view(torch.int32).clone()}
    assert len(set(leaf_digests(leaves).values())) == 1
    assert state_of(params={"a": leaves["f"]}).digest() != state_of(params={"a": leaves["i"]}).digest()


LEAVES = {
    "even": lambda: torch.arange(24.0).view(8, 3).sin(),
    "uneven rows": lambda: torch.arange(15.0).view(5, 3).sin(),
    "one row": lambda: torch.arange(3.0).view(1, 3).sin(),
    "bias": lambda: torch.arange(5.0).cos(),
    "deep": lambda: torch.arange(2.0 * 3 * 5 * 2).view(2, 3, 5, 2).sin(),
    "bf16": lambda: torch.arange(15.0).view(5, 3).sin().bfloat16(),
    "fp16": lambda: torch.arange(10.0).view(5, 2).sin().half(),
    "fp64": lambda: torch.arange(10.0, dtype=torch.float64).view(5, 2).sin(),
    "complex64": lambda: torch.polar(torch.ones(6), torch.arange(6.0)).view(3, 2),
    "complex128": lambda: torch.polar(torch.ones(6).double(), torch.arange(6.0).double()).view(3, 2),
    "conjugated": lambda: torch.polar(torch.ones(6).double(), torch.arange(6.0).double()).view(3, 2).conj(),
    "bool": lambda: (torch.arange(10) % 3 == 0).view(5, 2),
    "uint8": lambda: torch.arange(250, 256, dtype=torch.uint8).view(3, 2),
    "int64": lambda: torch.arange(-3, 3).view(3, 2) * 2**60,
    "float8": lambda: torch.arange(6.0).view(3, 2).to(torch.float8_e4m3fn),
    "empty": lambda: torch.empty(0, 3),
    "empty rows": lambda: torch.empty(4, 0),
    "strided": lambda: torch.arange(40.0).view(5, 8).sin()[:, ::2],
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "longer than a chunk": lambda: torch.arange(2.0 * CHUNK_BYTES + 3).sin(),
}
SCALARS = {"0-d": lambda: torch.tensor(2.5), "0-d int": lambda: torch.tensor(7), "0-d bool": lambda: torch.tensor(True)}


@pytest.mark.parametrize("name", LEAVES | SCALARS)
def test_digesting_leaves_the_values_alone(name):
    leaf = (LEAVES | SCALARS)[name]()
    before = leaf.clone()
    sums = leaf_digests({"x": leaf})
    with torch.inference_mode():
        assert leaf_digests({"x": leaf}) == sums == leaf_digests({"x": before})
    assert torch.equal(leaf.view(torch.uint8) if name == "float8" else leaf,
                       before.view(torch.uint8) if name == "float8" else before)  # fmt: skip


@pytest.mark.parametrize("name", [n for n in LEAVES if not n.startswith("empty")])
def test_every_element_counts_and_its_place(name):
    leaf = LEAVES[name]().contiguous().resolve_conj()
    sums = {leaf_digests({"x": leaf})["x"]}
    flat = leaf.view(torch.uint8).flatten()
    for i in {0, 1, flat.numel() // 2, flat.numel() - 1}:
        changed = leaf.clone()
        changed.view(torch.uint8).flatten()[i] ^= 1
        sums.add(leaf_digests({"x": changed})["x"])
    assert len(sums) == len({0, 1, flat.numel() // 2, flat.numel() - 1}) + 1


def test_sums_of_simple_families_do_not_collide():
    """Small integers at small places are what weak mixing would confuse: 128 tensors of 6 elements from {0, 1, 2}."""
    tensors = torch.cartesian_prod(*[torch.arange(3)] * 6)
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.int64):
        sums = {leaf_digests({"x": t.to(dtype)})["x"] for t in tensors}
        assert len(sums) == len(tensors)


# --- on ranks --------------------------------------------------------------------------------------------------------


def place(leaf: Tensor, mesh, placements) -> Tensor:
    """`leaf` as a DTensor, cut by hand as `torch.chunk` cuts: one communication-free path for every dtype."""
    from torch.distributed.tensor import DTensor

    local = leaf
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            chunks = list(local.chunk(mesh.size(axis), placement.dim))
            empty = chunks[0].narrow(placement.dim, 0, 0)
            chunks += [empty] * (mesh.size(axis) - len(chunks))
            local = chunks[mesh.get_coordinate()[axis]]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=leaf.shape, stride=leaf.stride())


def _sharded_and_whole() -> tuple[dict[str, dict], str]:
    """{layout: {leaf: (sum when placed so, sum of the whole)}}, and the digest of a sharded state."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    dist.init_process_group("gloo")
    world = dist.get_world_size()
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    layouts = {"Shard(0)": (flat, [Shard(0)]), "Replicate": (flat, [Replicate()]), "Shard(1)": (flat, [Shard(1)])}
    if world == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        layouts |= {
            "HSDP": (grid, [Replicate(), Shard(0)]),
            "Shard(0) twice": (grid, [Shard(0), Shard(0)]),
            "Shard(0), Shard(1)": (grid, [Shard(0), Shard(1)]),
            "Replicate twice": (grid, [Replicate(), Replicate()]),
        }
    sums = {}
    for layout, (mesh, placements) in layouts.items():
        dims = max((p.dim for p in placements if p.is_shard()), default=-1) + 1
        leaves = {name: make() for name, make in (LEAVES | SCALARS).items() if make().ndim >= dims}
        whole = leaf_digests(leaves)
        placed = leaf_digests({name: place(leaf, mesh, placements) for name, leaf in leaves.items()})
        sums[layout] = {name: (placed[name], whole[name]) for name in leaves}
    state = state_of(params={name: make() for name, make in LEAVES.items()})
    sharded = state.replace(params={name: place(leaf, flat, [Shard(0)]) for name, leaf in state.params.items()})
    assert sharded.digest() == state.digest()
    return sums, sharded.digest()


@pytest.mark.parametrize("world_size", [2, 4])
def test_sharded_equals_whole(world_size):
    results = run_ranks(_sharded_and_whole, world_size)
    for layout, sums in results[0][0].items():
        for name, (placed, whole) in sums.items():
            assert placed == whole, (layout, name)
    assert all(result == results[0] for result in results)
    assert results[0][1] == state_of(params={name: make() for name, make in LEAVES.items()}).digest()


def _partial_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    dist.init_process_group("gloo")
    leaf = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Partial()], run_check=False)
    with pytest.raises(ValueError, match="replicated or sharded leaves, got a DTensor placed as Partial"):
        leaf_digests({"x": leaf})


def test_partial_sums_are_refused():
    run_ranks(_partial_is_refused, 1)


MOVES = {  # what one rank does to its replica: (what, rank), and the leaf that must be named
    "nothing": (None, 0, None),
    "a plain leaf": ("plain", 1, "params/plain"),
    "a sharded leaf, first shard, second replica": ("sharded", 2, "params/sharded"),
    "a sharded leaf, last shard, first replica": ("sharded", 1, "params/sharded"),
    "a replicated DTensor": ("replicated", 3, "params/replicated"),
    "a buffer": ("buffer", 0, "buffers/buffer"),
    "its dtype": ("dtype", 2, "buffers/buffer"),
    "a leaf more": ("more", 2, "extra/more"),
    "a leaf more on the first rank": ("more", 0, "extra/more"),
    "a plain value": ("note", 3, "extra/note"),
    "the step": ("step", 1, "step"),
    "the key": ("key", 1, "key"),
}


def _check_after_each_move() -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {name: _answer(_moved(grid, what, rank == dist.get_rank())) for name, (what, rank, _) in MOVES.items()}


def _moved(grid, what: str | None, here: bool) -> TrainState:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    sharded = place(torch.arange(15.0).view(5, 3), grid, [Replicate(), Shard(0)])
    sharded = DTensor(sharded._local_tensor.clone(), sharded._spec, requires_grad=False)
    params = {"plain": torch.ones(3), "replicated": place(torch.ones(2), grid, [Replicate()] * 2), "sharded": sharded}
    state = state_of(params=params, buffers={"buffer": torch.tensor([4.0])})
    if not here or what is None:
        return state
    if what in ("plain", "sharded", "replicated"):
        getattr(params[what], "_local_tensor", params[what]).view(-1)[0] += 1e-3
    if what == "buffer":
        state.buffers["buffer"][0] += 1e-3
    changes = {
        "dtype": {"buffers": {"buffer": torch.tensor([4.0]).view(torch.int32)}},
        "more": {"extra": {**state.extra, "more": torch.ones(1)}},
        "note": {"extra": {"note": "y"}},
        "step": {"step": 2},
        "key": {"key": key(1)},
    }
    return state.replace(**changes.get(what, {}))


def _answer(state: TrainState) -> str:
    try:
        check_replicas(state)
    except RuntimeError as error:
        return str(error)
    return "equal"


def test_a_replica_moved_by_hand_is_noticed_on_every_rank():
    answers = run_ranks(_check_after_each_move, 4)
    assert all(answer == answers[0] for answer in answers)
    for name, (_, _, leaf) in MOVES.items():
        said = answers[0][name]
        if leaf is None:
            assert said == "equal"
        else:
            assert said.startswith(f"replicas differ between ranks in '{leaf}': states must be made from one key"), name


def test_outside_a_process_group_there_is_nothing_to_compare():
    assert check_replicas(state_of()) is None
