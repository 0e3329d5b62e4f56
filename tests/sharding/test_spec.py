"""Rules to units: what globs and class names take, and every error a spec can have, told at resolve time (B07)."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import purestep as ps
from purestep.sharding.config import Topology
from tests.ranks import run_on
from tests.sharding.models import Crossed, Recurrent, Stack, Tied, Wrapped, on_meta
from tests.toys import runtime_on, whole

SHARDED = Topology(1, 2)
UNSHARDED = [Topology(1, 1), Topology(4, 1)]


def units_of(model: nn.Module, *rules: Any, **spec: Any) -> list[str]:
    plan = ps.ShardingSpec(units=rules, **spec).resolve(model, SHARDED)
    assert plan.units[-1].path == ""
    return [unit.path for unit in plan.units[:-1]]


LAYERS = ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
INSIDE = ["attention", "attention.0", "attention.1", "mlp"]
RULES = [  # rules -> units, in module order
    ((), []),
    (("encoder.*", "decoder.*"), LAYERS),
    (("Layer",), LAYERS),
    (("*coder.?",), LAYERS),
    (("embed", "head", "Layer"), ["embed", *LAYERS, "head"]),
    (("decoder.*", "encoder.1", "encoder.0"), LAYERS),
    (("*coder.0.mlp", "Layer"), ["encoder.0", "encoder.0.mlp", "encoder.1", "decoder.0", "decoder.0.mlp", "decoder.1"]),
    (("*.*.mlp",), [f"{layer}.mlp" for layer in LAYERS]),
    (("**.mlp",), [f"{layer}.mlp" for layer in LAYERS]),
    (("encoder.0**", "Layer"), ["encoder.0", *[f"encoder.0.{m}" for m in INSIDE], *LAYERS[1:]]),
]


@pytest.mark.parametrize(("rules", "expected"), RULES)
def test_what_rules_take(rules, expected):
    assert units_of(Stack(), *rules) == expected


def test_a_star_stays_within_a_path_segment_and_a_dot_is_a_dot():
    model = nn.ModuleDict({"ab": nn.Sequential(nn.Linear(1, 1)), "aXb": nn.Linear(1, 1)})
    assert units_of(model, "a*") == ["ab", "aXb"]
    assert units_of(model, "a**") == ["ab", "ab.0", "aXb"]
    for rule in ("a.b", "a[bX]", "AB", "b"):
        with pytest.raises(ps.ShardingError, match="matches no module"):
            units_of(model, rule)


def test_the_first_rule_that_takes_a_module_counts():
    spec = ps.ShardingSpec(units=(ps.Unit("encoder.0", reshard_after_forward=False), ps.Unit("Layer", True)))
    plan = spec.resolve(Stack(), SHARDED, ps.FSDPConfig(reshard_after_forward=False))
    assert [unit.reshard_after_forward for unit in plan.units] == [False, True, True, True, False]


def test_what_a_rule_leaves_open_the_config_decides_except_for_the_root():
    for reshard in (True, False):
        plan = ps.ShardingSpec(("Layer",)).resolve(Stack(), SHARDED, ps.FSDPConfig(reshard_after_forward=reshard))
        assert [unit.reshard_after_forward for unit in plan.units] == [reshard] * 4 + [False]


def test_a_nested_unit_takes_its_parameters_out_of_the_outer_one():
    plan = ps.ShardingSpec(units=("Layer", "encoder.0.mlp")).resolve(Stack(), SHARDED)
    owned = {unit.path: [param.name for param in unit.params] for unit in plan.units}
    assert owned["encoder.0.mlp"] == ["encoder.0.mlp.weight", "encoder.0.mlp.bias"]
    assert owned["encoder.0"] == [f"encoder.0.attention.{i}.{leaf}" for i in (0, 1) for leaf in ("weight", "bias")]
    assert owned[""] == ["embed.weight", "embed.bias", "head.weight", "head.bias"]
    every = [name for names in owned.values() for name in names]
    assert sorted(every) == sorted(name for name, _ in Stack().named_parameters())


def test_a_meta_model_has_the_plan_of_a_real_one():
    spec = ps.ShardingSpec(units=("Layer",), forward_methods=("encode",))
    for topology in (*UNSHARDED, SHARDED, Topology(2, 3)):
        assert spec.resolve(on_meta(Stack), topology) == spec.resolve(Stack(), topology)


def test_resolving_changes_nothing():
    model = Stack()
    before = {name: (id(leaf), leaf.clone()) for name, leaf in model.state_dict(keep_vars=True).items()}
    kinds = [type(module) for module in model.modules()]
    ps.ShardingSpec(units=("Layer",)).resolve(model, SHARDED)
    assert [type(module) for module in model.modules()] == kinds
    for name, leaf in model.state_dict(keep_vars=True).items():
        assert id(leaf) == before[name][0]
        assert torch.equal(leaf, before[name][1])


def _mixed_dtypes() -> nn.Module:
    """Parameters of two dtypes in one module."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    return model


SHARDABILITY = [  # model, spec, message; errors only where something is sharded
    (
        Tied,
        ps.ShardingSpec(units=("embed", "head")),
        "tied weight in two units: 'embed.weight' (unit 'embed') and 'head.weight' (unit 'head') are one parameter, "
        "which a unit must own whole; leave both modules to the root unit (remove the rule that takes one), or make a "
        "module that holds both one unit",
    ),
    (
        Tied,
        ps.ShardingSpec(units=("head",)),
        "tied weight in two units: 'embed.weight' (unit 'root') and 'head.weight' (unit 'head') are one parameter",
    ),
    (
        Crossed,
        ps.ShardingSpec(units=("left", "right")),
        "one module in two units: 'left.0' (unit 'left') and 'right.1' (unit 'right') are the same Linear; make it a "
        "unit of its own",
    ),
    (
        Crossed,
        ps.ShardingSpec(units=("right",)),
        "one module in two units: 'left.0' (unit 'root') and 'right.1' (unit 'right') are the same Linear",
    ),
    (
        Stack,
        ps.ShardingSpec(units=("encoder.*",)),
        "repeated blocks in no unit: decoder.0, decoder.1 (Layer) would be gathered all at once with the root; add a "
        "rule such as 'decoder.*', or declare them with ShardingSpec(root=...)",
    ),
    (
        Stack,
        ps.ShardingSpec(units=("encoder.*", "decoder.1")),
        "repeated blocks in no unit: decoder.0 (Layer) would be gathered",
    ),
    (
        Stack,
        ps.ShardingSpec(units=("encoder", "Layer")),
        "unit rule 'encoder' takes 'encoder', a ModuleList, which is never called; match its children: 'encoder.*'",
    ),
    (
        _mixed_dtypes,
        ps.ShardingSpec(),
        "unit 'root' mixes dtypes: '0.weight' is torch.float32, '1.bias' is torch.float64, and no submodule tells them "
        "apart; give all its trainable parameters one dtype, freeze one of them, move '1.bias' into a module of its "
        "own, or leave its module whole on every rank (ShardingSpec.ignored)",
    ),
    (
        Tied,
        ps.ShardingSpec(ignored=("head",)),
        "tied weight ignored at one place only: 'embed.weight' (not ignored) and 'head.weight' (ignored) are one "
        "parameter; ignore both modules, or none",
    ),
    (
        Stack,
        ps.ShardingSpec(units=(ps.Unit("Layer", reshard_after_forward=3),)),
        "unit 'encoder.0': reshard_after_forward 3 does not divide the 2 ranks that share a copy "
        "(--parallelism.dp-shard); use a divisor, or True or False",
    ),
]


@pytest.mark.parametrize(("build", "spec", "message"), SHARDABILITY)
def test_what_cannot_be_sharded_is_an_error_that_names_it_and_the_fix(build, spec, message):
    for model in (build(), on_meta(build)):
        with pytest.raises(ps.ShardingError, match=re.escape(message)):
            spec.resolve(model, SHARDED)
    for topology in UNSHARDED:
        spec.resolve(build(), topology)


MISTAKES = [  # errors in every topology
    (
        ps.ShardingSpec(units=("layers.*",)),
        "unit rule 'layers.*' matches no module of Stack; module paths: embed, encoder, encoder.0, ",
    ),
    (ps.ShardingSpec(units=("Layers",)), "classes: Layer, Linear, ModuleList, Sequential"),
    (ps.ShardingSpec(units=("Stack",)), "unit rule 'Stack' matches no module"),  # the root is a unit anyway
    (
        ps.ShardingSpec(forward_methods=("encod",)),
        "forward method 'encod' is not a method of Stack (did you mean 'encode'?); it has encode",
    ),
    (ps.ShardingSpec(units=("encode.*",)), "matches no module of Stack (did you mean 'encoder.*'"),
    (ps.ShardingSpec(ignored=("haed",)), "ignored rule 'haed' matches no module of Stack (did you mean 'head'"),
    (
        ps.ShardingSpec(freeze=("embed.wieght",)),
        "freeze rule 'embed.wieght' matches no parameter (did you mean 'embed.weight'?)",
    ),
    (ps.ShardingSpec(freeze=("embed",)), "freeze rule 'embed' matches no parameter"),  # names, not modules
    (
        ps.ShardingSpec(units=("Layer", ps.Unit("encoder.*", compile=True))),
        "unit rule 'encoder.*' takes no module that an earlier rule ('Layer') does not take already; put it before "
        "that one, or remove it",
    ),
    (
        ps.ShardingSpec(units=("encoder.*", "decoder.*"), ignored=("decoder",)),
        "unit rule 'decoder.*' matches only modules that are ignored",
    ),
    (ps.ShardingSpec(units=(ps.Unit("encoder", compile=True), "Layer")), "never called"),
]


@pytest.mark.parametrize(("spec", "message"), MISTAKES)
def test_mistakes_are_errors_in_every_topology(spec, message):
    for topology in (*UNSHARDED, SHARDED):
        with pytest.raises(ps.ShardingError, match=re.escape(message)):
            spec.resolve(Stack(), topology)


def test_a_sharding_error_is_a_config_error():
    assert issubclass(ps.ShardingError, ps.ConfigError)


SOUND = [  # no false alarms
    (Tied, ps.ShardingSpec()),
    (lambda: Wrapped(Tied()), ps.ShardingSpec(units=("inner",))),
    (lambda: Wrapped(Tied()), ps.ShardingSpec(units=("Tied",))),
    (Recurrent, ps.ShardingSpec(units=("blocks.*",))),
    (lambda: Wrapped(Recurrent()), ps.ShardingSpec(units=("inner",))),
    (lambda: Wrapped(Recurrent()), ps.ShardingSpec(units=("scale",))),
    (Crossed, ps.ShardingSpec()),
    (Crossed, ps.ShardingSpec(units=("left", "right", "left.0"))),
    (lambda: Wrapped(Crossed()), ps.ShardingSpec(units=("inner",))),
    (Stack, ps.ShardingSpec(units=("encoder.*",), root=("decoder.*",))),
    (Stack, ps.ShardingSpec(units=("**.mlp",))),
    (_mixed_dtypes, ps.ShardingSpec(ignored=("1",))),
    (_mixed_dtypes, ps.ShardingSpec(freeze=("1.bias",))),
    (Tied, ps.ShardingSpec(ignored=("embed", "head"))),
    (lambda: _mixed_dtypes().requires_grad_(False), ps.ShardingSpec()),
    (lambda: nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.ReLU()), ps.ShardingSpec(units=("0",))),
    (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4), 2, enable_nested_tensor=False),
        ps.ShardingSpec(units=("layers.*",)),
    ),
]


@pytest.mark.parametrize(("build", "spec"), SOUND)
def test_no_false_alarms(build, spec):
    spec.resolve(build(), SHARDED)


@pytest.mark.parametrize("field", ["units", "forward_methods", "root", "ignored", "freeze"])
def test_a_string_where_a_tuple_belongs_is_refused(field):
    with pytest.raises(TypeError, match=rf"ShardingSpec.{field} is a tuple of rules, got 'abc'; write \('abc',\)"):
        ps.ShardingSpec(**{field: "abc"})


def test_specs_are_values():
    assert ps.ShardingSpec(("a", ps.Unit("b"))) == ps.ShardingSpec([ps.Unit("a"), "b"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ShardingSpec\.root holds str, got Unit"):
        ps.ShardingSpec(root=(ps.Unit("a"),))  # type: ignore[arg-type]
    assert hash(ps.ShardingSpec(("a",))) == hash(ps.ShardingSpec(("a",)))


def _tied_gradient(runtime: ps.Runtime, tokens: torch.Tensor) -> dict[str, Any]:
    module, optimizer = ps.shard(Tied(), runtime=runtime), ps.sgd(0.1)
    state = ps.init(module, optimizer, ps.key(0))

    def loss(model: nn.Module, x: torch.Tensor, key: ps.Key) -> ps.Mean:
        return ps.Mean(model(x).square().sum(), len(x))

    grads = ps.value_and_grad(module, loss)(state.params, state.buffers, tokens, state.key).grads
    new, _ = ps.train_step(module, loss, optimizer)(state, tokens)
    changed = whole(new.params["embed.weight"]) != whole(state.params["embed.weight"])
    return {"grads": {name: whole(grad).tolist() for name, grad in grads.items()}, "changed": changed.all(1).tolist()}


def _many_models() -> int:
    """Built, sharded, used and dropped: what one left behind must not be taken for a tie of the next."""
    models = []
    with runtime_on((1, 2)) as runtime:
        for i in range(50):
            model = Wrapped(Tied()) if i % 2 else nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            spec = ps.ShardingSpec(units=("inner",)) if i % 2 else ps.ShardingSpec(units=("0", "1"))
            module = ps.shard(model, spec, runtime)
            ps.init(module, ps.sgd(0.1), ps.key(i))
            models.append(weakref.ref(model))
            del model, module
        gc.collect()
        return sum(model() is not None for model in models)


def _on_ranks(topology: tuple[int, int]) -> dict[str, Any]:
    alive = _many_models()
    with runtime_on(topology) as runtime:
        rows = torch.arange(3).chunk(2)[runtime.rank]
        return {"alive": alive, "tied": _tied_gradient(runtime, rows)}


def test_b07_a_tied_weight_is_one_leaf_and_many_models_raise_no_false_alarm():
    reference = _tied_gradient(ps.shard(nn.Identity()).runtime, torch.arange(3))
    assert list(reference["grads"]) == ["embed.weight"]
    for results in run_on((1, 2), _on_ranks):
        assert results["alive"] == 0
        assert results["tied"]["changed"] == reference["changed"] == [True] * 3
        assert list(results["tied"]["grads"]) == ["embed.weight"]
        torch.testing.assert_close(
            torch.tensor(results["tied"]["grads"]["embed.weight"]), torch.tensor(reference["grads"]["embed.weight"])
        )
