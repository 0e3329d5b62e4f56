"""Initial values: every convention modules have for them, on real and meta devices, on one rank and on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import purestep as ps
from tests.ranks import run_on
from tests.sharding.models import Rotary, Scale, Tied, on_meta
from tests.toys import error_of, leaf_table, runtime_on, whole

SGD = ps.sgd(0.1)


def initial(model: nn.Module, seed: int = 0, **shard: Any) -> ps.TrainState:
    return ps.init(ps.shard(model, **shard), SGD, ps.key(seed))


class Recorder(nn.Module):
    """A layer whose reset_parameters draws, and writes by every road there is."""

    def __init__(self) -> None:
        super().__init__()
        self.in_place = nn.Parameter(torch.empty(3))
        self.through_data = nn.Parameter(torch.empty(3))
        self.assigned = nn.Parameter(torch.empty(3))
        self.register_buffer("buffer", torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.in_place)
        self.through_data.data.uniform_()
        self.assigned = nn.Parameter(torch.randn(3, device=self.assigned.device))
        self.buffer.fill_(5.0)


@pytest.mark.parametrize("build", [Recorder, lambda: on_meta(Recorder)], ids=["real", "meta"])
def test_whatever_reset_parameters_writes_is_found(build):
    torch.manual_seed(1)
    state = initial(build())
    assert state.buffers["buffer"].tolist() == [5, 5, 5]
    assert state.digest() == initial(on_meta(Recorder)).digest()
    assert all(leaf.isfinite().all() for leaf in state.params.values())
    assert len({tuple(leaf.tolist()) for leaf in state.params.values()}) == 3
    assert initial(build(), seed=1).digest() != state.digest()


def test_init_leaves_the_module_and_the_ambient_generator_alone():
    model = Recorder()
    module = ps.shard(model)
    before = {name: (id(leaf), leaf.clone()) for name, leaf in model.state_dict(keep_vars=True).items()}
    ambient = torch.get_rng_state()
    state = ps.init(module, SGD, ps.key(0))
    assert torch.equal(ambient, torch.get_rng_state())
    for name, leaf in model.state_dict(keep_vars=True).items():
        assert id(leaf) == before[name][0]
        assert torch.equal(leaf, before[name][1])
        assert leaf is not state.params.get(name)


def test_two_layers_of_one_kind_get_different_values_and_a_new_layer_moves_no_other():
    pair = initial(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    triple = initial(nn.ModuleDict({"new": nn.Linear(5, 5), "a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    assert not torch.equal(pair.params["a.weight"], pair.params["b.weight"])
    assert all(torch.equal(triple.params[name], leaf) for name, leaf in pair.params.items())


class Conventional(nn.Module):
    """The convention of nanoGPT and transformers: the root initializes every module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(4, 3), nn.LayerNorm(3), nn.Linear(3, 4)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=100.0, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.bias, 7.0)


@pytest.mark.parametrize("build", [Conventional, lambda: on_meta(Conventional)], ids=["real", "meta"])
def test_the_roots_init_weights_has_the_last_word(build):
    params = initial(build()).params
    assert params["head.bias"].tolist() == [7] * 4
    assert (params["head.weight"] - 100).abs().max() < 1
    assert (params["embed.weight"] - 100).abs().max() < 1
    assert params["norm.weight"].tolist() == [1] * 3
    assert params["embed.weight"].std() > 0


@pytest.mark.parametrize(
    "build", [lambda: nn.MultiheadAttention(4, 2), lambda: nn.Transformer(4, 2, 1, 1, 4, batch_first=True)]
)
def test_torchs_private_reset_parameters_is_found(build):
    model = build()
    state, meta = initial(model), initial(on_meta(build))
    assert state.digest() == meta.digest()
    projections = [leaf for name, leaf in state.params.items() if "in_proj_weight" in name]
    assert projections
    for leaf in projections:
        assert leaf.std() > 0.1
    assert all(leaf.eq(0).all() for name, leaf in state.params.items() if "in_proj_bias" in name)


@pytest.mark.parametrize("build", [Tied, lambda: on_meta(Tied)], ids=["real", "meta"])
def test_a_tied_weight_is_one_leaf_with_the_values_of_its_first_place(build):
    model = build()
    if model.embed.weight.is_meta:  # to be tied again, as a constructor under torch.device("meta") does it
        assert model.head.weight is model.embed.weight
    state = initial(model)
    assert list(state.params) == ["embed.weight"]
    alone = initial(nn.ModuleDict({"embed": nn.Embedding(3, 2)}))
    assert torch.equal(state.params["embed.weight"], alone.params["embed.weight"])


def test_what_only_the_constructor_sets_is_kept():
    state = initial(Scale())
    assert state.params["scale"].tolist() == [1] * 5
    assert state.buffers["mask"].tolist() == [0, 0, 0, 0, -torch.inf]
    state.params["scale"].zero_()
    assert initial(Scale()).params["scale"].tolist() == [1] * 5
    module = ps.shard(Scale())
    ps.init(module, SGD, ps.key(0)).params["scale"].zero_()
    assert ps.init(module, SGD, ps.key(0)).params["scale"].tolist() == [1] * 5


def test_a_meta_leaf_that_nothing_sets_is_an_error_that_names_it():
    model = on_meta(Scale)
    del model.table
    with pytest.raises(ValueError, match=r"nothing initializes 'scale': its module the root \(Scale\).*meta device"):
        initial(model)
    with pytest.raises(ValueError, match=r"nothing initializes 'inner.table': its module inner \(Scale\)"):
        ps.shard(nn.ModuleDict({"inner": on_meta(Scale)}))


def test_non_persistent_buffers_on_meta_are_computed_by_reset_parameters():
    real, meta = ps.shard(Rotary()), ps.shard(on_meta(Rotary))
    state = ps.init(meta, SGD, ps.key(0))
    assert list(state.buffers) == []
    x = torch.ones(2, 4)
    out = meta.apply(state.params, state.buffers, x)[0]
    assert torch.equal(out, real.apply(state.params, state.buffers, x)[0])
    assert torch.equal(meta.module.frequencies, Rotary().frequencies)


def test_an_abstract_state_has_the_leaves_of_the_state():
    for build in (Scale, Conventional, Tied):
        module = ps.shard(build())
        optimizer = ps.adamw(0.1)
        state, abstract = ps.init(module, optimizer, ps.key(0)), ps.abstract_state(module, optimizer)
        table = {name: (leaf.shape, leaf.dtype) for name, leaf in state.leaves().items()}
        assert {name: (leaf.shape, leaf.dtype) for name, leaf in abstract.leaves().items()} == table
        assert all(leaf.is_meta for leaf in abstract.leaves().values())


def test_frozen_parameters_have_values_but_no_optimizer_state():
    model = Conventional()
    model.embed.requires_grad_(False)
    state = ps.init(ps.shard(model), ps.adamw(0.1), ps.key(0))
    assert "embed.weight" in state.params
    assert "embed.weight" not in state.opt_state["adamw"]["exp_avg"]


def test_a_seed_is_not_a_key():
    with pytest.raises(TypeError, match=r"ps.init takes a Key, got int; make one with ps.key\(seed\)"):
        ps.init(ps.shard(nn.Linear(1, 1)), SGD, 0)  # type: ignore[arg-type]


# On ranks.


class Noisy(nn.Module):
    """A parameter that the constructor draws, without a reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Parameter(torch.randn(4))
        self.linear = nn.Linear(4, 4)


class NoisyConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("features", torch.randn(4), persistent=False)
        self.linear = nn.Linear(4, 4)


def _conventions(topology: tuple[int, int]) -> dict[str, Any]:
    with runtime_on(topology) as runtime:
        digests = {}
        for build in (Recorder, Conventional, Tied, Rotary, lambda: nn.MultiheadAttention(4, 2)):
            for model in (build(), on_meta(build)):
                digests.setdefault(type(model).__name__, set()).add(initial(model, runtime=runtime).digest())
        return {
            "digests": digests,
            "kept": _kept(runtime),
            "noise": _noise(runtime),
        }


def _kept(runtime: ps.Runtime) -> list[Any]:
    """What the constructor set, after a state of this module was trained in place."""
    module = ps.shard(Scale(), runtime=runtime)
    start = ps.init(module, SGD, ps.key(0))
    first = leaf_table(start)
    step = ps.train_step(module, lambda model, x, key: model(x)[:, 0].sum(), SGD, donate=True)
    trained, _ = step(step(start, torch.ones(2, 5))[0], torch.ones(2, 5))
    again = leaf_table(ps.init(module, SGD, ps.key(0)))
    return [
        whole(trained.params["scale"]).tolist() != [1] * 5,
        all(torch.equal(leaf, first[name]) for name, leaf in again.items()),
        trained.buffers["mask"].tolist(),
    ]


def _noise(runtime: ps.Runtime) -> dict[str, Any]:
    results = {}
    for same in (True, False):
        torch.manual_seed(0 if same else runtime.rank)
        for build in (Noisy, NoisyConstant):
            model = build()
            results[f"{build.__name__}, {'one seed' if same else 'seeds'}"] = error_of(initial, model, runtime=runtime)
    return results


@pytest.mark.parametrize("topology", [(2, 1), (1, 2)], ids=["ddp", "fsdp2"])
def test_all_conventions_on_ranks(topology):
    with ps.start(accelerator=ps.AcceleratorConfig(device="cpu")):
        expected = {
            type(model).__name__: {initial(model).digest()}
            for model in (Recorder(), Conventional(), Tied(), Rotary(), nn.MultiheadAttention(4, 2))
        }
    for results in run_on(topology, _conventions):
        assert results["digests"] == expected
        assert results["kept"] == [True, True, [0, 0, 0, 0, -torch.inf]]
        for name, leaf in (("Noisy", "noise"), ("NoisyConstant", "features")):
            assert results["noise"][f"{name}, one seed"] is None
            kind, message = results["noise"][f"{name}, seeds"]
            assert kind == "ValueError"
            assert f"'{leaf}' was set by the constructor to different values on different ranks" in message


WIDTH, DEPTH = 512, 40
BLOCK = 4 * WIDTH**2  # bytes


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))


class _LiveBytes(TorchDispatchMode):
    """The most bytes in storages, made since the mode was entered, that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if type(tensor) is Tensor and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage)
        self.storages = {key: storage for key, storage in self.storages.items() if not storage.expired()}
        alive = (torch.UntypedStorage._new_with_weak_ptr(storage.cdata) for storage in self.storages.values())
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive if storage is not None))
        return out


def _peak_memory(topology: tuple[int, int]) -> tuple[int, int]:
    with runtime_on(topology) as runtime, _LiveBytes() as live:
        module = ps.shard(on_meta(_Blocks), ps.ShardingSpec(units=("blocks.*",)), runtime)
        state = ps.init(module, SGD, ps.key(0))
        return live.peak, sum(leaf._local_tensor.untyped_storage().nbytes() for leaf in state.params.values())


def test_a_meta_model_needs_its_shard_and_one_block():
    for peak, held in run_on((1, 2), _peak_memory):
        assert held == DEPTH * BLOCK // 2
        assert held + BLOCK <= peak < held + 1.25 * BLOCK
