"""Modules as pure functions: what `apply` computes with, what it leaves alone, and what stands after an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

import purestep as ps
from tests.ranks import run_on
from tests.sharding.models import Scale, Stack, Tied, on_meta
from tests.toys import error_of, runtime_on, whole

SGD = ps.sgd(0.1)


def module_and_state(model: nn.Module, **shard: Any) -> tuple[ps.PureModule, ps.TrainState]:
    module = ps.shard(model, **shard)
    return module, ps.init(module, SGD, ps.key(0))


class Noisy(nn.Module):
    """BatchNorm, dropout, and more than one way in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout, self.linear = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)

    def features(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.dropout(self.norm(x)) * scale

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.linear(self.features(x, scale=scale))


X = torch.arange(12.0).view(3, 4)


def test_apply_is_functional_call_that_returns_the_buffers():
    module, state = module_and_state(Noisy())
    for train in (False, True):
        torch.manual_seed(0)
        out, buffers = module.apply(state.params, state.buffers, X, scale=2.0, train=train)
        reference = Noisy().train(train)
        written = {name: buffer.clone() for name, buffer in state.buffers.items()}
        torch.manual_seed(0)
        expected = functional_call(reference, ({**state.params}, written), (X, 2.0))
        assert torch.equal(out, expected)
        assert buffers.keys() == state.buffers.keys()
        assert all(torch.equal(buffers[name], written[name]) for name in written)


def test_apply_writes_nothing_it_is_given_and_nothing_into_the_module():
    model = Noisy()
    module, state = module_and_state(model)
    before = state.digest()
    own = {name: (id(leaf), leaf.clone()) for name, leaf in model.state_dict(keep_vars=True).items()}
    new = module.apply(state.params, state.buffers, X, train=True)[1]
    assert state.digest() == before
    assert int(new["norm.num_batches_tracked"]) == 1
    assert int(state.buffers["norm.num_batches_tracked"]) == 0
    for name, leaf in model.state_dict(keep_vars=True).items():
        assert id(leaf) == own[name][0]
        assert torch.equal(leaf, own[name][1])


def test_the_mode_is_the_one_asked_for_else_the_one_it_had_when_it_was_sharded():
    for model, default in ((Noisy().train(), True), (Noisy().eval(), False)):
        module, state = module_and_state(model)
        for train in (None, True, False, None):
            new = module.apply(state.params, state.buffers, X, train=train)[1]
            in_train = default if train is None else train
            assert int(new["norm.num_batches_tracked"]) == in_train


def test_modules_frozen_into_eval_mode_stay_in_it():
    model = Noisy()
    model.norm.eval()
    module, state = module_and_state(model)
    new = module.apply(state.params, state.buffers, X, train=True)[1]
    assert int(new["norm.num_batches_tracked"]) == 0
    out, again = (module.apply(state.params, state.buffers, X, train=True, key=ps.key(k))[0] for k in (0, 1))
    assert not torch.equal(out, again)  # its dropout is not frozen
    assert not model.norm.training
    assert model.dropout.training


def test_a_key_makes_a_call_reproducible_and_leaves_the_ambient_generator_alone():
    module, state = module_and_state(Noisy())
    ambient = torch.get_rng_state()
    one, other, again = (module.apply(state.params, state.buffers, X, train=True, key=ps.key(k))[0] for k in (0, 1, 0))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(ambient, torch.get_rng_state())
    torch.manual_seed(5)
    assert torch.equal(one, module.apply(state.params, state.buffers, X, train=True, key=ps.key(0))[0])
    drawn = module.apply(state.params, state.buffers, X, train=True)[0]
    torch.manual_seed(5)
    assert torch.equal(drawn, module.apply(state.params, state.buffers, X, train=True)[0])


def test_a_method_of_the_model():
    module, state = module_and_state(Noisy())
    out, _ = module.apply(state.params, state.buffers, X, scale=3.0, method="features", train=False)
    assert torch.equal(out, module.apply(state.params, state.buffers, X, method="features", train=False)[0] * 3)
    for method in ("forward", None):
        assert module.apply(state.params, state.buffers, X, method=method, train=False)[0].shape == (3, 4)
    with pytest.raises(ValueError, match="method 'feature' is not a method of the model"):
        module.apply(state.params, state.buffers, X, method="feature")


def test_torch_func_differentiates_and_maps_a_local_module():
    module, state = module_and_state(nn.Linear(4, 1))

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return module.apply(params, {}, x)[0].square().sum()

    params = dict(state.params)
    expected = {name: leaf.detach().clone().requires_grad_() for name, leaf in params.items()}
    functional_call(nn.Linear(4, 1), expected, (X,)).square().sum().backward()
    found = grad(loss)(params, X)
    assert all(torch.allclose(found[name], leaf.grad) for name, leaf in expected.items())
    each = vmap(grad(loss), in_dims=(None, 0))(params, X)
    assert torch.allclose(each["weight"].sum(0), found["weight"])
    ensemble = {name: torch.stack([leaf, 2 * leaf]) for name, leaf in params.items()}
    out = vmap(lambda p: module.apply(p, {}, X)[0])(ensemble)
    assert torch.allclose(out[1], 2 * out[0])
    curvature = grad(lambda p: grad(loss)(p, X)["weight"].sum())(params)
    assert curvature["weight"].abs().sum() > 0


def test_torch_func_ensembles_of_buffers():
    module = ps.shard(nn.BatchNorm1d(4))
    params, buffers = stack_module_state([nn.BatchNorm1d(4), nn.BatchNorm1d(4)])
    new = vmap(lambda p, b: module.apply(p, b, X, train=True)[1])(params, buffers)
    assert new["running_mean"].shape == (2, 4)
    assert buffers["running_mean"].eq(0).all()


def test_a_tied_weight_is_bound_at_both_places():
    module, state = module_and_state(Tied())
    out, _ = module.apply({"embed.weight": torch.ones(3, 2)}, {}, torch.arange(3))
    assert out.tolist() == [[2.0] * 3] * 3
    assert list(state.params) == ["embed.weight"]


class Caching(nn.Module):
    """A forward that writes a non-persistent buffer: by assignment, or in place."""

    def __init__(self, *, assign: bool):
        super().__init__()
        self.assign = assign
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.cache = self.cache + x if self.assign else self.cache.add_(x)
        return self.cache * x


@pytest.mark.parametrize("assign", [True, False], ids=["assigned", "in place"])
def test_a_forward_that_writes_a_non_persistent_buffer_is_an_error(assign):
    module = ps.shard(Caching(assign=assign))
    with pytest.raises(RuntimeError, match=r"wrote the non-persistent buffer 'cache'.*persistent=True"):
        module.apply({}, {}, torch.ones(2), train=True)
    out, _ = module.apply({}, {}, torch.ones(2), train=False)
    if assign:  # what was put in its place is taken out again
        assert out.tolist() == [0, 0]


MISFITS = [  # params, buffers, message
    ({"weight": torch.ones(3, 2)}, {}, "params does not fit the module: missing bias"),
    ({"weight": torch.ones(3, 2), "bias": torch.ones(3), "gain": torch.ones(1)}, {}, "unknown gain"),
    (
        {"weight": torch.ones(3, 2), "bias": torch.ones(1)},
        {},
        r"params\['bias'\] does.*got shape \(1,\), expected \(3,\)",
    ),
    ({"weight": torch.ones(3, 2), "bias": torch.ones(3)}, {"mean": torch.ones(1)}, "buffers does.*unknown mean"),
]


@pytest.mark.parametrize(("params", "buffers", "message"), MISFITS)
def test_what_does_not_fit_is_refused_by_name(params, buffers, message):
    module = ps.shard(nn.Linear(2, 3))
    with pytest.raises(ValueError, match=message):
        module.apply(params, buffers, torch.ones(1, 2))


def test_a_buffer_of_another_shape_is_refused():
    module, state = module_and_state(Noisy())
    with pytest.raises(ValueError, match=r"buffers\['norm.running_mean'\] does not fit the module: got shape \(1,\)"):
        module.apply(state.params, {**state.buffers, "norm.running_mean": torch.zeros(1)}, X)


def test_a_call_inside_a_loss_does_not_change_the_mode_of_the_loss():
    """A target network, say: evaluated in the middle of a training step, on the same module."""
    module, state = module_and_state(Noisy())
    modes = []

    def loss(model: nn.Module, x: Tensor, key: ps.Key) -> Tensor:
        target, _ = module.apply(state.params, state.buffers, x, train=False)
        modes.append((model.training, model.dropout.training))
        return (model(x) - target).square().mean()

    ps.train_step(module, loss, SGD)(state, X)
    assert modes == [(True, True)]


def test_only_plain_modules_are_taken():
    with pytest.raises(TypeError, match=r"ps\.shard takes an nn\.Module, got Tensor"):
        ps.shard(torch.ones(1))  # type: ignore[arg-type]
    wrapped = nn.Sequential(nn.DataParallel(nn.Linear(1, 1)))
    with pytest.raises(ValueError, match="0 is a DataParallel already, and only a plain module"):
        ps.shard(wrapped)


# On ranks: errors, and what stands after them.

SPEC = ps.ShardingSpec(units=("Layer",), forward_methods=("encode",))
ROWS = torch.arange(12.0).view(4, 3) / 12


class Fault(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        raise RuntimeError("planted in backward")


class Faulty(Stack):
    """Fails where it is told to."""

    where = ""

    def encode(self, x: Tensor) -> Tensor:
        x = super().encode(x)
        if self.where == "between blocks":
            raise RuntimeError("planted between blocks")
        return Fault.apply(x) if self.where == "backward" else x


def _errors(topology: tuple[int, int]) -> dict[str, Any]:
    """After an error at any place, the module computes what a fresh one computes."""
    with runtime_on(topology) as runtime:
        results: dict[str, Any] = {}
        x = ROWS + runtime.rank

        def gradient(module: ps.PureModule, state: ps.TrainState, where: str = "", microbatches: int = 2) -> Any:
            calls = iter(range(microbatches))

            def loss(model: Faulty, batch: Tensor, key: ps.Key) -> Tensor:
                call = next(calls)
                if where == "before the model" or (where == "second microbatch" and call == 1):
                    raise RuntimeError(f"planted: {where}")
                model.where = where if call == 1 else ""
                total = model(batch).square().mean()
                if where == "after the model":
                    raise RuntimeError(f"planted: {where}")
                return total

            grad_fn = ps.accumulate(ps.value_and_grad(module, loss), microbatches)
            out = grad_fn(state.params, state.buffers, x, state.key)
            return {name: whole(grad).tolist() for name, grad in out.grads.items()}

        places = ("before the model", "after the model", "second microbatch", "between blocks", "backward")
        reference, state = module_and_state(Faulty(), spec=SPEC, runtime=runtime)
        expected = gradient(reference, state)
        used, _ = module_and_state(Faulty(), spec=SPEC, runtime=runtime)
        for where in places:
            fresh, _ = module_and_state(Faulty(), spec=SPEC, runtime=runtime)
            for name, module in (("fresh", fresh), ("used", used)):
                error = error_of(gradient, module, state, where)
                results[f"{where}, {name}"] = (error, gradient(module, state) == expected)
        return results


def _entries(topology: tuple[int, int]) -> dict[str, Any]:
    """Losses that reach the parameters by a declared method, by one that is not, and by no method at all."""
    with runtime_on(topology) as runtime:
        entries = {
            "declared": lambda model, x: model.head(model.encode(x)) if runtime.world_size == 1 else model.encode(x),
            "forward and submodule": lambda model, x: model(x),
            "undeclared": lambda model, x: model.head(x[:, :1].expand(-1, 4)),
        }
        results: dict[str, Any] = {}
        config = ps.AcceleratorConfig(device="cpu").ddp
        results["default"] = config.find_unused_parameters
        for name, call in entries.items():
            module, state = module_and_state(Stack(), spec=SPEC, runtime=runtime)

            def loss(model: nn.Module, x: Tensor, key: ps.Key, call: Any = call) -> Tensor:
                return call(model, x).square().mean()

            grad_fn = ps.value_and_grad(module, loss)
            results[name] = error_of(grad_fn, state.params, state.buffers, ROWS, state.key)
            results[f"{name}, again"] = error_of(grad_fn, state.params, state.buffers, ROWS, state.key)
        module, state = module_and_state(Scale(), runtime=runtime)
        step = ps.train_step(module, lambda model, x, key: model(x)[:, 0].sum(), SGD)
        results["mask"] = step(state, torch.ones(1, 5))[0].buffers["mask"].tolist()
        results["twice"] = error_of(ps.shard, module.module, None, runtime)
        results["local"] = error_of(ps.shard, module.module)
        return results


def _unused(topology: tuple[int, int]) -> list[dict[str, list]]:
    """A parameter that only rank 0, or only the first microbatch, uses."""
    with runtime_on(topology, ddp=ps.DDPConfig(find_unused_parameters=True)) as runtime:
        results = []
        # FSDP2 reduces a unit as one message: its ranks must use the same parameters of it.
        one_rank = ("first microbatch of rank 0",) if runtime.topology.kind == "ddp" else ()
        for who in ("nobody", "first microbatch", *one_rank):
            module, state = module_and_state(Pair(), runtime=runtime)

            def loss(model: nn.Module, x: Tensor, key: ps.Key, who: str = who) -> Tensor:
                first = bool(x[0, 0] == 0)
                uses = {"nobody": False, "first microbatch": first}.get(who, first and runtime.rank == 0)
                return model(x, uses).sum()

            grad_fn = ps.accumulate(ps.value_and_grad(module, loss), 2)
            out = grad_fn(state.params, state.buffers, torch.tensor([[0.0, 1.0], [1.0, 1.0]]), state.key)
            results.append({name: whole(grad).flatten().tolist() for name, grad in sorted(out.grads.items())})
        return results


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        return self.always(x) + self.sometimes(x) if uses else self.always(x)


def _masks(topology: tuple[int, int]) -> dict[str, Any]:
    with runtime_on(topology) as runtime:
        module, state = module_and_state(on_meta(Noisy), runtime=runtime)
        drawn = [module.apply(state.params, state.buffers, X, train=True, key=ps.key(k))[0] for k in (0, 1, 0)]
        return {
            "same key": torch.equal(drawn[0], drawn[2]),
            "other key": torch.equal(drawn[0], drawn[1]),
            "rank's own": drawn[0].tolist(),
            "buffers": {name: leaf.tolist() for name, leaf in module.apply(state.params, state.buffers, X)[1].items()},
        }


def _all(topology: tuple[int, int]) -> dict[str, Any]:
    return {scenario.__name__: scenario(topology) for scenario in (_errors, _entries, _unused, _masks)}


@pytest.mark.parametrize("topology", [(2, 1), (1, 2)], ids=["ddp", "fsdp2"])
def test_modules_on_ranks(topology):
    everyone = run_on(topology, _all)
    sharded = topology == (1, 2)
    for results in everyone:
        for name, (error, recovered) in results["_errors"].items():
            assert error is not None, name
            assert "planted" in error[1], (name, error)
            assert recovered, name
        entries = results["_entries"]
        for again in ("", ", again"):
            assert entries[f"forward and submodule{again}"] is None
            assert "ShardingSpec(forward_methods=(name,))" in entries[f"undeclared{again}"][1] or sharded
            assert entries[f"undeclared{again}"] is not None
            if sharded:
                assert entries[f"declared{again}"] is None
            else:  # encode alone leaves the decoder without a gradient
                assert "did not use every parameter (decoder.0.attention.0.weight" in entries[f"declared{again}"][1]
                assert "--accelerator.ddp.find-unused-parameters" in entries[f"declared{again}"][1]
        assert entries["mask"] == [0, 0, 0, 0, -torch.inf]
        assert (entries["twice"] is not None) == sharded
        assert not sharded or "FSDPModule already" in entries["twice"][1] == entries["local"][1]
        # By hand: x is (0, 1) and (1, 1), the loss the mean over two microbatches.
        expected = [{}, {"sometimes.weight": [0.0, 0.5]}, {"sometimes.weight": [0.0, 0.25]}]
        assert results["_unused"] == [
            {"always.weight": [0.5, 1.0], **extra} for extra in expected[: 2 if sharded else 3]
        ]
        masks = results["_masks"]
        assert masks["same key"]
        assert not masks["other key"]
    assert everyone[0]["_masks"]["rank's own"] != everyone[1]["_masks"]["rank's own"]
    assert everyone[0]["_masks"]["buffers"] == everyone[1]["_masks"]["buffers"]
