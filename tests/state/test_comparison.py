"""`diff`: what differs between checkpoints and states, and by how much."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys

import pytest
import torch

import purestep as ps
from purestep.state import key
from purestep.state.checkpoint.comparison import ValueChange, diff
from purestep.state.checkpoint.saving import save
from purestep.state.files.manifest import CheckpointError
from tests.state.test_checkpoint import all_formats, awkward_leaves, make_state, reseal

CHANGES = {
    "nothing": {},
    "step": {"step": 5},
    "key": {"key": key(2)},
    "value": {"buffers": {"mean": torch.zeros(3)}},
    "name": {"buffers": {"Mean": make_state().buffers["mean"]}},
    "shape": {"buffers": {"mean": make_state().buffers["mean"].reshape(1, 3)}},
    "dtype": {"buffers": {"mean": make_state().buffers["mean"].double()}},
    "ema": {"ema": {"a": torch.ones(1)}},
    "plain": {"extra": {"lr": 2.0, "n": 1, "nan": math.nan}},
    "plain's type": {"extra": {"lr": 1.0, "n": True, "nan": math.nan}},
    "no plain": {"extra": {"lr": 1.0, "nan": math.nan}},
    "sign of zero": {"extra": {"lr": 1.0, "n": 1, "nan": math.nan, "t": torch.tensor(-0.0)}},
}
BASE = make_state(extra={"lr": 1.0, "n": 1, "nan": math.nan})


@pytest.mark.parametrize("what", CHANGES)
def test_two_are_equal_when_their_digests_are_and_all_four_ways_say_the_same(tmp_path, what):
    other = BASE.replace(**CHANGES[what])
    pairs = [(save(tmp_path / "a", BASE), BASE), (save(tmp_path / "b", other, format="dcp"), other)]
    said = []
    for values in (False, True):
        for a in pairs[0]:
            for b in pairs[1]:
                found = diff(a, b, values=values)
                assert found.equal == (BASE.digest() == other.digest()) == (what == "nothing")
                said.append(dataclasses.replace(found, a="", b="", values=tuple(v.name for v in found.values)))
                assert ("equal: step" in str(found)) == found.equal
        assert len({str(x) for x in said[-4:]}) == 1, what


def test_every_kind_of_difference_is_told(tmp_path):
    a = save(tmp_path / "a", make_state(extra={"lr": 1.0, "t": torch.ones(1)}))
    b = make_state(
        step=5,
        key=key(3),
        params={"a": torch.zeros(3, 2, dtype=torch.bfloat16), "b": torch.zeros(4), "c": torch.ones(1)},
        extra={"lr": 2.0, "t": torch.zeros(1), "n": 1},
        opt_state={},
    )
    found = diff(a, b)
    assert (found.step, found.key) == ((4, 5), (make_state().key.hex(), key(3).hex()))
    assert found.only_in_a == ("opt_state/adamw/exp_avg/a", "opt_state/adamw/exp_avg/b")
    assert found.only_in_b == ("params/c", "extra/n")
    assert [str(change) for change in found.shapes] == ["params/b: (3,) / (4,)"]
    assert [str(change) for change in found.dtypes] == ["params/a: float32 / bfloat16"]
    assert [str(change) for change in found.plain] == ["extra/lr: 1.0 / 2.0"]
    assert found.values == (ValueChange("extra/t", 1),)
    assert json.loads(json.dumps(dataclasses.asdict(found)))["values"][0]["name"] == "extra/t"
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.step = None
    for line in ("step: 4 / 5", "only in b: 2\n  params/c\n  extra/n", "values differ: 1 of 4 leaves\n  extra/t"):
        assert line in str(found)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.5, 1.0], (2, 2.0, 2 / 3)),
        ([0.0, 1.0, 1.0], [-0.0, 1.0, 1.0], (1, 0.0, 0.0)),
        ([NAN, 1.0, 1.0], [NAN, 1.0, 2.0], (1, 1.0, 0.5)),
        ([NAN, 1.0, 1.0], [2.0, 1.0, 9.0], (2, NAN, NAN)),
        ([INF, INF, 1.0], [INF, -INF, 1.0], (1, INF, INF)),
        ([INF, 1.0, 1.0], [5.0, 1.0, 1.0], (1, INF, INF)),
        ([0.0, 0.0, 0.0], [1e-30, 0.0, 0.0], (1, 1e-30, 1.0)),
    ],
)
@all_formats
def test_values_are_compared_element_by_element(tmp_path, format, a, b, expected):
    a, b = (make_state(buffers={"mean": torch.tensor(x, dtype=torch.float64)}) for x in (a, b))
    paths = [save(tmp_path / name, state, format=format) for name, state in (("a", a), ("b", b))]
    for x, y in (paths, (a, b), (paths[0], b)):
        (value,) = diff(x, y, values=True).values
        assert (value.name, value.num_elements) == ("buffers/mean", 3)
        got = (value.num_differing, value.max_abs, value.max_relative)
        assert got == pytest.approx(expected, nan_ok=True, rel=1e-12)


def test_values_of_every_dtype_and_layout(tmp_path):
    leaves = {name: x for name, x in awkward_leaves().items() if x.numel() and "e8m0" not in name}
    other = {name: x.clone() for name, x in leaves.items()}
    for x in other.values():
        plain = x.is_contiguous() and x.ndim and x.stride(-1) == 1 and not x.is_conj()
        bits = x.view(torch.uint8) if plain else None
        if bits is None:
            x += 1
        else:
            bits.reshape(-1, x.element_size())[-1].bitwise_xor_(1)
    a, b = (make_state(params=x) for x in (leaves, other))
    for x, y in ((save(tmp_path / "a", a), save(tmp_path / "b", b)), (a, b)):
        found = diff(x, y, values=True)
        assert {value.name.removeprefix("params/") for value in found.values} == set(leaves)
        for value in found.values:
            name = value.name.removeprefix("params/")
            assert 1 <= value.num_differing <= leaves[name].numel(), name
            assert value.max_abs > 0 or math.isnan(value.max_abs), name
    as_doubles = {name: x.to(torch.complex128 if x.is_complex() else torch.float64) for name, x in leaves.items()}
    found = diff(a, a.replace(params=as_doubles), values=True)
    assert found.values == ()
    assert len(found.dtypes) == len([x for x in leaves.values() if x.dtype not in (torch.float64, torch.complex128)])


def test_a_large_leaf_is_compared_in_parts(tmp_path, monkeypatch):
    import purestep.state.checkpoint.measuring as measuring

    monkeypatch.setattr(measuring, "_CHUNK", 7)
    a = make_state(params={"w": torch.arange(100.0)})
    b = make_state(params={"w": torch.arange(100.0) + (torch.arange(100) % 10 == 3) * 2})
    (value,) = diff(save(tmp_path / "a", a), b, values=True).values
    assert (value.num_differing, value.max_abs) == (10, 2.0)


def test_what_is_no_checkpoint_or_a_damaged_one_is_refused(tmp_path):
    a, b = (save(tmp_path / name, make_state(step=step)) for step, name in enumerate("ab"))
    for x, y in ((a, tmp_path / "c"), (tmp_path / "c", make_state())):
        with pytest.raises(CheckpointError, match="there is no checkpoint at"):
            diff(x, y)
    table = json.loads((a / "state.json").read_text())
    table["leaves"][0]["digest"] = "0" * 16
    reseal(a, json.dumps(table))
    assert len(diff(a, b).values) == 1
    with pytest.raises(CheckpointError, match=r"a is damaged: .* digest: buffers/mean"):
        diff(a, b, values=True)


def test_two_checkpoints_need_no_torch(tmp_path):
    a, b = (save(tmp_path / name, make_state(step=step)) for step, name in enumerate("ab"))
    program = f"""
import sys, purestep as ps
print(ps.diff({str(a)!r}, {str(b)!r}))
assert not {{"torch", "numpy", "safetensors"}} & set(sys.modules), sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step: 0 / 1" in done.stdout
    assert ps.diff is diff
