"""Global norm, clipping, and how an update is called."""

import math

import pytest
import torch

import purestep as ps
from purestep.functional.transforms import call_update

NORM_ORDS = [1.0, 2.0, 3.5, math.inf]


def random_grads(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (3, 4), "b": (4,), "scalar": (), "empty": (0, 5)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()
    }


def as_one_vector(grads):
    return torch.cat([grad.double().flatten() for grad in grads.values()])


@pytest.mark.parametrize("ord", NORM_ORDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_global_norm_is_the_norm_of_one_long_vector(ord, dtype):
    grads = random_grads(dtype=dtype)
    norm = ps.global_norm(grads, ord)
    wanted = torch.linalg.vector_norm(as_one_vector(grads), ord)
    assert type(norm) is torch.Tensor
    assert norm.shape == ()
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(norm.double(), wanted, rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0)


@pytest.mark.parametrize("ord", NORM_ORDS)
def test_no_gradients_have_norm_zero(ord):
    assert ps.global_norm({}, ord) == 0
    assert ps.global_norm({"empty": torch.zeros(0, 3)}, ord) == 0


def test_mixed_dtypes_and_complex_count():
    grads = {"a": torch.tensor([3.0], dtype=torch.bfloat16), "b": torch.tensor([4.0j]), "c": torch.tensor([12.0])}
    assert ps.global_norm(grads) == 13.0


def test_large_fp32_norms_combine_without_overflow():
    grads = {str(i): torch.full((), 1.5e19) for i in range(2)}  # each square fits in fp32, their sum does not
    torch.testing.assert_close(ps.global_norm(grads), torch.tensor(1.5e19 * math.sqrt(2)))


def test_known_numbers():
    grads = {"w": torch.tensor([[3.0, 0.0], [4.0, 0.0], [12.0, 0.0]])}
    assert ps.global_norm(grads) == 13.0
    assert ps.global_norm({**grads, "u": torch.tensor([84.0])}) == 85.0
    assert ps.global_norm({**grads, "u": torch.tensor([84.0])}, math.inf) == 84.0


@pytest.mark.parametrize("inplace", [False, True])
def test_clipping_scales_to_the_limit_and_reports_the_norm_before(inplace):
    grads, metrics = random_grads(), {}
    before = {name: grad.clone() for name, grad in grads.items()}
    norm = ps.global_norm(grads)
    clipped, slots = ps.clip_by_global_norm(0.5).update(grads, {}, {}, step=0, inplace=inplace, metrics=metrics)
    assert slots == {}
    assert metrics["grad_norm"] == norm
    torch.testing.assert_close(ps.global_norm(clipped), torch.tensor(0.5))
    for name, grad in before.items():
        torch.testing.assert_close(clipped[name], grad * (0.5 / norm))
        assert (clipped[name] is grads[name]) == inplace
        if not inplace:
            assert torch.equal(grads[name], grad)


def test_gradients_within_the_limit_are_untouched_bit_for_bit():
    grads = random_grads()
    norm = ps.global_norm(grads).item()
    for limit in (norm, norm * 2):
        clipped, _ = ps.clip_by_global_norm(limit).update(grads, {}, {}, step=0)
        assert all(torch.equal(clipped[name], grad) for name, grad in grads.items())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_does_not_become_finite_silently(bad):
    metrics = {}
    grads = {"w": torch.tensor([bad, 1.0])}
    clipped, _ = ps.clip_by_global_norm(1.0).update(grads, {}, {}, step=0, metrics=metrics)
    assert not metrics["grad_norm"].isfinite()
    assert clipped["w"][0].isnan()


def test_clipping_nothing():
    assert ps.clip_by_global_norm(1.0).update({}, {}, {}, step=0) == ({}, {})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.clip_by_global_norm(0.0), "max_norm must be positive, got 0.0"),
        (lambda: ps.clip_by_global_norm(math.nan), "max_norm must be positive, got nan"),
        (lambda: ps.clip_by_global_norm(1.0, ord=0), "order of a norm must be positive .* got 0"),
        (lambda: ps.global_norm({}, -1.0), "got -1.0"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class Plain:
    def init(self, params):
        return {}

    def update(self, grads, slots, params, *, step):
        return {"seen": (step,)}, slots


class Full(Plain):
    def update(self, grads, slots, params, *, step, inplace=False, metrics=None):
        return {"seen": (step, inplace, metrics)}, slots


class Open(Plain):
    def update(self, grads, slots, params, **rest):
        return {"seen": rest}, slots


def test_only_arguments_that_an_update_takes_are_passed():
    def seen(part):
        return call_update(part, {}, {}, {}, step=3, inplace=True, metrics={})[0]["seen"]

    assert seen(Plain()) == (3,)
    assert seen(Full()) == (3, True, {})
    assert seen(Open()) == {"step": 3, "inplace": True, "metrics": {}}
    assert seen(ps.chain(only=Full())) == (3, True, {})
