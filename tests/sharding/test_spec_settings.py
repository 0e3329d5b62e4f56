"""How each unit is run: rules, then the run's config; what is ignored, frozen, and split by dtype."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from purestep.sharding.config import Topology
from tests.sharding.models import Stack, Tied, on_meta

TOPOLOGIES = [Topology(1, 1), Topology(2, 1), Topology(1, 2), Topology(2, 2)]
FULL = ps.ActivationCheckpointing("full")
NONE = ps.ActivationCheckpointing()
SHARDED = Topology(1, 2)
VALUES = {  # field of Unit -> (as a rule says it, as the config says it)
    "reshard_after_forward": (False, 2),
    "param_dtype": ("bf16", "fp16"),
    "reduce_dtype": ("fp16", "bf16"),
    "output_dtype": ("fp32", "bf16"),
    "activation_checkpointing": (FULL, ps.ActivationCheckpointing("selective")),
    "compile": (False, True),
    "cpu_offload": (False, True),
    "prefetch": (0, 3),
}


def _config(**values: Any) -> ps.AcceleratorConfig:
    """The run's config with defaults of these fields of `Unit`."""
    fsdp = {name: value for name, value in values.items() if hasattr(ps.FSDPConfig, name)}
    return ps.AcceleratorConfig(
        mixed_precision="fp16",  # else its dtype is refused
        fsdp=ps.FSDPConfig(**fsdp),
        activation_checkpointing=values.get("activation_checkpointing", NONE),
        compile=ps.CompileConfig(enabled=values.get("compile", False)),
    )


def _settings(spec: ps.ShardingSpec, topology: Topology = SHARDED, **values: Any) -> dict[str, Any]:
    plan = spec.resolve(Stack(), topology, accelerator=_config(**values))
    return {unit.path: unit.settings for unit in plan.units}


def test_the_table_has_every_setting():
    assert set(VALUES) == {field.name for field in dataclasses.fields(ps.Unit)} - {"match"}


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_a_rule_beats_the_config_and_the_config_the_default(name, topology):
    own, general = VALUES[name]
    spec = ps.ShardingSpec(units=(ps.Unit("encoder.0", **{name: own}), "Layer"))
    settings = _settings(spec, topology, **{name: general})
    assert getattr(settings["encoder.0"], name) == own
    assert getattr(settings["encoder.1"], name) == general
    untouched = _settings(spec, topology)
    assert untouched["encoder.1"] == dataclasses.replace(untouched["decoder.0"])
    for other in set(VALUES) - {name}:
        assert getattr(settings["encoder.0"], other) == getattr(untouched["encoder.0"], other)


def test_the_first_rule_that_takes_a_module_decides_about_all_of_it():
    spec = ps.ShardingSpec(units=(ps.Unit("encoder.0", prefetch=2), ps.Unit("Layer", param_dtype="bf16", prefetch=1)))
    settings = _settings(spec)
    assert (settings["encoder.0"].prefetch, settings["encoder.0"].param_dtype) == (2, "fp32")
    assert (settings["encoder.1"].prefetch, settings["encoder.1"].param_dtype) == (1, "bf16")


@pytest.mark.parametrize("name", VALUES)
def test_the_root_has_a_rule_of_its_own(name):
    own, _ = VALUES[name]
    own = True if name in ("compile", "cpu_offload", "reshard_after_forward") else own  # not what it is anyway
    spec = ps.ShardingSpec(units=("Layer", ps.Unit("", **{name: own})))
    settings = _settings(spec)
    assert getattr(settings[""], name) == own
    assert settings["encoder.0"] == _settings(ps.ShardingSpec(("Layer",)))["encoder.0"]


def test_the_config_leaves_the_root_gathered_and_runs_it_once():
    settings = _settings(
        ps.ShardingSpec(("Layer",)), reshard_after_forward=2, activation_checkpointing=FULL, compile=True
    )
    root, layer = settings[""], settings["encoder.0"]
    assert (root.reshard_after_forward, root.activation_checkpointing, root.compile) == (False, NONE, False)
    assert (layer.reshard_after_forward, layer.activation_checkpointing, layer.compile) == (2, FULL, True)


def test_a_model_of_one_unit_is_compiled_whole_and_computed_again_in_parts():
    attention = ps.ActivationCheckpointing("full", modules=("*.attention",))
    settings = _settings(ps.ShardingSpec(), activation_checkpointing=attention, compile=True)[""]
    assert (settings.activation_checkpointing, settings.compile) == (attention, True)
    with pytest.raises(
        ps.ShardingError,
        match=r"--accelerator.activation-checkpointing.mode full: Stack has no unit to compute again in backward; name",
    ):
        _settings(ps.ShardingSpec(), activation_checkpointing=FULL)


def test_what_is_inside_a_unit_is_computed_again_and_compiled_with_it():
    spec = ps.ShardingSpec(units=("encoder.0.mlp", ps.Unit("encoder.1.mlp", compile=True), "Layer"))
    settings = _settings(spec, activation_checkpointing=FULL, compile=True)
    assert (settings["encoder.0.mlp"].activation_checkpointing, settings["encoder.0.mlp"].compile) == (NONE, False)
    assert settings["encoder.1.mlp"].compile
    assert settings["encoder.0"].activation_checkpointing == FULL


@pytest.mark.parametrize("every", [1, 2, 3, 4, 5])
def test_every_counts_the_units_of_a_rule_in_module_order(every):
    often = ps.ActivationCheckpointing("full", every=every)
    for spec in (
        ps.ShardingSpec(("Layer",)),
        ps.ShardingSpec((ps.Unit("Layer", activation_checkpointing=often),)),
        ps.ShardingSpec((ps.Unit("Layer", activation_checkpointing=often), "embed")),
    ):
        values = {} if spec.rules[0].activation_checkpointing else {"activation_checkpointing": often}
        settings = _settings(spec, **values)
        layers = ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
        assert [settings[path].activation_checkpointing.mode for path in layers] == [
            "full" if i % every == 0 else "none" for i in range(4)
        ]
    two = ps.ShardingSpec(("encoder.*", "decoder.*"))  # each rule counts for itself
    settings = _settings(two, activation_checkpointing=ps.ActivationCheckpointing("full", every=4))
    assert [path for path, unit in settings.items() if unit.activation_checkpointing.mode == "full"] == [
        "encoder.0",
        "decoder.0",
    ]


def _owned(plan: ps.Plan) -> dict[str, list[str]]:
    return {unit.path: [param.name for param in unit.params] for unit in plan.units}


def _params(plan: ps.Plan) -> dict[str, Any]:
    return {param.name: param for unit in plan.units for param in unit.params}


def test_ignored_modules_are_whole_and_no_units():
    spec = ps.ShardingSpec(units=("Layer",), ignored=("encoder.1", "head"))
    for topology in TOPOLOGIES:
        plan = spec.resolve(Stack(), topology)
        assert [unit.path for unit in plan.units] == ["encoder.0", "decoder.0", "decoder.1", ""]
        ignored = {name for name, param in _params(plan).items() if param.ignored}
        inside = {name for name in _params(plan) if name.startswith(("encoder.1.", "head."))}
        assert ignored == (inside if topology.is_sharded else set())
    assert len(_params(plan)) == len(list(Stack().parameters()))


def test_what_has_nothing_to_shard_is_whole_by_itself():
    def build() -> nn.Module:
        model = Stack()
        model.encoder[0].scale = nn.Parameter(torch.tensor(1.0))
        model.nothing = nn.Parameter(torch.zeros(0, 4))
        return model

    for model in (build(), on_meta(build)):
        plan = ps.ShardingSpec(("Layer",)).resolve(model, SHARDED)
        assert [name for name, param in _params(plan).items() if param.ignored] == ["encoder.0.scale", "nothing"]
        assert "encoder.0.scale" in _owned(plan)["encoder.0"]


def test_frozen_parameters_by_name_whatever_the_topology():
    for topology in TOPOLOGIES:
        model = Stack()
        plan = ps.ShardingSpec(units=("Layer",), freeze=("embed.*", "encoder.**.bias")).resolve(model, topology)
        frozen = [name for name, param in _params(plan).items() if not param.trainable]
        biases = [f"encoder.{i}.{m}.bias" for i in (0, 1) for m in ("attention.0", "attention.1", "mlp")]
        assert frozen == [*biases, "embed.weight", "embed.bias"]
        assert all(param.requires_grad for param in model.parameters())  # resolving only says so


def test_a_tied_weight_is_frozen_by_any_of_its_names():
    for name in ("embed.weight", "head.weight"):
        plan = ps.ShardingSpec(freeze=(name,)).resolve(Tied(), SHARDED)
        assert [param.trainable for param in _params(plan).values()] == [False]


class Adapted(nn.Module):
    """A frozen half-precision layer with a trainable correction beside it."""

    def __init__(self, *, trained: torch.dtype = torch.float32, frozen: bool = True):
        super().__init__()
        self.base = nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(not frozen)
        self.down = nn.Linear(4, 2, bias=False, dtype=trained)
        self.up = nn.Linear(2, 4, bias=False, dtype=trained)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.bfloat16()).to(x) + self.up(self.down(x.to(self.down.weight))).to(x)


def _adapted(**options: Any) -> nn.Module:
    return nn.Sequential(*(nn.ModuleDict({"inner": Adapted(**options)}) for _ in range(2)))


def test_what_is_frozen_may_have_any_dtype():
    plan = ps.ShardingSpec(units=("Adapted",)).resolve(_adapted(), SHARDED)
    assert [unit.path for unit in plan.units] == ["0.inner", "1.inner", ""]
    assert not any(unit.note for unit in plan.units)


def test_trainable_dtypes_are_told_apart_by_module():
    for build in (lambda: _adapted(frozen=False), lambda: on_meta(lambda: _adapted(frozen=False))):
        spec = ps.ShardingSpec(units=(ps.Unit("Adapted", prefetch=1, compile=True),))
        plan = spec.resolve(build(), SHARDED)
        # base has the most numbers and stays; its neighbours move out, and are run as the unit they were in.
        inner = [f"{i}.inner{m}" for i in (0, 1) for m in ("", ".down", ".up")]
        assert [unit.path for unit in plan.units] == [*inner, ""]
        down = plan.units[1]
        assert down.note == "float32 apart from 0.inner"
        assert (down.settings.prefetch, down.settings.compile) == (1, False)
        for unit in plan.units[:-1]:
            assert len({param.dtype for param in unit.params}) == 1
    unsharded = ps.ShardingSpec(units=("Adapted",)).resolve(_adapted(frozen=False), Topology(2, 1))
    assert [unit.path for unit in unsharded.units] == ["0.inner", "1.inner", ""]


def test_the_outermost_module_of_one_dtype_is_split_off():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double())
    plan = ps.ShardingSpec().resolve(model, SHARDED)
    assert _owned(plan) == {
        "1": ["1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"],
        "": ["0.weight", "0.bias"],
    }
    assert plan.units[0].note == "float64 apart from the root"


def test_what_cannot_move_stays_where_it_is_and_the_other_moves():
    model = nn.Sequential(nn.Linear(8, 8))
    model.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))  # few, but in no submodule
    plan = ps.ShardingSpec().resolve(model, SHARDED)
    assert _owned(plan) == {"0": ["0.weight", "0.bias"], "": ["scale"]}


def test_a_list_of_parameters_is_never_a_unit():
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(2, dtype=torch.float64)])

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scales[0]

    model = nn.Sequential(nn.Linear(2, 2), Listed())
    assert _owned(ps.ShardingSpec().resolve(model, SHARDED))["1"] == ["1.scales.0"]
    model.scales = nn.ParameterList([torch.ones(2, dtype=torch.float64)])
    model.bias = nn.Parameter(torch.ones(2))
    with pytest.raises(ps.ShardingError, match=r"'bias' is torch.float32, .* is torch.float64, and no submodule"):
        ps.ShardingSpec().resolve(model, SHARDED)


def test_a_tied_weight_is_not_split_off_but_the_other_moves():
    model = nn.Sequential(nn.Linear(4, 4), Tied().double())
    model.head = nn.Linear(2, 3, bias=False)
    model.head.weight = model[1].embed.weight
    assert _owned(ps.ShardingSpec().resolve(model, SHARDED)) == {
        "0": ["0.weight", "0.bias"],
        "": ["1.embed.weight"],
    }


SPEC = ps.ShardingSpec(
    units=(
        ps.Unit(
            "blocks.*",
            reshard_after_forward=8,
            param_dtype="bf16",
            activation_checkpointing=ps.ActivationCheckpointing("selective", ("mlp",), ("aten.mm",), 2),
            compile=False,
            prefetch=0,
        ),
        "Embedding",
        ps.Unit("", reduce_dtype="bf16"),
    ),
    forward_methods=("encode",),
    root=("heads.*",),
    ignored=("scale",),
    freeze=("embed.**",),
)


def test_a_spec_survives_json():
    tree = json.loads(json.dumps(SPEC.to_dict()))
    assert ps.ShardingSpec.from_dict(tree) == SPEC
    assert ps.ShardingSpec.from_dict({"units": ["blocks.*", {"match": "head", "compile": True}]}) == ps.ShardingSpec(
        units=("blocks.*", ps.Unit("head", compile=True))
    )


UNKNOWN = [
    ({"unit": ["a"]}, "unknown field 'unit' of ShardingSpec (did you mean 'units'?)"),
    ({"units": [{"match": "a", "prefetched": 1}]}, "unknown field 'prefetched' of Unit (did you mean 'prefetch'?)"),
    (
        {"units": [{"match": "a", "activation_checkpointing": {"zzz": 1}}]},
        "unknown field 'zzz' of ActivationCheckpointing; it has mode, modules, save_ops, every",
    ),
]


@pytest.mark.parametrize(("tree", "message"), UNKNOWN)
def test_unknown_fields_are_named(tree, message):
    with pytest.raises(ps.ConfigError, match=re.escape(message)):
        ps.ShardingSpec.from_dict(tree)


def test_gradients_in_fp16_need_a_loss_scale():
    for name in ("param_dtype", "reduce_dtype"):
        spec = ps.ShardingSpec(units=(ps.Unit("encoder.0", **{name: "fp16"}), "Layer"))
        with pytest.raises(ps.ConfigError, match=f"unit 'encoder.0': {name} fp16: without --accelerator.mixed-prec"):
            spec.resolve(Stack(), SHARDED)
        spec.resolve(Stack(), SHARDED, accelerator=ps.AcceleratorConfig(mixed_precision="fp16"))


BAD = {
    "unit rule 'a': reshard_after_forward 1: as a number": lambda: ps.Unit("a", reshard_after_forward=1),
    "unit rule 'a': prefetch -1: must be at least 0": lambda: ps.Unit("a", prefetch=-1),
    "unit rule 'a': param_dtype 'int8': expected fp32, bf16, fp16": lambda: ps.Unit("a", param_dtype="int8"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("message", BAD)
def test_bad_values_are_refused_when_the_rule_is_made(message):
    with pytest.raises(ps.ConfigError, match=re.escape(message)):
        BAD[message]()
