"""Clipping by value and by group, scaling, centralizing, noise and monitors, against torch or a line of code."""

import math

import pytest
import torch
from torch import nn

import purestep as ps
from purestep.functional.noise import _CHUNK, noise_of
from purestep.state.placement import Block


def random_leaves(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (2, 3, 2, 2), "scalar": (), "empty": (0, 3)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def as_parameters(grads):
    params = {name: nn.Parameter(torch.zeros_like(grad)) for name, grad in grads.items()}
    for name, grad in grads.items():
        params[name].grad = grad.clone()
    return params


def update(transform, grads, step=0, **arguments):
    return transform.update(grads, transform.init(grads), grads, step=step, **arguments)[0]


def assert_same(ours, wanted):
    assert list(ours) == list(wanted)
    for name, leaf in wanted.items():
        assert torch.equal(ours[name], leaf), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_clip_by_value_is_torchs(dtype):
    grads = random_leaves(0, dtype)
    params = as_parameters(grads)
    nn.utils.clip_grad_value_(params.values(), 0.5)
    assert_same(update(ps.clip_by_value(0.5), grads), {name: param.grad for name, param in params.items()})


def test_clip_by_value_leaves_nan_visible_and_bounds_infinity():
    clipped = update(ps.clip_by_value(2.0), {"w": torch.tensor([math.nan, math.inf, -math.inf])})["w"]
    assert clipped[0].isnan()
    assert clipped[1:].tolist() == [2.0, -2.0]


def test_each_group_is_clipped_by_its_own_norm():
    grads, metrics = random_leaves(0), {}
    clip = ps.clip_by_group({"a": ("a.*", 0.5), "others": (["b.*", "scalar"], 0.25)})
    clipped = update(clip, grads, metrics=metrics)
    assert clip.reports == tuple(metrics) == ("grad_norm/a", "grad_norm/others")
    for label, names, limit in (("a", ["a.weight", "a.bias"], 0.5), ("others", ["b.weight", "scalar"], 0.25)):
        group = {name: grads[name] for name in names}
        assert metrics[f"grad_norm/{label}"] == ps.global_norm(group)
        assert_same({n: clipped[n] for n in names}, update(ps.clip_by_global_norm(limit), group))
    assert clipped["empty"] is grads["empty"]


def test_scale_by_number_and_by_schedule():
    grads = random_leaves(0)
    assert_same(update(ps.scale(0.25), grads), {name: grad * 0.25 for name, grad in grads.items()})
    by_schedule = ps.scale(ps.linear(1.0, 0.0, 4))
    assert_same(update(by_schedule, grads, step=3), {name: grad * 0.25 for name, grad in grads.items()})
    traced = update(by_schedule, grads, step=torch.tensor(3))
    assert_same(traced, {name: grad * 0.25 for name, grad in grads.items()})


def test_centralized_gradients_have_mean_zero_for_each_output():
    grads = random_leaves(0)
    centered = update(ps.centralize(), grads)
    for name, grad in grads.items():
        if grad.ndim < 2:
            assert centered[name] is grad
        else:
            dims = tuple(range(1, grad.ndim))
            torch.testing.assert_close(centered[name], grad - grad.mean(dims, keepdim=True))
            assert torch.allclose(centered[name].mean(dims), torch.zeros(len(grad)), atol=1e-6)


def test_monitors_report_norms_and_change_nothing():
    grads, metrics = random_leaves(0), {}
    monitor = ps.monitor_norms({"a": "a.*", "all": "**"}, params=True, prefix="raw_")
    params = random_leaves(1)
    same, _ = monitor.update(grads, monitor.init(params), params, step=0, metrics=metrics)
    assert same is grads
    assert tuple(metrics) == monitor.reports
    assert metrics["raw_grad_norm/a"] == ps.global_norm({n: grads[n] for n in ("a.weight", "a.bias")})
    assert metrics["raw_param_norm/all"] == ps.global_norm(
        {n: leaf for n, leaf in params.items() if not n.startswith("a.")}
    )


def noise(key=None, std=1.0, step=0, name="w", shape=(50, 40)):
    transform = ps.add_noise(key or ps.key(0), std)
    return update(transform, {name: torch.zeros(shape)}, step=step)[name]


def test_noise_is_a_function_of_key_step_and_name():
    once = noise()
    assert torch.equal(once, noise())
    others = [noise(key=ps.key(1)), noise(step=1), noise(name="v")]
    for i, one in enumerate([once, *others]):
        for other in [once, *others][i + 1 :]:
            assert not (one == other).any()
    assert abs(float(once.mean())) < 0.1
    assert float(once.std()) == pytest.approx(1.0, abs=0.05)
    torch.testing.assert_close(noise(std=ps.linear(0.0, 1.0, 4), step=2), noise(step=2) * 0.5)


def test_noise_does_not_depend_on_the_ambient_generator_or_on_other_leaves():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    alone = noise()
    together = update(ps.add_noise(ps.key(0), 1.0), {"first": torch.zeros(3), "w": torch.zeros(50, 40)})["w"]
    assert torch.equal(alone, together)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("shape", [(5,), (7, 3), (300, 500), (2, 3 * _CHUNK // 4), ()])
def test_any_block_of_noise_is_a_block_of_the_whole(shape):
    def block(offset, lengths):
        return noise_of(Block(torch.empty(lengths), offset, shape, True, ()), ps.key(0))

    whole = block((0,) * len(shape), shape)
    assert whole.shape == shape
    if not shape:
        return
    rows = shape[0] // 2
    rest = shape[1:]
    zeros = (0,) * len(rest)
    assert torch.equal(block((0, *zeros), (rows, *rest)), whole[:rows])
    assert torch.equal(block((rows, *zeros), (shape[0] - rows, *rest)), whole[rows:])
    assert block((shape[0], *zeros), (0, *rest)).shape == (0, *rest)
    if rest:  # columns: not one run in memory
        assert torch.equal(block((0, 1), (shape[0], 2)), whole[:, 1:3])


def test_noise_of_other_dtypes():
    for dtype in (torch.bfloat16, torch.float64, torch.complex64):
        got = update(ps.add_noise(ps.key(0), 0.5), {"w": torch.zeros(4, dtype=dtype)})["w"]
        assert got.dtype == dtype
        assert bool((got != 0).all())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ps.clip_by_value(0.0), ValueError, "clip_by_value: limit must be positive, got 0.0"),
        (lambda: ps.clip_by_group({"a": ("**", -1.0)}), ValueError, "max_norm must be positive, got -1.0"),
        (lambda: ps.scale(math.inf), ValueError, "scale: factor must be a finite number, or a schedule, got inf"),
        (lambda: ps.add_noise(0, 1.0), TypeError, "add_noise takes a Key, got int"),
        (lambda: ps.add_noise(ps.key(0), -1.0), ValueError, "add_noise: std must be a finite number .* got -1.0"),
        (lambda: ps.clip_by_group({"a": ("x.*", 1.0)}).init(random_leaves(0)), ValueError, r"the rule 'x\.\*' of 'a'"),
        (lambda: ps.monitor_norms({"a": "x.*"}).init(random_leaves(0)), ValueError, "takes no parameter"),
    ],
)
def test_mistakes_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_transforms_are_values():
    makes = [
        lambda: ps.clip_by_value(1.0),
        lambda: ps.clip_by_group({"a": ("**", 1.0)}),
        lambda: ps.scale(2.0),
        lambda: ps.centralize(),
        lambda: ps.add_noise(ps.key(0), 1.0),
        lambda: ps.monitor_norms({"a": "**"}),
    ]
    for make in makes:
        assert make() == make()
        assert hash(make()) == hash(make())
        update(make(), random_leaves(0))
        assert make() == make()
    assert repr(ps.scale(2.0)) == "scale(factor=2.0)"
