"""Restoring what is not quite the same: casts, parts, other names, ties; and trees of any kind."""

from __future__ import annotations

import math

import pytest
import torch

import purestep as ps
from purestep.state import TrainState, key
from purestep.state.checkpoint.renaming import Renaming, suggest
from purestep.state.checkpoint.restoring import restore
from purestep.state.checkpoint.saving import save
from purestep.state.files.manifest import CheckpointError
from tests.state.test_checkpoint import abstract_of, all_formats, assert_same, make_state

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")


def with_dtype(state: TrainState, dtype: torch.dtype) -> TrainState:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(dtype), state)


# --- casts -----------------------------------------------------------------------------------------------------------


@all_formats
def test_dtypes_are_cast_when_asked_and_every_cast_is_reported(tmp_path, format, caplog):
    state = make_state()
    path = save(tmp_path / "x", state, format=format)
    asked = state.replace(params=with_dtype(state, torch.bfloat16).params)
    before = asked.digest()
    with pytest.raises(CheckpointError, match=r"to cast, use strict='exact_but_dtype'"):
        restore(path, asked)
    restored, report = restore(path, abstract_of(asked), strict="exact_but_dtype", with_report=True)
    assert_same(restored, asked.replace(params={n: p.bfloat16() for n, p in state.params.items()}))
    assert report.cast == {"params/a": ("float32", "bfloat16"), "params/b": ("float32", "bfloat16")}
    assert report.loaded == tuple(state.leaves())
    assert (report.missing, report.unexpected, report.renamed, report.excluded) == ((), (), (), ())
    assert "cast: 2: params/a (float32 -> bfloat16), params/b" in caplog.text
    assert asked.digest() == before
    caplog.clear()
    assert_same(restore(path, state, strict="exact_but_dtype"), state)
    assert caplog.text == ""


def allowed(source: torch.dtype, target: torch.dtype) -> bool:
    """The rule, by trying: no fraction, imaginary part or integer is lost."""
    if source == torch.bool or source == target:
        return True
    if target == torch.bool:
        return False
    if source.is_floating_point:
        return target.is_floating_point or target.is_complex
    if source.is_complex:
        return target.is_complex
    extremes = [torch.iinfo(source).min, torch.iinfo(source).max, torch.iinfo(source).max - 1]
    if not (target.is_floating_point or target.is_complex):
        return all(torch.iinfo(target).min <= value <= torch.iinfo(target).max for value in extremes)
    return all(torch.tensor(float(value), dtype=torch.float64).to(target).real.item() == value for value in extremes)


def test_a_cast_that_loses_more_than_precision_is_refused(tmp_path):
    dtypes = [getattr(torch, name) for name in (*FLOATS, *INTEGERS, "bool", "complex64", "complex128")]
    values = {str(dtype): torch.tensor([0, 1, 1], dtype=torch.float32).to(dtype) for dtype in dtypes}
    path = save(tmp_path / "x", make_state(params={}, buffers={}, opt_state={}, extra=values))
    for target in dtypes:
        fits = {name: x.to(target) for name, x in values.items() if allowed(x.dtype, target)}
        asked = make_state(
            params={}, buffers={}, opt_state={}, extra={name: torch.zeros(3, dtype=target) for name in values}
        )
        some = restore(path, asked, strict="partial", include=tuple(f"extra/{name}" for name in fits))
        for name, expected in fits.items():
            assert some.extra[name].dtype == target
            assert torch.equal(some.extra[name].to(torch.complex128), expected.to(torch.complex128)), (name, target)
        if len(fits) < len(values):
            with pytest.raises(CheckpointError) as caught:
                restore(path, asked, strict="exact_but_dtype")
            refused = {
                line.split(": ")[0].removeprefix("  dtype of extra/") for line in str(caught.value).split("\n")[1:]
            }
            assert refused == values.keys() - fits.keys(), target


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(70000.0, torch.float16), (1e300, torch.float32), (1e39, torch.bfloat16), (1e9, torch.float8_e5m2)],
)
def test_a_cast_out_of_range_is_refused_by_name(tmp_path, value, dtype):
    state = make_state(buffers={"mean": torch.tensor([1.0, math.inf, value], dtype=torch.float64)})
    path = save(tmp_path / "x", state)
    with pytest.raises(CheckpointError, match=r"leaf buffers/mean: it has values that torch\..* cannot hold"):
        restore(path, state.replace(buffers={"mean": torch.zeros(3, dtype=dtype)}), strict="exact_but_dtype")
    infinite = state.replace(buffers={"mean": torch.tensor([1.0, math.inf, -math.inf])})
    fine = restore(save(path, infinite), infinite, strict="exact_but_dtype")
    assert_same(fine, infinite)


# --- parts -----------------------------------------------------------------------------------------------------------


@all_formats
def test_partial_loads_what_is_in_both_and_included(tmp_path, format):
    saved = make_state(extra={"t": torch.ones(1), "lr": 0.5, "old": 1}, ema={"a": torch.ones(3, 2)})
    path = save(tmp_path / "x", saved, format=format)
    given = make_state(
        step=0,
        key=key(8),
        params={"a": torch.zeros(3, 2), "b": torch.zeros(3), "head": torch.full((2,), 7.0)},
        extra={"t": torch.zeros(1), "lr": 1.0, "new": [2, torch.zeros(1)]},
    )
    before = given.digest()
    restored, report = restore(path, given, strict="partial", with_report=True)
    assert_same(
        restored,
        given.replace(
            step=saved.step,
            key=saved.key,
            params={**saved.params, "head": given.params["head"]},
            extra={"t": torch.ones(1), "lr": 0.5, "new": given.extra["new"]},
        ),
    )
    assert report.missing == ("params/head", "extra/new/0", "extra/new/1")
    assert report.unexpected == ("ema/a", "extra/old")
    assert {"params/a", "extra/lr", "extra/t", "opt_state/adamw/exp_avg/b"} <= set(report.loaded)
    only, report = restore(path, given, strict="partial", include=["params/*"], with_report=True)
    assert_same(only, given.replace(params={**saved.params, "head": given.params["head"]}))
    assert report.loaded == ("params/a", "params/b")
    assert set(report.excluded) == {*given.leaves(), "extra/lr"} - {*report.loaded, *report.missing}
    for name, leaf in restored.leaves().items():  # nothing is shared with what was given
        assert leaf.untyped_storage().data_ptr() != given.leaves()[name].untyped_storage().data_ptr(), name
    assert given.digest() == before


def test_a_star_crosses_dots_and_slashes(tmp_path):
    saved = make_state(params={"net.0.w": torch.ones(1), "net.1.b": torch.ones(1)}, opt_state={})
    path = save(tmp_path / "x", saved)
    zeros = {name: torch.zeros(1) for name in saved.params}
    given = saved.replace(step=0, params=zeros, buffers={"mean": torch.zeros(3)}, key=key(8))
    assert restore(path, given, strict="partial", include=("p*w",)).leaves().keys() == given.leaves().keys()
    loaded = restore(path, given, strict="partial", include=("p*w", "step"), with_report=True)
    assert loaded[1].loaded == ("params/net.0.w",)
    assert (loaded[0].step, loaded[0].key) == (saved.step, given.key)


def test_partial_needs_values_for_what_is_not_loaded(tmp_path):
    path = save(tmp_path / "x", make_state())
    given = make_state(params={"a": torch.zeros(3, 2), "b": torch.zeros(3), "c": torch.zeros(2, device="meta")})
    with pytest.raises(CheckpointError, match=r"not loaded, and a meta tensor in the state given: params/c$"):
        restore(path, given, strict="partial")
    given = abstract_of(make_state())
    assert_same(restore(path, given, strict="partial"), make_state())
    with pytest.raises(CheckpointError, match=r"given: buffers/mean\n"):
        restore(path, given, strict="partial", include=("params/*",))
    with pytest.raises(CheckpointError, match=r"shape of params/b: \(3,\) in the checkpoint, \(4,\) asked for"):
        restore(path, make_state(params={"b": torch.zeros(4)}), strict="partial")
    with pytest.raises(CheckpointError, match="nothing that include lets in is in the checkpoint"):
        restore(path, make_state(params={"z": torch.zeros(1)}), strict="partial", include=("params/*",))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"strict": "exactly"},
            ValueError,
            "strict must be one of 'exact', 'exact_but_dtype', 'partial', got 'exactly'",
        ),
        ({"strict": False}, ValueError, "strict must be one of"),
        ({"include": ("params/*",)}, ValueError, r"leaves something out: that needs strict='partial'"),
        ({"strict": "partial", "include": "params/*"}, TypeError, "include takes a tuple of patterns"),
        ({"strict": "partial", "include": ("parms/*",)}, CheckpointError, "'parms/\\*' matches no leaf of the state"),
        ({"rename": {"z.*": "y.*"}}, CheckpointError, r"rename 'z\.\*' matches no leaf"),
        ({"rename": {"a": "b"}}, CheckpointError, "/a and .*/b would both become .*/b, and their values"),
        ({"rename": {"a.*": "b"}}, ValueError, "both sides need the same number of"),
        ({"rename": {"params/a": "a"}}, ValueError, "start both with a tree such as 'params/', or none"),
        ({"rename": {"a": ""}}, TypeError, r"rename takes patterns, .*, got ''"),
        ({"rename": {"a": 1}}, TypeError, r"got 1"),
        ({"rename": {"a": []}}, ValueError, "give it a new name"),
        ({"rename": "a"}, TypeError, "rename takes a mapping of patterns"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path, options, error, message):
    path = save(tmp_path / "x", make_state())
    with pytest.raises(error, match=message):
        restore(path, make_state(), **options)


# --- names -----------------------------------------------------------------------------------------------------------


def renamed_state(name: dict[str, str], part: str = "adamw", **changes) -> TrainState:
    """`make_state()` with other module paths and another name for its optimizer."""
    state = make_state()
    slots = {slot: {name.get(k, k): x for k, x in s.items()} for slot, s in state.opt_state["adamw"].items()}
    params = {name.get(k, k): x for k, x in state.params.items()}
    return state.replace(params=params, opt_state={part: slots}, **changes)


@all_formats
def test_a_rename_is_for_params_buffers_ema_and_every_slot(tmp_path, format):
    old = make_state(
        params={"old.a": torch.ones(2), "b": torch.ones(1)},
        buffers={"old.mean": torch.ones(3)},
        opt_state={"adamw": {slot: {"old.a": torch.rand(2), "b": torch.rand(1)} for slot in ("m", "v")}},
        ema={"old.a": torch.rand(2)},
        extra={"old.a": torch.rand(2)},
    )
    new = old.replace(
        params={"new.a": old.params["old.a"], "b": old.params["b"]},
        buffers={"new.mean": old.buffers["old.mean"]},
        opt_state={"adamw": {s: {"new.a": x["old.a"], "b": x["b"]} for s, x in old.opt_state["adamw"].items()}},
        ema={"new.a": old.ema["old.a"]},
    )
    path = save(tmp_path / "x", old, format=format)
    with pytest.raises(CheckpointError, match=r"did you mean rename=\{'old\.\*': 'new\.\*'\}\?$"):
        restore(path, new)
    restored, report = restore(path, abstract_of(new), rename={"old.*": "new.*"}, with_report=True)
    assert_same(restored, new)
    assert dict(report.renamed) == {
        name: name.replace("old", "new") for name in old.leaves() if "old" in name and not name.startswith("extra")
    }
    only_one = old.replace(params={"new.a": old.params["old.a"], "b": old.params["b"]})
    assert_same(restore(path, only_one, rename={"params/old.*": "params/new.*"}), only_one)
    moved = old.replace(extra={"x": {"y": old.extra["old.a"]}})
    assert_same(restore(path, moved, rename={"extra/old.a": "extra/x/y"}), moved)


def test_the_optimizers_part_of_a_chain_can_be_renamed_and_paths_with_it(tmp_path):
    path = save(tmp_path / "x", make_state())
    opt = renamed_state({}, "opt")
    with pytest.raises(CheckpointError, match=r"did you mean rename=\{'opt_state/adamw/\*': 'opt_state/opt/\*'\}\?"):
        restore(path, opt)
    assert_same(restore(path, opt, rename={"opt_state/adamw/*": "opt_state/opt/*"}), opt)
    both = renamed_state({"a": "net.a", "b": "net.b"}, "opt", buffers={"net.mean": make_state().buffers["mean"]})
    assert_same(restore(path, both, rename={"*": "net.*", "opt_state/adamw/*": "opt_state/opt/*"}), both)


def test_names_can_be_swapped(tmp_path):
    state = make_state(params={"a": torch.ones(2), "b": torch.zeros(2)}, opt_state={})
    path = save(tmp_path / "x", state)
    swapped = restore(path, state, rename={"a": "b", "b": "a"})
    assert torch.equal(swapped.params["a"], state.params["b"])
    assert torch.equal(swapped.params["b"], state.params["a"])


def test_adding_a_clip_to_a_chain_restores(tmp_path):
    params = {"w": torch.ones(2)}
    plain, clipped = (ps.chain(**clip, adamw=ps.adamw(0.1)) for clip in ({}, {"clip": ps.clip_by_global_norm(1.0)}))
    state = make_state(params=params, opt_state=plain.init(params))
    restored = restore(save(tmp_path / "x", state), state.replace(opt_state=clipped.init(params)))
    assert_same(restored, state)
    clipped.update({"w": torch.ones(2)}, restored.opt_state, restored.params, step=4)


def test_a_suggestion_is_right_for_every_leaf_it_matches():
    shape = (2,)
    assert suggest({"params/m.a": shape}, {"params/a": shape}, ["buffers/b"]) == {"params/*": "params/m.*"}
    assert suggest({"params/m.a": shape}, {"params/a": shape}, []) == {"*": "m.*"}
    assert suggest({"params/a": shape}, {"params/m.a": shape}, []) == {"m.*": "*"}
    assert suggest({"params/new.a": (3,)}, {"params/old.a": shape}, []) == {}
    assert suggest({"params/kernel": shape}, {"params/zzz": shape}, []) == {}
    assert suggest({"params/fc.weight": shape}, {"params/fc.weigth": shape}, []) == {"fc.weigth": "fc.weight"}
    found = suggest(
        {"params/encoder.0.w": shape, "opt_state/opt/m/encoder.0.w": shape},
        {"params/backbone.0.w": shape, "opt_state/adamw/m/backbone.0.w": shape},
        [],
    )
    assert Renaming.of(found).apply(["params/backbone.0.w", "opt_state/adamw/m/backbone.0.w"]) == {
        "params/backbone.0.w": ("params/encoder.0.w",),
        "opt_state/adamw/m/backbone.0.w": ("opt_state/opt/m/encoder.0.w",),
    }


# --- B16 -------------------------------------------------------------------------------------------------------------


@all_formats
def test_b16_what_does_not_fit_is_one_error_that_names_it_all(tmp_path, format):
    state = make_state()
    path = save(tmp_path / "x", state, format=format)
    one, other = torch.zeros(1), torch.zeros(1)
    slots = state.opt_state["adamw"]["exp_avg"]
    cases = {
        "a, b, c": (
            state.replace(params={**state.params, "c": one}, opt_state={"adamw": {"exp_avg": {**slots, "c": other}}}),
            ["missing in the checkpoint: opt_state/adamw/exp_avg/c", "missing in the checkpoint: params/c"],
        ),
        "a": (
            state.replace(params={"a": state.params["a"]}, opt_state={"adamw": {"exp_avg": {"a": slots["a"]}}}),
            ["not in the state asked for: opt_state/adamw/exp_avg/b", "not in the state asked for: params/b"],
        ),
        "shape": (
            state.replace(params={**state.params, "b": torch.zeros(3, 1)}),
            ["shape of params/b: (3,) in the checkpoint, (3, 1) asked for"],
        ),
        "no optimizer": (
            state.replace(opt_state={}),
            [f"not in the state asked for: opt_state/adamw/exp_avg/{name}" for name in "ab"],
        ),
        "renamed": (
            renamed_state({"b": "c"}),
            ["did you mean rename={'b': 'c'}?"]
            + [f"missing in the checkpoint: {tree}/c" for tree in ("opt_state/adamw/exp_avg", "params")]
            + [f"not in the state asked for: {tree}/b" for tree in ("opt_state/adamw/exp_avg", "params")],
        ),
    }
    for name, (asked, lines) in cases.items():
        before, message = asked.digest(), ""
        try:
            restore(path, asked)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        first, *rest = message.split("\n")
        assert first == f"CheckpointError: checkpoint {path} (step 4) does not fit the state asked for:", name
        assert sorted(line.strip() for line in rest) == lines, name
        assert asked.digest() == before, name
    assert_same(restore(path, renamed_state({"b": "c"}), rename={"b": "c"}), renamed_state({"b": "c"}))


# --- cost ----------------------------------------------------------------------------------------------------------


def test_twenty_thousand_misfits_are_found_in_linear_time(tmp_path):
    def work(num: int) -> float:
        import time

        state = make_state(params={f"old.{i}": torch.ones(1) for i in range(num)}, opt_state={})
        path = save(tmp_path / str(num), state)
        asked = state.replace(params={f"new.{i}": torch.ones(1) for i in range(num)})
        start = time.process_time()
        with pytest.raises(CheckpointError, match=r"did you mean rename={'old"):
            restore(path, asked, verify=False)
        _, report = restore(path, asked, rename={"old.*": "new.*"}, with_report=True)
        assert len(report.renamed) == num
        assert f"and {num - 8} more" in str(report)
        return time.process_time() - start

    work(100)
    assert work(8000) < 12 * work(2000) + 0.5
