"""Specs that nobody wrote: what transformers says must not be split, and blocks that repeat."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from purestep.sharding.config import Topology
from purestep.sharding.detection import find_spec
from purestep.sharding.spec import spec_of
from tests.sharding.models import Crossed, Recurrent, Stack, Tied, Wrapped, on_meta

SHARDED = Topology(1, 2)


class Block(nn.Module):
    """A residual layer; `wide` makes it another size."""

    def __init__(self, width: int = 4, hidden: int = 8, experts: int = 0):
        super().__init__()
        self.inner = nn.Linear(width, hidden)
        self.outer = nn.Linear(hidden, width)
        if experts:
            self.experts = nn.ModuleList(Block(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x).relu())


class Other(Block):
    """A block of another class."""


class Stage(nn.Module):
    """Blocks of one width, after a layer that changes it."""

    def __init__(self, width: int, depth: int = 2):
        super().__init__()
        self.down = nn.Linear(width // 2, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.down(x))


class Net(nn.Module):
    """Modules by name, in a model that calls none of them."""

    def __init__(self, **modules: nn.Module):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class NoForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


def _list(count: int, build: Any = Block, **options: Any) -> nn.ModuleList:
    return nn.ModuleList(build(**options) for _ in range(count))


def _tied_blocks() -> nn.Module:
    """Three blocks, of which the first two share a weight."""
    model = Net(blocks=_list(3))
    model.blocks[1].inner.weight = model.blocks[0].inner.weight
    return model


def _tied_to_the_root() -> nn.Module:
    model = Net(blocks=_list(3))
    model.blocks[2].outer.bias = nn.Parameter(torch.zeros(4))
    model.shift = model.blocks[2].outer.bias
    return model


LEFT = "; left to the root, since other modules share their weights: "
DETECTED = [  # model, units, what is said after "repeated blocks detected: "
    (lambda: Net(blocks=_list(12)), [f"blocks.{i}" for i in range(12)], "blocks.* (Block x 12)"),
    (lambda: nn.Sequential(Block(), Block()), ["0", "1"], "* (Block x 2)"),
    (Stack, ["encoder.0", "encoder.1", "decoder.0", "decoder.1"], "encoder.*, decoder.* (Layer x 4)"),
    (
        lambda: Net(layers=nn.ModuleDict({"first": Block(), "second": Block()})),
        ["layers.first", "layers.second"],
        "layers.* (Block x 2)",
    ),
    (  # stages of a hierarchy
        lambda: Net(stages=nn.ModuleList([Stage(4), Stage(8), Stage(16, 3)])),
        [f"stages.{i}.blocks.{j}" for i, depth in enumerate((2, 2, 3)) for j in range(depth)],
        "stages.*.blocks.* (Block x 7)",
    ),
    (  # stages under names of their own, the first block of each another shape
        lambda: Net(**{f"stage{i}": nn.Sequential(Block(4, 6), Block(4), Block(4)) for i in (1, 2)}),
        [f"stage{i}.{j}" for i in (1, 2) for j in range(3)],
        "stage1.*, stage2.* (Block x 6)",
    ),
    (  # experts are part of their block
        lambda: Net(blocks=_list(2, experts=4)),
        ["blocks.0", "blocks.1"],
        "blocks.* (Block x 2)",
    ),
    (  # a stem in the same list
        lambda: Net(layers=nn.Sequential(nn.Linear(4, 4), Block(), Block())),
        ["layers.1", "layers.2"],
        "layers.1, layers.2 (Block x 2)",
    ),
    (  # two towers
        lambda: Net(text=_list(3), image=_list(2, Other)),
        ["text.0", "text.1", "text.2", "image.0", "image.1"],
        "text.*, image.* (Block x 3, Other x 2)",
    ),
    (  # too small to matter
        lambda: Net(blocks=_list(4, width=32, hidden=64), adapters=_list(2, Other, hidden=1)),
        [f"blocks.{i}" for i in range(4)],
        "blocks.* (Block x 4)",
    ),
    (  # plain Sequentials
        lambda: Net(blocks=_list(2, lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()))),
        ["blocks.0", "blocks.1"],
        "blocks.* (Sequential x 2)",
    ),
    (
        lambda: Net(stages=_list(2, lambda: nn.Sequential(Block(), Block()))),
        [f"stages.{i}.{j}" for i in (0, 1) for j in (0, 1)],
        "stages.*.* (Block x 4)",
    ),
    (
        lambda: Wrapped(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4), 2, enable_nested_tensor=False)),
        ["inner.layers.0", "inner.layers.1"],
        "inner.layers.* (TransformerEncoderLayer x 2)",
    ),
    (_tied_blocks, ["blocks.2"], f"blocks.2 (Block x 1){LEFT}blocks.0, blocks.1"),
    (_tied_to_the_root, ["blocks.0", "blocks.1"], f"blocks.0, blocks.1 (Block x 2){LEFT}blocks.2"),
]


@pytest.mark.parametrize(("build", "units", "told"), DETECTED)
def test_repeated_blocks_are_units(build, units, told):
    for model in (build(), on_meta(build)):
        spec, source = find_spec(model)
        assert source == f"repeated blocks detected: {told}"
        for topology in (SHARDED, Topology(1, 1)):
            plan = spec.resolve(model, topology, source=source)
            assert [unit.path for unit in plan.units] == [*units, ""]
            assert plan.source == source


NOTHING = [  # no units, no error
    lambda: nn.Linear(2, 2),
    lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
    lambda: nn.Sequential(Block(), Other()),
    lambda: Net(blocks=_list(1)),
    lambda: Net(blocks=_list(3, NoForward)),
    lambda: Net(blocks=_list(3, nn.Linear, in_features=4, out_features=4)),
    lambda: Net(losses=_list(3, nn.MSELoss)),
    Tied,
    Recurrent,
    Crossed,
    lambda: Wrapped(Crossed()),
]


@pytest.mark.parametrize("build", NOTHING)
def test_a_model_without_repeated_blocks_is_one_unit(build):
    spec, source = find_spec(build())
    assert (spec, source) == (ps.ShardingSpec(), "none")
    assert [unit.path for unit in spec.resolve(build(), SHARDED).units] == [""]


class Outer(Net):
    """As transformers declares it."""

    _no_split_modules = ["Block", "Missing"]  # noqa: RUF012


def test_what_transformers_must_not_split_comes_before_what_repeats():
    model = Outer(first=Block(), others=_list(4, Other, width=32))
    spec, source = find_spec(model)
    assert source == "_no_split_modules of Outer: Block"
    assert [unit.path for unit in spec.resolve(model, SHARDED).units] == ["first", ""]


def test_models_inside_other_models_are_asked_too():
    class Inner(Net):
        _no_split_modules = ("Other",)

    model = Wrapped(Net(text=Outer(blocks=_list(2)), image=Inner(blocks=_list(2, Other))))
    spec, source = find_spec(model)
    assert source == "_no_split_modules of Outer: Block, Other"
    assert [unit.path for unit in spec.resolve(model, SHARDED).units] == [
        f"inner.{tower}.blocks.{i}" for tower in ("text", "image") for i in (0, 1)
    ] + [""]


@pytest.mark.parametrize("value", [None, [], set(), ["Missing"], "Block", 3])
def test_what_says_nothing_is_passed_over(value):
    model = Outer(blocks=_list(2, Other))
    model._no_split_modules = value
    assert find_spec(model)[1] == "repeated blocks detected: blocks.* (Other x 2)"


def test_what_must_not_be_split_is_left_to_the_root_when_it_is_tied():
    model = Outer(first=Block(), blocks=_list(2))
    model.head.weight = model.first.outer.weight
    spec, source = find_spec(model)
    assert source == f"_no_split_modules of Outer: blocks.*{LEFT}first"
    assert [unit.path for unit in spec.resolve(model, SHARDED).units] == ["blocks.0", "blocks.1", ""]


def test_of_units_within_units_the_ones_with_the_parameters_stay():
    class Hierarchy(Net):
        _no_split_modules = ["Stage", "Block"]  # noqa: RUF012

    model = Hierarchy(stages=nn.ModuleList([Stage(4), Stage(8)]))
    assert find_spec(model)[1] == "_no_split_modules of Hierarchy: Block"
    model = Hierarchy(stages=nn.ModuleList([Stage(4), Stage(8)]))
    for stage in model.stages:
        stage.down = nn.Linear(64, 64)
    assert find_spec(model)[1] == "_no_split_modules of Hierarchy: Stage"


def test_a_model_carries_its_spec_and_an_argument_beats_it():
    class Carrying(Outer):
        sharding_spec = ps.ShardingSpec(units=("blocks.*",))

    other = ps.ShardingSpec()
    model = Carrying(blocks=_list(2, Other), first=Block())
    assert find_spec(model) == (Carrying.sharding_spec, "model")
    assert find_spec(model, other) == (other, "config")
    assert spec_of(model) is Carrying.sharding_spec
    assert spec_of(model, other) is other
    assert Carrying.sharding_spec.resolve(model, SHARDED).source == "model"
    assert other.resolve(model, SHARDED).source == "config"
    with pytest.raises(TypeError, match="a sharding spec is a ShardingSpec, got tuple"):
        spec_of(model, ("Block",))  # type: ignore[arg-type]
    model.sharding_spec = "blocks.*"  # type: ignore[assignment]
    with pytest.raises(TypeError, match="a sharding spec is a ShardingSpec, got str"):
        spec_of(model)


def test_a_sharded_module_says_where_its_units_come_from():
    assert ps.shard(Stack()).plan.source == "repeated blocks detected: encoder.*, decoder.* (Layer x 4)"
    assert ps.shard(Stack(), ps.ShardingSpec()).plan.source == "config"


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert", "T5", "Mixtral", "Albert"])
def test_models_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 32}
    kinds: dict[str, tuple[str, dict[str, Any], list[str]]] = {
        "Llama": ("LlamaForCausalLM", {"intermediate_size": 32}, [f"model.layers.{i}" for i in range(3)]),
        "GPT2": ("GPT2LMHeadModel", {}, [f"transformer.h.{i}" for i in range(3)]),
        "Bert": ("BertForMaskedLM", {"intermediate_size": 32}, [f"bert.encoder.layer.{i}" for i in range(3)]),
        "T5": (
            "T5ForConditionalGeneration",
            {"d_kv": 8, "d_ff": 32, "num_layers": 3},
            [f"{half}.block.{i}" for half in ("encoder", "decoder") for i in range(3)],
        ),
        "Mixtral": ("MixtralForCausalLM", {"intermediate_size": 32}, [f"model.layers.{i}" for i in range(3)]),
        "Albert": ("AlbertForMaskedLM", {"intermediate_size": 32, "embedding_size": 8}, []),
    }
    model_class, options, units = kinds[name]
    config = getattr(transformers, f"{name}Config")(**sizes, **options)
    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
    spec, source = find_spec(model)
    assert source.startswith(f"_no_split_modules of {model_class}: ") == bool(units)
    assert [unit.path for unit in spec.resolve(model, SHARDED).units] == [*units, ""]
    for module in model.modules():
        if hasattr(module, "_no_split_modules"):
            module._no_split_modules = None
    spec, source = find_spec(model)  # without being told, the same is found
    assert source.startswith("repeated blocks detected: ") == bool(units)
    assert [unit.path for unit in spec.resolve(model, SHARDED).units] == [*units, ""]


def test_auto_stands_for_what_would_be_taken_otherwise():
    class Carrying(Stack):
        sharding_spec = ps.ShardingSpec(
            units=(ps.Unit("encoder.*", prefetch=0), "decoder.*"), forward_methods=("encode",)
        )

    open_spec = ps.ShardingSpec(units=("embed", ps.Unit("auto", prefetch=3, compile=True)), freeze=("head.*",))
    for build, told in ((Carrying, "model"), (Stack, "repeated blocks detected: encoder.*, decoder.* (Layer x 4)")):
        spec, source = find_spec(build(), open_spec)
        assert source == f"config, and {told}"
        assert [rule.match for rule in spec.rules] == ["embed", "encoder.*", "decoder.*"]
        assert spec.freeze == ("head.*",)
        assert [rule.compile for rule in spec.rules] == [None, True, True]
        assert [rule.prefetch for rule in spec.rules] == [None, 0 if build is Carrying else 3, 3]
        assert spec.forward_methods == (("encode",) if build is Carrying else ())
        plan = open_spec.resolve(build(), SHARDED)
        assert (plan.source, len(plan.units)) == (source, 6)
    assert find_spec(Tied(), ps.ShardingSpec(units=("auto",))) == (ps.ShardingSpec(), "config, and none")


def test_a_spec_without_auto_stands_alone():
    base, other = ps.ShardingSpec(("blocks.*",), ("encode",)), ps.ShardingSpec(("head",))
    assert other.over(base) is other
    assert ps.ShardingSpec().over(base) == ps.ShardingSpec()
