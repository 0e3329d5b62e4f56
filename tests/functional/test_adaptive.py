"""The adaptive optimizers against the torch.optim classes of the same names, bit for bit; lion against its paper."""

import pytest
import torch

import purestep as ps
from purestep.functional import adaptive
from tests.functional.by_hand import random_leaves, run, some_gradients, stepped
from tests.functional.properties import differences

CASES = [
    (ps.adagrad, torch.optim.Adagrad, {}),
    (ps.adagrad, torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3}),
    (ps.rmsprop, torch.optim.RMSprop, {}),
    (ps.rmsprop, torch.optim.RMSprop, {"momentum": 0.9, "weight_decay": 0.1, "alpha": 0.5}),
    (ps.rmsprop, torch.optim.RMSprop, {"momentum": 0.9, "centered": True, "eps": 1e-5}),
    (ps.nadam, torch.optim.NAdam, {}),
    (ps.nadam, torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True, "momentum_decay": 0.1}),
    (ps.nadam, torch.optim.NAdam, {"weight_decay": 0.1, "betas": (0.8, 0.9)}),
    (ps.radam, torch.optim.RAdam, {}),
    (ps.radam, torch.optim.RAdam, {"weight_decay": 0.1, "betas": (0.5, 0.7)}),
    (ps.radam, torch.optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
]
FLAGS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
every_case = pytest.mark.parametrize(
    ("ours", "theirs", "arguments"), CASES, ids=lambda x: str(getattr(x, "__name__", x))
)
every_case_and_implementation = pytest.mark.parametrize(
    ("ours", "theirs", "arguments", "implementation"),
    [(*case, name) for case in CASES for name in FLAGS if name != "fused" or case[0] is ps.adagrad],
    ids=lambda x: str(getattr(x, "__name__", x)),
)


def rate(step):
    return 0.1 / (step + 1)


@every_case_and_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_five_steps_equal_torch_bit_for_bit(ours, theirs, arguments, implementation, dtype):
    params, all_grads = random_leaves(0, dtype), [random_leaves(step, dtype) for step in range(1, 6)]
    got, state = run(ours(rate, **arguments, implementation=implementation), params, all_grads)
    wanted, slots, _ = stepped(
        lambda leaves: theirs(leaves, lr=0.1, **arguments, **FLAGS[implementation]),
        params,
        all_grads,
        map(rate, range(5)),
    )
    assert not differences(got, wanted)
    assert not differences(state[ours.__name__], slots)


@every_case_and_implementation
@pytest.mark.parametrize("inplace", [False, True])
def test_a_leaf_that_gets_a_gradient_only_sometimes_equals_torch(ours, theirs, arguments, implementation, inplace):
    params, all_grads = random_leaves(0), some_gradients()
    wanted, slots, _ = stepped(
        lambda leaves: theirs(leaves, lr=0.1, **arguments, **FLAGS[implementation]), params, all_grads, [0.1] * 5
    )
    got, state = run(ours(0.1, **arguments, implementation=implementation), params, all_grads, inplace=inplace)
    assert not differences(got, wanted)
    for slot, kept in slots.items():
        assert not differences({name: state[ours.__name__][slot][name] for name in kept}, kept)


@every_case
def test_complex_parameters_equal_torch(ours, theirs, arguments):
    dtype = torch.complex64
    params, all_grads = random_leaves(0, dtype), [random_leaves(step, dtype) for step in range(1, 4)]
    wanted, _, _ = stepped(lambda leaves: theirs(leaves, **arguments, foreach=True), params, all_grads, [0.1] * 3)
    assert not differences(run(ours(0.1, **arguments), params, all_grads)[0], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@every_case
def test_auto_computes_what_a_wide_update_computes(ours, theirs, arguments, dtype):
    # Guards against kernels that skip or garble whole vectors in some dtype, as pytorch#191763 did.
    shapes = {"w": (64,), "v": (67,)}
    params, grads = random_leaves(0, dtype, shapes), random_leaves(1, dtype, shapes)
    grads = {name: grad + grad.sign() for name, grad in grads.items()}  # squares stay within fp16
    wide, wide_grads = ({name: leaf.double() for name, leaf in tree.items()} for tree in (params, grads))
    got, _ = run(ours(0.1, **arguments), params, [grads] * 3)
    wanted, _ = run(ours(0.1, **arguments, implementation="for-loop"), wide, [wide_grads] * 3)
    for name, leaf in wanted.items():
        torch.testing.assert_close(got[name].double(), leaf, rtol=0, atol=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("ours", [ps.nadam, ps.radam, ps.adagrad])
def test_numbers_kept_on_a_device_are_read_at_once_and_written_back(ours, monkeypatch):
    optimizer = ours(0.1, implementation="foreach")
    params, all_grads = random_leaves(0), some_gradients()
    wanted = run(optimizer, params, all_grads)
    monkeypatch.setattr(adaptive, "_is_on_host", lambda tensor: False)  # the kernel gets copies
    got = run(optimizer, params, all_grads)
    assert not differences(got[0], wanted[0])
    assert not differences(got[1], wanted[1])


def lion_by_hand(params, all_grads, lr, betas, weight_decay):
    """Algorithm 2 of the paper, in the operations of its authors' code."""
    params = {name: leaf.clone() for name, leaf in params.items()}
    momenta = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    for grads in all_grads:
        for name, grad in grads.items():
            params[name].mul_(1 - lr * weight_decay)
            update = momenta[name] * betas[0] + grad * (1 - betas[0])
            params[name].add_(torch.sign(update), alpha=-lr)
            momenta[name].mul_(betas[1]).add_(grad, alpha=1 - betas[1])
    return params, momenta


@pytest.mark.parametrize("implementation", ["auto", "foreach", "for-loop"])
@pytest.mark.parametrize("inplace", [False, True])
def test_lion_is_the_algorithm_of_its_paper(implementation, inplace):
    params, all_grads = random_leaves(0, torch.float64), some_gradients(torch.float64)
    wanted, momenta = lion_by_hand(params, all_grads, 0.01, (0.8, 0.95), 0.3)
    optimizer = ps.lion(0.01, betas=(0.8, 0.95), weight_decay=0.3, implementation=implementation)
    got, state = run(optimizer, params, all_grads, inplace=inplace)
    assert not differences(got, wanted)
    torch.testing.assert_close(dict(state["lion"]["exp_avg"]), momenta, rtol=1e-14, atol=1e-15)


def zeros(dtype=torch.float32):
    return {"w": torch.zeros(1, dtype=dtype)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ps.adagrad(0.1, lr_decay=-1), "adagrad: lr_decay must be a finite number of at least 0, got -1"),
        (lambda: ps.adagrad(0.1, initial_accumulator_value=-1), "adagrad: initial_accumulator_value must be"),
        (lambda: ps.rmsprop(0.1, alpha=1.5), r"rmsprop: alpha must be a number in \[0, 1\], got 1.5"),
        (lambda: ps.rmsprop(0.1, momentum=-0.1), "rmsprop: momentum must be"),
        (lambda: ps.nadam(0.1, betas=(0.9, 1.0)), r"nadam: betas must be two numbers in \[0, 1\)"),
        (lambda: ps.nadam(0.1, momentum_decay=-1), "nadam: momentum_decay must be"),
        (lambda: ps.radam(-0.1), "radam: lr must be a finite number of at least 0, or a schedule"),
        (lambda: ps.lion(0.1, betas=(0.9,)), r"lion: betas must be two numbers in \[0, 1\), got \(0.9,\)"),
        (lambda: ps.lion(0.1, weight_decay=float("inf")), "lion: weight_decay must be a finite number"),
        (
            lambda: run(ps.radam(0.1, implementation="fused"), zeros(), [zeros()]),
            "radam: implementation='fused' does not exist in torch; use implementation='auto'",
        ),
        (
            lambda: run(ps.lion(0.1), zeros(torch.complex64), [zeros(torch.complex64)]),
            "lion: a complex parameter has no sign",
        ),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
