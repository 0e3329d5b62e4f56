"""adafactor and muon against torch's classes, bit for bit, and who owns what."""

import pytest
import torch

import purestep as ps
from purestep.functional.muon import _muon_kernel
from tests.functional.by_hand import random_leaves, run, some_gradients, stepped
from tests.functional.properties import copied, differences

ADAFACTOR = [{}, {"eps": (1e-8, 5.0), "weight_decay": 0.1}, {"beta2_decay": -0.5, "d": 1.5}]
MUON = [{}, {"nesterov": False, "weight_decay": 0.0}, {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}]
MATRICES = {"wide": (3, 5), "tall": (6, 2), "b": (4,), "conv": (1, 8)}
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)


def rate(step):
    return 0.5 / (step + 1)


@every_dtype
@pytest.mark.parametrize("arguments", ADAFACTOR, ids=str)
@pytest.mark.parametrize("implementation", ["for-loop", "foreach"])
@pytest.mark.parametrize("inplace", [False, True])
def test_adafactor_equals_torch_bit_for_bit(arguments, implementation, dtype, inplace):
    params, all_grads = random_leaves(0, dtype), some_gradients(dtype)
    wanted, slots, _ = stepped(
        lambda leaves: torch.optim.Adafactor(leaves, **arguments, foreach=implementation == "foreach"),
        params,
        all_grads,
        map(rate, range(5)),
    )
    optimizer = ps.adafactor(rate, **arguments, implementation=implementation)
    got, state = run(optimizer, params, all_grads, inplace=inplace)
    assert not differences(got, wanted)
    assert not differences(state["adafactor"], slots)


def muon_for(arguments, **others):
    renamed = {"adjust_lr" if name == "adjust_lr_fn" else name: value for name, value in arguments.items()}
    return ps.muon(rate, **renamed, **others)


@every_dtype
@pytest.mark.parametrize("arguments", MUON, ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_muon_and_its_companion_equal_torch_bit_for_bit(arguments, dtype, inplace):
    params = random_leaves(0, dtype, MATRICES)
    all_grads = [random_leaves(step, dtype, MATRICES) for step in range(1, 5)]
    del all_grads[1]["tall"], all_grads[2]["b"]
    owned = [{name: grads[name] for name in ("wide", "tall") if name in grads} for grads in all_grads]
    matrices = {name: params[name] for name in ("wide", "tall")}
    wanted, slots, _ = stepped(
        lambda leaves: torch.optim.Muon(leaves, **arguments), matrices, owned, map(rate, range(4))
    )
    rest = {name: params[name] for name in ("b", "conv")}
    companion = ps.adamw(0.01)
    others, other_state = run(companion, rest, [{n: g[n] for n in rest if n in g} for g in all_grads])
    optimizer = muon_for(arguments, owns=("wide", "t*"), companion=companion)
    got, state = run(optimizer, copied(params), all_grads, inplace=inplace)
    assert not differences(got, {**wanted, **others})
    assert not differences(state["muon"], {**slots, **other_state})


def test_canary_torchs_muon_normalizes_a_bf16_momentum_without_nesterov():
    # If this fails torch has been mended; docs/optimizers.md mentions it.
    momentum, grad = torch.zeros(2, 2, dtype=torch.bfloat16), torch.eye(2, dtype=torch.bfloat16) * 64
    arguments = {"weight_decay": 0.0, "momentum": 0.5, "nesterov": False, "ns_coefficients": (1.0, 0.0, 0.0)}
    arguments |= {"ns_steps": 0, "eps": 1e-7, "adjust_lr_fn": None, "has_complex": False}
    _muon_kernel([torch.zeros(2, 2, dtype=torch.bfloat16)], [grad], [momentum], lr=0.1, **arguments)
    assert momentum[0, 0] < 1


def test_a_companion_can_be_a_chain():
    companion = ps.chain(clip=ps.clip_by_global_norm(0.1), inner=ps.sgd(0.5, momentum=0.9))
    optimizer = ps.chain(all=ps.muon(0.1, owns=("wide", "tall"), companion=companion))
    params, grads = random_leaves(0, shapes=MATRICES), random_leaves(1, shapes=MATRICES)
    metrics = {}
    new, state = optimizer.update(grads, optimizer.init(params), params, step=0, metrics=metrics)
    assert metrics == {"lr": 0.1}
    assert list(state["all"]) == ["momentum_buffer", "inner"]
    rest = {name: params[name] for name in ("b", "conv")}
    wanted, _ = companion.update({n: grads[n] for n in rest}, companion.init(rest), rest, step=0)
    assert not differences({name: new[name] for name in rest}, wanted)


def test_a_matrix_that_no_rule_names_belongs_to_the_companion():
    params = {"embed": torch.ones(3, 2), "blocks.0.w": torch.ones(2, 2), "blocks.0.b": torch.ones(2)}
    routing = ps.muon(0.1, owns=("blocks.**",), companion=ps.sgd(0.1)).routing(params)
    assert routing.owned == ("blocks.0.w",)
    assert routing.rest == ("embed", "blocks.0.b")
    assert str(routing).splitlines()[1].split() == ["sgd", "embed", "(3,", "2)"]


def test_without_weight_decay():
    optimizer = ps.muon(0.1, owns=("w",), companion=ps.adamw(0.1), weight_decay=0.5).without_weight_decay()
    assert optimizer.weight_decay == optimizer.companion.weight_decay == 0.0
    nested = ps.muon(0.1, owns=("w",), companion=ps.from_torch(torch.optim.AdamW, weight_decay=0.3))
    assert nested.without_weight_decay().companion.options["weight_decay"] == 0.0


def test_whole_leaf_optimizers_leave_empty_leaves_alone():
    params, grads = {"w": torch.ones(2, 2), "e": torch.ones(0, 5)}, {"w": torch.ones(2, 2), "e": torch.ones(0, 5)}
    for optimizer in (ps.adafactor(), ps.muon(0.1, owns=("*",))):
        new, _ = run(optimizer, params, [grads] * 2)
        assert new["e"].shape == (0, 5)
        assert torch.isfinite(new["w"]).all()


def init_muon(owns, companion=None):
    params = {"embed": torch.ones(3, 2), "blocks.0.w": torch.ones(2, 2), "blocks.0.b": torch.ones(2)}
    return ps.muon(0.1, owns=owns, companion=companion).init(params)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ps.muon(0.1, owns="blocks.*"), TypeError, r"owns is a tuple of globs.*write \('blocks.\*',\)"),
        (lambda: ps.muon(0.1, owns=()), ValueError, "muon: owns must be at least one glob"),
        (lambda: ps.muon(0.1, owns=("w",), companion=0.1), TypeError, "companion must be an optimizer"),
        (lambda: ps.muon(0.1, owns=("w",), ns_steps=100), ValueError, "ns_steps must be an integer"),
        (lambda: ps.muon(0.1, owns=("w",), adjust_lr="no"), ValueError, "adjust_lr must be one of original"),
        (lambda: init_muon(("blocks.**",)), ValueError, r"nothing updates 'embed', 'blocks.0.b'.*give a companion"),
        (
            lambda: init_muon(("blocks.**", "blcoks.**"), ps.sgd(0.1)),
            ValueError,
            r"the rule 'blcoks.\*\*' owns no matrix: it matches nothing",
        ),
        (
            lambda: init_muon(("blocks.*.b",), ps.sgd(0.1)),
            ValueError,
            r"owns no matrix: of what it matches \('blocks.0.b'\) nothing has two dims",
        ),
        (
            lambda: init_muon(("**",), ps.chain(momentum_buffer=ps.sgd(0.1, momentum=0.9))),
            ValueError,
            "no part of the companion can be called 'momentum_buffer'",
        ),
        (lambda: ps.adafactor(d=0.5), ValueError, "adafactor: d must be a finite number of at least 1, got 0.5"),
        (lambda: ps.adafactor(eps=(1.0,)), ValueError, "adafactor: eps must be two finite numbers"),
        (lambda: ps.adafactor(beta2_decay=0.1), ValueError, "beta2_decay must be a finite number of at most 0"),
        (lambda: ps.adafactor(implementation="fused"), ValueError, "one of for-loop, foreach"),
        (
            lambda: ps.adafactor().init({"w": torch.ones(2, dtype=torch.complex64)}),
            ValueError,
            "adafactor does not support complex parameters",
        ),
        (
            lambda: ps.adafactor().update({"w": torch.ones(2)}, {}, {"w": torch.ones(2)}, step=0),
            ValueError,
            "adafactor has no 'step' for 'w'",
        ),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
