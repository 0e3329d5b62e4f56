"""Each optimizer against the torch.optim class of the same name, bit for bit, and what every one of them promises."""

import itertools

import pytest
import torch
from torch.optim.sgd import sgd as torch_sgd

import purestep as ps
from purestep.functional import optimizers
from purestep.functional.optimizers import _fused_sgd_is_sound

IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}
# (ours, torch's class, arguments of both)
CASES = [
    (ps.adamw, torch.optim.AdamW, {}),
    (ps.adamw, torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}),
    (ps.adamw, torch.optim.AdamW, {"weight_decay": 0.0, "amsgrad": True}),
    (ps.adam, torch.optim.Adam, {}),
    (ps.adam, torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (ps.sgd, torch.optim.SGD, {}),
    (ps.sgd, torch.optim.SGD, {"weight_decay": 0.1}),
    (ps.sgd, torch.optim.SGD, {"momentum": 0.9}),
    (ps.sgd, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (ps.sgd, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (ps.sgd, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.4}),
    (ps.sgd, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1}),
]
SHAPES = {"w": (3, 4), "b": (4,), "scalar": (), "empty": (0, 5), "conv": (2, 3, 3, 3)}
every_case = pytest.mark.parametrize(
    ("ours", "theirs", "arguments"), CASES, ids=lambda x: str(getattr(x, "__name__", x))
)
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def random_leaves(seed, dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    leaves = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: leaf.to(dtype) for name, leaf in leaves.items()}


def snapshot(tree):
    return {name: snapshot(value) if isinstance(value, dict) else value.clone() for name, value in tree.items()}


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, dict):
            assert_same(got[name], value)
        else:
            assert got[name].dtype == value.dtype, name
            assert torch.equal(bits(got[name]), bits(value)), name


def bits(leaf):
    """The leaf as integers: equal only when every bit is, the sign of zero included."""
    leaf = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    return leaf.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[leaf.itemsize])


def stepped_by_hand(theirs, arguments, params, all_grads, rates):
    """What the torch.optim class makes of `params`, and its state as {slot: {name: tensor}}."""
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    optimizer = theirs(leaves.values(), lr=rates[0], **arguments)
    for grads, rate in zip(all_grads, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        for name, leaf in leaves.items():
            leaf.grad = grads[name].clone() if name in grads else None
        optimizer.step()
    slots = {}
    for name, leaf in leaves.items():
        for slot, value in optimizer.state[leaf].items():
            slots.setdefault(slot, {})[name] = value
    return {name: leaf.detach() for name, leaf in leaves.items()}, slots


def run(optimizer, params, all_grads, **options):
    opt_state = optimizer.init(params)
    for step, grads in enumerate(all_grads):
        params, opt_state = optimizer.update(grads, opt_state, params, step=step, **options)
    return params, opt_state


def lr_schedule(step):
    return 0.1 / (step + 1)


@every_implementation
@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_five_steps_equal_torch_bit_for_bit(ours, theirs, arguments, implementation, dtype):
    if ours is ps.sgd and implementation == "fused" and dtype == torch.bfloat16 and not _fused_sgd_is_sound():
        with pytest.raises(ValueError, match="pytorch#191763"):
            run(ours(0.1, **arguments, implementation="fused"), random_leaves(0, dtype), [random_leaves(1, dtype)])
        return
    params = random_leaves(0, dtype)
    all_grads = [random_leaves(step, dtype) for step in range(1, 6)]
    got, state = run(ours(lr_schedule, **arguments, implementation=implementation), params, all_grads)
    rates = [lr_schedule(step) for step in range(5)]
    wanted, slots = stepped_by_hand(theirs, arguments | IMPLEMENTATIONS[implementation], params, all_grads, rates)
    assert_same(got, wanted)
    assert_same({slot: state[ours.__name__][slot] for slot in slots}, slots)


@every_implementation
@every_case
def test_a_leaf_that_gets_a_gradient_only_sometimes_equals_torch(ours, theirs, arguments, implementation):
    if implementation == "fused" and arguments.get("momentum"):
        pytest.skip("torch's fused SGD class cannot mix parameters with and without a momentum buffer")
    params = random_leaves(0)
    present = [("w",), ("w", "b"), ("b", "conv", "scalar"), tuple(SHAPES), ("conv",)]
    all_grads = [
        {name: grad for name, grad in random_leaves(step).items() if name in names}
        for step, names in enumerate(present, start=1)
    ]
    got, state = run(ours(0.1, **arguments, implementation=implementation), params, all_grads)
    wanted, slots = stepped_by_hand(
        theirs, arguments | IMPLEMENTATIONS[implementation], params, all_grads, [0.1] * len(all_grads)
    )
    assert_same(got, wanted)
    assert_same({slot: state[ours.__name__][slot] for slot in slots}, slots)


@every_implementation
@every_case
def test_in_place_gives_the_same_bits_in_the_given_storage(ours, theirs, arguments, implementation):
    optimizer = ours(0.1, **arguments, implementation=implementation)
    params, all_grads = random_leaves(0), [random_leaves(step) for step in range(1, 4)]
    pure = run(optimizer, params, all_grads)
    given = snapshot(params)
    before = list(given.values())
    new, state = run(optimizer, given, all_grads, inplace=True)
    assert all(a is b for a, b in zip(new.values(), before, strict=True))
    assert_same(new, pure[0])
    assert_same(state, pure[1])


@every_implementation
@every_case
def test_pure_leaves_every_argument_as_it_was(ours, theirs, arguments, implementation):
    optimizer = ours(0.1, **arguments, implementation=implementation)
    params, grads = random_leaves(0), random_leaves(1)
    opt_state = optimizer.init(params)
    for step in range(2):
        old = snapshot(params), snapshot(grads), snapshot(opt_state)
        new_params, new_state = optimizer.update(grads, opt_state, params, step=step)
        assert_same(params, old[0])
        assert_same(grads, old[1])
        assert_same(opt_state, old[2])
        ps.TrainState(
            step=0,
            params={**params, **{"new_" + k: v for k, v in new_params.items()}},
            buffers={},
            opt_state={"old": opt_state, "new": new_state},
            key=ps.key(0),
        )  # refuses shared memory
        params, opt_state = new_params, new_state


@every_implementation
@every_case
@pytest.mark.parametrize("inplace", [False, True])
def test_no_gradient_is_not_a_zero_gradient(ours, theirs, arguments, implementation, inplace):
    optimizer = ours(0.1, **arguments, implementation=implementation)
    params = random_leaves(0)
    opt_state = optimizer.init(params)
    grads = {"b": torch.ones(4)}
    new, state = optimizer.update(grads, opt_state, params, step=0, inplace=inplace)
    assert list(new) == list(params)
    for name in set(params) - {"b"}:
        assert new[name] is params[name]
        for slot, kept in state.get(ours.__name__, {}).items():
            assert kept[name] is opt_state[ours.__name__][slot][name]
    nothing, _ = optimizer.update({}, opt_state, params, step=0, inplace=inplace)
    assert all(nothing[name] is leaf for name, leaf in params.items())


@every_case
def test_abstract_init_has_the_same_leaves(ours, theirs, arguments):
    optimizer = ours(0.1, **arguments)
    params = random_leaves(0)
    real, abstract = optimizer.init(params), optimizer.init({name: leaf.to("meta") for name, leaf in params.items()})
    assert real.keys() == abstract.keys()
    for slots, abstract_slots in zip(real.values(), abstract.values(), strict=True):
        assert slots.keys() == abstract_slots.keys()
        for slot, name in itertools.product(slots, params):
            leaf, meta = slots[slot][name], abstract_slots[slot][name]
            assert (leaf.shape, leaf.dtype, meta.device.type) == (meta.shape, meta.dtype, "meta")
            assert (leaf == 0).all()


def transposed(leaf):
    return leaf.t().contiguous().t()


LAYOUTS = {
    "transposed gradient": (lambda leaf: leaf, transposed),
    "transposed parameter": (transposed, lambda leaf: leaf),
    "both transposed": (transposed, transposed),
    "columns of a wider parameter": (lambda leaf: torch.cat([leaf, leaf], 1)[:, :4], lambda leaf: leaf),
    "columns on both sides": (
        lambda leaf: torch.cat([leaf, leaf], 1)[:, :4],
        lambda leaf: torch.cat([leaf] * 2, 1)[:, :4],
    ),
    "expanded gradient": (lambda leaf: leaf, lambda leaf: leaf[:1].expand(3, 4)),
}


@every_implementation
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("optimizer", [ps.adamw, ps.sgd], ids=["adamw", "sgd"])
def test_memory_layout_does_not_change_the_result(optimizer, implementation, layout, inplace):
    lay_param, lay_grad = LAYOUTS[layout]
    leaf, grad = torch.randn(3, 4), torch.randn(3, 4)
    made = optimizer(0.1, implementation=implementation)
    wanted, wanted_state = run(made, {"w": leaf.clone()}, [{"w": lay_grad(grad).contiguous()}] * 3)
    got, state = run(made, {"w": lay_param(leaf.clone())}, [{"w": lay_grad(grad)}] * 3, inplace=inplace)
    assert_same(got, wanted)
    assert_same(state, wanted_state)


def test_canary_torch_fused_kernels_ignore_strides():
    # If this fails torch has been mended, and `_contiguous` is no longer needed on the CPU.
    param, grad = torch.zeros(2, 3), torch.arange(6.0).reshape(3, 2).t()
    arguments = {
        "weight_decay": 0.0,
        "momentum": 0.0,
        "lr": 1.0,
        "dampening": 0.0,
        "nesterov": False,
        "maximize": False,
    }
    torch_sgd([param], [grad], [None], fused=True, **arguments)
    assert not torch.equal(param, -grad)
    assert torch.equal(param.flatten(), -torch.arange(6.0))


def test_canary_torch_foreach_nesterov_adds_into_the_gradients():
    # If this fails torch has been mended, and `sgd` need not copy them.
    grad = torch.ones(2)
    arguments = {"weight_decay": 0.0, "momentum": 0.9, "lr": 1.0, "dampening": 0.0, "nesterov": True, "maximize": False}
    torch_sgd([torch.zeros(2)], [grad], [torch.ones(2)], foreach=True, **arguments)
    assert not torch.equal(grad, torch.ones(2))


def test_a_fresh_momentum_keeps_the_sign_of_zero():
    optimizer = ps.sgd(0.1, momentum=0.9)
    params = {"w": torch.tensor([-0.0, 0.0])}
    _, state = optimizer.update({"w": torch.tensor([-0.0, 0.0])}, optimizer.init(params), params, step=0)
    assert torch.signbit(state["sgd"]["momentum_buffer"]["w"]).tolist() == [True, False]


def test_auto_is_fused_where_it_can_be_and_foreach_elsewhere():
    params, all_grads = random_leaves(0), [random_leaves(step) for step in range(1, 4)]
    by = {name: run(ps.adamw(0.1, implementation=name), params, all_grads)[0] for name in ("auto", *IMPLEMENTATIONS)}
    assert_same(by["auto"], by["fused"])
    assert not all(torch.equal(by["fused"][name], by["foreach"][name]) for name in params)
    complex_params = random_leaves(0, torch.complex64)
    complex_grads = [random_leaves(step, torch.complex64) for step in range(1, 4)]
    auto, _ = run(ps.adamw(0.1), complex_params, complex_grads)
    foreach, _ = run(ps.adamw(0.1, implementation="foreach"), complex_params, complex_grads)
    assert_same(auto, foreach)


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


def test_a_parameter_counts_its_own_updates():
    optimizer, params = ps.sgd(0.1, momentum=0.9, dampening=0.5), random_leaves(0)
    _, state = run(optimizer, params, [{"w": torch.ones(3, 4)}, {"w": torch.ones(3, 4), "b": torch.ones(4)}])
    assert {name: int(count) for name, count in state["sgd"]["step"].items()} == {
        "w": 2, "b": 1, "scalar": 0, "empty": 0, "conv": 0
    }  # fmt: skip


@pytest.mark.parametrize("implementation", ["foreach", "for-loop"])
def test_counts_kept_on_a_device_are_read_at_once_and_still_advance(implementation, monkeypatch):
    optimizer, params = ps.adamw(0.1, implementation=implementation), random_leaves(0)
    all_grads = [random_leaves(step) for step in range(1, 4)]
    wanted = run(optimizer, params, all_grads)
    # As if the counts were on a device: the kernel gets copies.
    monkeypatch.setattr(optimizers, "_on_host", lambda steps: [step.clone() for step in steps])
    got = run(optimizer, params, all_grads)
    assert_same(got[0], wanted[0])
    assert_same(got[1], wanted[1])


def test_lr_follows_the_step_and_is_reported():
    metrics = {}
    optimizer = ps.sgd(ps.linear(1.0, 0.0, 4))
    params, _ = optimizer.update({"w": torch.ones(())}, {}, {"w": torch.ones(())}, step=1, metrics=metrics)
    assert metrics == {"lr": 0.75}
    assert params["w"] == 0.25


@every_implementation
def test_a_tensor_step_gives_the_same_update(implementation):
    optimizer = ps.adamw(ps.cosine(0.1, 10), implementation=implementation)
    params, grads, metrics = random_leaves(0), random_leaves(1), {}
    opt_state = optimizer.init(params)
    wanted, _ = optimizer.update(grads, opt_state, params, step=3)
    got, _ = optimizer.update(grads, opt_state, params, step=torch.tensor(3), metrics=metrics)
    assert metrics["lr"].shape == ()
    for name, leaf in wanted.items():
        torch.testing.assert_close(got[name], leaf, rtol=1e-6, atol=1e-7)


@every_implementation
@every_case
def test_updates_keep_no_graph_and_work_on_leaves_that_require_grad(ours, theirs, arguments, implementation):
    optimizer = ours(0.1, **arguments, implementation=implementation)
    params = {"w": torch.nn.Parameter(torch.ones(2))}
    new, _ = run(optimizer, params, [{"w": torch.ones(2)}] * 2)
    assert not new["w"].requires_grad
    assert params["w"].tolist() == [1.0, 1.0]
    run(optimizer, params, [{"w": torch.ones(2)}], inplace=True)
    assert params["w"].tolist() != [1.0, 1.0]


@every_case
def test_it_converges(ours, theirs, arguments):
    params, optimizer = {"w": torch.tensor([3.0, -2.0])}, ours(0.05, **arguments)
    opt_state = optimizer.init(params)
    for step in range(300):
        params, opt_state = optimizer.update({"w": 2 * params["w"]}, opt_state, params, step=step)
    assert params["w"].abs().max() < 0.1


def update(grads, params=None, optimizer=None, opt_state=None):
    optimizer = optimizer or ps.adamw(0.1)
    params = params or {"w": torch.zeros(2, 3)}
    return optimizer.update(grads, optimizer.init(params) if opt_state is None else opt_state, params, step=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: update({"v": torch.zeros(1)}), "gradients for unknown parameters 'v'; the parameters are 'w'"),
        (
            lambda: update({"w": torch.zeros(3, 2)}),
            r"gradient of 'w' must be like its parameter: expected shape \(2, 3\), .* on cpu; got shape \(3, 2\)",
        ),
        (lambda: update({"w": torch.zeros(2, 3, dtype=torch.bfloat16)}), "got shape .*torch.bfloat16 on cpu"),
        (lambda: update({"w": torch.zeros(2, 3, device="meta")}), "got shape .*torch.float32 on meta"),
        (lambda: update({"w": torch.zeros(2, 3)}, opt_state={}), "adamw has no 'exp_avg' for 'w'"),
        (lambda: ps.adamw(-0.1), "adamw: lr must be a finite number of at least 0, or a schedule, got -0.1"),
        (lambda: ps.adamw("0.1"), "adamw: lr must be a finite number of at least 0, or a schedule, got '0.1'"),
        (lambda: ps.adamw(0.1, betas=(0.9, 1.0)), r"adamw: betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        (lambda: ps.adam(0.1, eps=-1e-8), "adam: eps must be a finite number of at least 0, got -1e-08"),
        (lambda: ps.adam(0.1, weight_decay=-1), "adam: weight_decay must be"),
        (lambda: ps.sgd(0.1, momentum=-1), "sgd: momentum must be"),
        (lambda: ps.sgd(0.1, nesterov=True), "sgd: nesterov needs momentum and no dampening, got momentum 0.0"),
        (lambda: ps.adamw(0.1, implementation="fast"), "implementation must be one of auto, fused, foreach, for-loop"),
        (
            lambda: update(
                {"w": torch.zeros(1, dtype=torch.complex64)},
                {"w": torch.zeros(1, dtype=torch.complex64)},
                ps.adamw(0.1, implementation="fused"),
            ),
            "needs floating-point parameters .* got .*torch.complex64 on cpu.*use implementation='auto'",
        ),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@every_implementation
def test_a_failed_update_changes_nothing(implementation):
    optimizer = ps.adamw(0.1, implementation=implementation)
    params = random_leaves(0)
    opt_state, before = optimizer.init(params), snapshot(params)
    with pytest.raises(ValueError, match="must be like its parameter"):
        optimizer.update({"w": torch.ones(3, 4), "b": torch.ones(5)}, opt_state, params, step=0, inplace=True)
    assert_same(params, before)
    assert_same(opt_state, optimizer.init(params))


def test_an_optimizer_is_a_value():
    assert ps.adamw(0.1) == ps.adamw(0.1) != ps.adamw(0.2)
    assert repr(ps.sgd(0.1, momentum=0.9)).startswith("sgd(lr=0.1, ")
    assert hash(ps.adamw(ps.constant(0.1))) == hash(ps.adamw(ps.constant(0.1)))
    assert eval(repr(ps.adam(0.1, betas=[0.5, 0.9])), {"adam": ps.adam}) == ps.adam(0.1, betas=(0.5, 0.9))
