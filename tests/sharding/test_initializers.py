"""Initializers that reach beyond their own module, and what is given or frozen instead."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from purestep.sharding.initializers import initialize, initializers_of
from purestep.sharding.leaves import leaves_of
from tests.ranks import run_on
from tests.sharding.models import on_meta
from tests.toys import error_of, runtime_on, whole

SGD = ps.sgd(0.1)


def initial(model: nn.Module, seed: int = 0, runtime: ps.Runtime | None = None, **given: Any) -> ps.TrainState:
    return ps.init(ps.shard(model, ps.ShardingSpec(), runtime), SGD, ps.key(seed), **given)


class Scaled(nn.Module):
    """GPT-2's way: a block without leaves of its own, whose convention sets the projection of its layers anew."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 64), "down": nn.Linear(64, 4)}) for _ in range(2))
        self.embed = nn.Embedding(3, 4)
        self.visited: list[str] = []

    def _init_weights(self, module: nn.Module) -> None:
        self.visited.append(type(module).__name__)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1.0)
        if isinstance(module, nn.ModuleDict):
            nn.init.trunc_normal_(module["down"].weight, std=100.0, a=-300.0, b=300.0)  # nothing on the meta device
        if module is self:
            nn.init.constant_(self.embed.weight, 5.0)


@pytest.mark.parametrize("build", [Scaled, lambda: on_meta(Scaled)], ids=["real", "meta"])
def test_a_convention_for_a_block_sets_the_leaves_of_its_layers(build):
    params = initial(build()).params
    for i in range(2):
        assert 0.7 < params[f"blocks.{i}.up.weight"].std() < 1.4
        assert params[f"blocks.{i}.down.weight"].std() > 50
        assert params[f"blocks.{i}.down.bias"].abs().max() < 1
    assert not torch.equal(params["blocks.0.down.weight"], params["blocks.1.down.weight"])
    assert params["embed.weight"].eq(5).all()


class Rescaling(nn.Module):
    """Reads what its layers drew, and writes what another module will not draw again."""

    def __init__(self, last: Callable[[Rescaling], None]):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last = last
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.last(self)


def _in_place(model: Rescaling) -> None:
    with torch.no_grad():
        model.b.weight.copy_(model.a.weight * 2)


def _through_data(model: Rescaling) -> None:
    model.b.weight.data = model.a.weight.data * 2


def _assigned(model: Rescaling) -> None:
    model.b.weight = nn.Parameter(model.a.weight.detach() * 2)


def _by_value(model: Rescaling) -> None:
    """Values decide."""
    with torch.no_grad():
        model.b.weight.copy_(model.a.weight * (2 if model.a.weight.abs().sum().item() > 0 else 3))


def _by_numpy(model: Rescaling) -> None:
    assert model.a.weight.data.numpy().any()
    _in_place(model)


@pytest.mark.parametrize("last", [_in_place, _through_data, _assigned, _by_value, _by_numpy])
@pytest.mark.parametrize("place", ["real", "meta"])
def test_an_initializer_computes_with_what_the_layers_below_drew(last, place):
    plain = initial(nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})).params

    def build() -> nn.Module:
        model = Rescaling(lambda model: None)
        model.last = last
        return model

    params = initial(build() if place == "real" else on_meta(build)).params
    assert torch.equal(params["a.weight"], plain["a.weight"])
    assert torch.equal(params["b.weight"], plain["a.weight"] * 2)
    assert torch.equal(params["b.bias"], plain["b.bias"])


class Timm(nn.Module):
    """`init_weights()` without arguments has the last word; `_init_weights(module)` may be there too."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.randn(1, 3, 4) * 0.02)
        self.layer = nn.Linear(4, 4)
        self.init_weights()

    def init_weights(self, mode: str = "") -> None:
        nn.init.trunc_normal_(self.pos_embed, mean=50.0, a=48.0, b=52.0)
        for module in self.modules():
            self._init_weights(module)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


def test_init_weights_of_a_whole_model_is_run():
    state = initial(Timm())
    assert state.digest() == initial(on_meta(Timm)).digest()
    assert state.params["pos_embed"].mean() > 40
    assert 0 < state.params["layer.weight"].std() < 0.05
    assert state.params["layer.bias"].eq(0).all()


class PreTrainedModel(nn.Module):
    """What transformers calls its models: one inside another keeps its own convention, and init_weights() is more."""

    def __init__(self, value: float, inner: nn.Module | None = None):
        super().__init__()
        self.value = value
        self.layer = nn.Linear(2, 2)
        self.inner = inner

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, self.value)

    def init_weights(self) -> None:
        raise AssertionError("ties and marks modules: not for us to call")


def test_a_model_of_transformers_inside_another_keeps_its_own_convention():
    params = initial(nn.Sequential(PreTrainedModel(1.0, PreTrainedModel(2.0)), nn.Linear(2, 2))).params
    assert params["0.layer.weight"].eq(1).all()
    assert params["0.inner.layer.weight"].eq(2).all()
    assert params["1.weight"].std() > 0


class Outer(nn.Module):
    """Others apply their convention to everything below, after it was built."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = PreTrainedModel(2.0)

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.bias, 7.0)


def test_conventions_are_applied_from_the_inside_out():
    params = initial(Outer()).params
    assert params["inner.layer.weight"].eq(2).all()
    assert params["inner.layer.bias"].eq(7).all()


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            nn.init.constant_(self.head.weight, 3.0)


def test_a_model_may_set_a_tied_weight_by_any_of_its_names():
    assert initial(TiedHead()).params["embed.weight"].eq(3).all()
    assert initial(on_meta(TiedHead)).params["embed.weight"].eq(3).all()


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_an_initializer_has_no_more_in_memory_than_it_touches():
    """12 layers of 36 MB, which malloc gives back when freed, below a model whose own initializer sets one bias."""
    peaks = []

    class Layer(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight)
            nn.init.ones_(self.bias)
            peaks.append(_resident())

    class Model(nn.Sequential):
        def init_weights(self) -> None:
            nn.init.constant_(self[0].bias, 3.0)
            peaks.append(_resident())

    model = on_meta(lambda: Model(*[Layer(3000, 3000) for _ in range(12)]))
    taken = {}
    leaves = leaves_of(model).params
    before = _resident()
    initialize(model, leaves, set(leaves), ps.key(0), lambda name, value: taken.update({name: value.max().item()}))
    assert taken == {**dict.fromkeys(leaves, 1.0), "0.bias": 3.0}
    assert max(peaks) - before < 200e6  # of 432e6


def test_an_error_in_an_initializer_names_the_module_and_leaves_the_model_alone():
    class Failing(nn.Linear):
        def reset_parameters(self) -> None:
            if getattr(self, "fails", False):
                raise RuntimeError("no values today")

    model = nn.Sequential(nn.Linear(2, 2), Failing(2, 2))
    model[1].fails = True
    before = [id(parameter) for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match="no values today") as error:
        initial(model)
    assert "in the initialization of 1 (Failing)" in error.value.__notes__
    assert [id(parameter) for parameter in model.parameters()] == before


def test_methods_that_need_other_arguments_are_not_initializers():
    class Odd(nn.Module):
        def reset_parameters(self, std: float) -> None:
            raise AssertionError

        def init_weights(self, module: nn.Module, std: float) -> None:
            raise AssertionError

        def _init_weights(self, *, key: Any) -> None:
            raise AssertionError

    assert initializers_of(Odd()) == []


def test_only_what_is_wanted_is_taken():
    model, taken = Scaled(), {}
    leaves = leaves_of(model).params
    initialize(model, leaves, {"blocks.0.down.weight"}, ps.key(0).fold_in("init"), taken.__setitem__)
    assert list(taken) == ["blocks.0.down.weight"]
    assert torch.equal(taken["blocks.0.down.weight"], initial(Scaled()).params["blocks.0.down.weight"])


# What is given.


def test_given_leaves_are_used_as_they_are_and_move_no_other():
    plain = initial(Scaled()).params
    given = {"blocks.0.down.weight": torch.ones(4, 64)}
    params = initial(Scaled(), params=given).params
    assert params["blocks.0.down.weight"] is given["blocks.0.down.weight"]
    assert all(torch.equal(leaf, plain[name]) for name, leaf in params.items() if name not in given)
    norm = nn.BatchNorm1d(3)
    assert initial(norm, buffers={"running_mean": torch.full((3,), 2.0)}).buffers["running_mean"].tolist() == [2] * 3


def test_nothing_is_drawn_when_everything_is_given():
    model = Scaled()
    values = initial(Scaled()).params
    initial(model, params=values)
    assert model.visited == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"params": {"embed": torch.ones(3, 4)}}, r"params\['embed'\] is no leaf of this module"),
        ({"buffers": {"embed.weight": torch.ones(3, 4)}}, r"buffers\['embed.weight'\] is no leaf"),
        ({"params": {"embed.weight": torch.ones(4, 3)}}, r"got float32\[4, 3\], expected float32\[3, 4\]"),
        ({"params": {"embed.weight": torch.ones(3, 4).double()}}, r"got float64\[3, 4\], expected float32\[3, 4\]"),
        ({"params": {"embed.weight": torch.ones(3, 4, device="meta")}}, "is on meta, and the module computes on cpu"),
        ({"params": {"embed.weight": [1.0]}}, "is a list; ps.init takes tensors"),
    ],
)
def test_a_given_leaf_that_does_not_fit_is_refused(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        initial(Scaled(), **given)


def _given(topology: tuple[int, int]) -> dict[str, Any]:
    with runtime_on(topology) as runtime:
        first = initial(Scaled(), runtime=runtime)
        second = initial(on_meta(Scaled), seed=1, runtime=runtime, params=first.params)
        part = {"embed.weight": first.params["embed.weight"]}
        return {
            "same": second.params["embed.weight"] is first.params["embed.weight"],
            "equal": all(torch.equal(whole(leaf), whole(first.params[name])) for name, leaf in second.params.items()),
            "digest": initial(Scaled(), runtime=runtime, params=part).digest() == first.digest(),
            "plain": error_of(initial, Scaled(), runtime=runtime, params={"embed.weight": torch.ones(3, 4)}),
        }


@pytest.mark.parametrize("topology", [(2, 1), (1, 2)], ids=["ddp", "fsdp2"])
def test_given_leaves_on_ranks(topology):
    for results in run_on(topology, _given):
        assert results["same"]
        assert results["equal"]
        assert results["digest"]
        assert (results["plain"] is None) == (topology == (2, 1))
        assert results["plain"] is None or "placed as (Shard(dim=0),)" in results["plain"][1]


# What is said.


class Constructed(nn.Module):
    """Owes its values to its constructor, although its layers have a reset_parameters()."""

    def __init__(self, set_values: Callable[[nn.Linear], Any]):
        super().__init__()
        self.layer = nn.Linear(64, 32)
        set_values(self.layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize(
    ("set_values", "reported"),
    [
        (lambda layer: None, None),
        (lambda layer: nn.init.zeros_(layer.bias), "layer.bias"),
        (lambda layer: nn.init.normal_(layer.weight, std=0.02), "layer.weight"),
        (lambda layer: layer.reset_parameters(), None),
    ],
)
def test_values_of_the_constructor_that_are_drawn_otherwise_are_reported(set_values, reported, caplog):
    module = ps.shard(Constructed(set_values))
    with caplog.at_level(logging.WARNING, "purestep"):
        ps.init(module, SGD, ps.key(0))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (reported is not None)
    for message in messages:
        assert f"ps.init drew 1 parameters of Constructed otherwise than its constructor had: {reported}." in message
        assert "params=ps.load_params(module)[0]" in message


# Freezing.


def test_a_freeze_rule_freezes_and_the_rest_trains():
    module = ps.shard(Scaled(), ps.ShardingSpec(freeze=("blocks.*.down.*", "embed.weight")))
    assert set(module.trainable) == {f"blocks.{i}.up.{leaf}" for i in range(2) for leaf in ("weight", "bias")}
    state = ps.init(module, ps.adamw(0.1), ps.key(0))
    assert set(state.opt_state["adamw"]["exp_avg"]) == set(module.trainable)
    assert initial(Scaled()).params.keys() == state.params.keys()


def test_a_freeze_rule_takes_a_tied_weight_by_any_name():
    assert ps.shard(TiedHead(), ps.ShardingSpec(freeze=("head.*",))).trainable == ()


def test_a_freeze_rule_that_matches_nothing_is_an_error():
    with pytest.raises(ps.ShardingError, match=r"freeze.*'block.\*'.*no parameter"):
        ps.shard(Scaled(), ps.ShardingSpec(freeze=("block.*",)))
