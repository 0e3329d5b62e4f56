"""Saving and restoring in one process: what survives, what is refused, and what an error says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.testing._internal.two_tensor import TwoTensor

import purestep.state.files.safetensors_files as safetensors_files
from purestep.state import TrainState, key
from purestep.state.blocks import allocate, flat_bytes
from purestep.state.checkpoint.restoring import restore
from purestep.state.checkpoint.saving import save
from purestep.state.files.integrity import describe, verify
from purestep.state.files.manifest import FORMAT_VERSION, FORMATS, CheckpointError

all_formats = pytest.mark.parametrize("format", FORMATS)


def make_state(**changes) -> TrainState:
    torch.manual_seed(0)
    params = {"a": torch.randn(3, 2), "b": torch.randn(3)}
    fields = {
        "step": 4,
        "params": params,
        "buffers": {"mean": torch.randn(3)},
        "opt_state": {"adamw": {"exp_avg": {name: torch.rand_like(p) for name, p in params.items()}}},
        "key": key(1).fold_in("run"),
    }
    return TrainState(**{**fields, **changes})


def assert_same(restored: TrainState, state: TrainState) -> None:
    assert (restored.step, restored.key) == (state.step, state.key)
    assert list(restored.leaves()) == list(state.leaves())
    for name, leaf in state.leaves().items():
        other = restored.leaves()[name]
        assert (other.dtype, other.shape) == (leaf.dtype, leaf.shape), name
        assert torch.equal(flat_bytes(leaf), flat_bytes(other)), name
    assert restored.digest() == state.digest()


def abstract_of(state: TrainState) -> TrainState:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to("meta"), state).replace(
        step=0, key=key(9)
    )


DTYPES = [
    getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
        *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool", "complex64"),
    )
]


def awkward_leaves() -> dict[str, torch.Tensor]:
    """Layouts and dtypes that serializers stumble over."""
    storage = torch.randn(10)
    leaves = {
        "transposed": torch.randn(4, 3).t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "slice_1": storage[:4],
        "slice_2": storage[4:],
        "strided": torch.randn(8)[::2],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "expanded_to_one": torch.tensor(2.5).expand(1),
        "expanded_to_none": torch.tensor(2.5).expand(2, 0),
        "empty": torch.empty(0),
        "empty_rows": torch.empty(0, 3),
        "empty_columns": torch.empty(3, 0),
        "scalar": torch.tensor(2.5),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "neg": torch.randn(3, dtype=torch.complex64).conj().imag,
        "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
    }
    for dtype in DTYPES:
        leaves[f"dtype.{dtype}"] = torch.arange(6).reshape(2, 3).to(dtype)
    return leaves


@all_formats
def test_awkward_tensors_survive_by_value_and_the_live_ones_keep_their_layout(tmp_path, format):
    leaves = awkward_leaves()
    before = {name: (leaf.stride(), leaf.data_ptr(), leaf.is_conj(), leaf.is_neg()) for name, leaf in leaves.items()}
    other = {
        "complex128": torch.randn(3, 2, dtype=torch.complex128),
        "c_scalar": torch.tensor(1j, dtype=torch.complex128),
    }
    state = make_state(
        params=leaves, opt_state={"o": {"s": {f"{n}_": x.clone() for n, x in leaves.items()}}}, extra=other
    )
    save(tmp_path / "x", state, format=format)
    assert {n: (x.stride(), x.data_ptr(), x.is_conj(), x.is_neg()) for n, x in leaves.items()} == before
    assert_same(restore(tmp_path / "x", abstract_of(state)), state)
    if format != "dcp":
        loaded = load_file(tmp_path / "x/model/model.safetensors")
        assert all(
            torch.equal(loaded[name], leaf)
            for name, leaf in leaves.items()
            if name != "nan" and leaf.element_size() > 1
        )


def test_every_tensor_is_aligned_and_the_header_says_pt(tmp_path):
    save(tmp_path / "x", make_state(params=awkward_leaves(), buffers={"odd": torch.ones(3, dtype=torch.bool)}))
    path = tmp_path / "x/model/model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert size % 8 == 0
    with safe_open(path, "pt") as file:
        for name, entry in header.items():
            assert entry["data_offsets"][0] % file.get_tensor(name).element_size() == 0, name


@all_formats
def test_every_tree_survives_with_its_types(tmp_path, format):
    extra = {
        "scale": 2.0,
        "inf": float("-inf"),
        "names": ["x", ("y", None, True, 3)],
        "net": {"w": torch.ones(2), "empty": {}, "list": [torch.zeros(1)]},
        "7": (),
        "\u00fc/\n": 1,
    }
    state = make_state(ema={"a": torch.ones(3, 2)}, extra=extra, opt_state={"clip": {}, "sgd": {"m": {}}})
    save(tmp_path / "x", state, format=format)
    restored = restore(tmp_path / "x", state)
    assert_same(restored, state)
    for value, other in ((extra, restored.extra),):
        assert repr({**value, "net": 0}) == repr({**other, "net": 0})
    assert (restored.extra["net"]["empty"], type(restored.extra["names"][1])) == ({}, tuple)
    assert restored.opt_state == {"clip": {}, "sgd": {"m": {}}}
    assert restore(save(tmp_path / "y", make_state(), format=format), make_state()).ema is None


@all_formats
def test_a_state_without_tensors_survives(tmp_path, format):
    state = make_state(params={}, buffers={}, opt_state={}, extra={"n": 1})
    assert_same(restore(save(tmp_path / "x", state, format=format), state), state)
    assert verify(tmp_path / "x").step == state.step


def test_plain_values_come_from_the_file(tmp_path):
    save(tmp_path / "x", make_state(extra={"scale": 2.0, "note": "kept"}))
    assert restore(tmp_path / "x", make_state(extra={"scale": 1.0})).extra == {"scale": 2.0, "note": "kept"}


def test_plain_readers_open_the_model_in_one_file_or_several(tmp_path, monkeypatch):
    state = make_state()
    expected = {**state.params, **state.buffers}
    save(tmp_path / "one", state)
    monkeypatch.setattr(safetensors_files, "MAX_FILE_BYTES", 24)
    save(tmp_path / "several", state)
    assert os.listdir(tmp_path / "one/model") == ["model.safetensors"]
    index = json.loads((tmp_path / "several/model/model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "a": "model-00002-of-00003.safetensors",
        "b": "model-00003-of-00003.safetensors",
        "mean": "model-00001-of-00003.safetensors",
    }
    assert index["metadata"]["total_size"] == sum(x.numel() * 4 for x in expected.values())
    several = {
        k: v for f in set(index["weight_map"].values()) for k, v in load_file(tmp_path / "several/model" / f).items()
    }
    for loaded in (load_file(tmp_path / "one/model/model.safetensors"), several):
        assert sorted(loaded) == sorted(expected)
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    assert_same(restore(tmp_path / "several", state), state)


def test_the_work_grows_as_the_number_of_leaves(tmp_path, monkeypatch):
    calls = 0
    write_names = safetensors_files.model_name

    def counted(name):
        nonlocal calls
        calls += 1
        return write_names(name)

    monkeypatch.setattr(safetensors_files, "model_name", counted)
    state = make_state(params={f"layers.{i}": torch.ones(2) for i in range(500)})
    restore(save(tmp_path / "x", state), state)
    assert 500 <= calls < 5 * 500


def test_dcp_itself_opens_the_state(tmp_path):
    import torch.distributed.checkpoint as dcp

    state = make_state()
    save(tmp_path / "x", state, format="dcp")
    loaded = {name: torch.zeros_like(leaf) for name, leaf in state.leaves().items()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(loaded, checkpoint_id=tmp_path / "x/state")
    assert all(torch.equal(loaded[name], leaf) for name, leaf in state.leaves().items())


@all_formats
def test_sha256sum_accepts_the_sums(tmp_path, format):
    save(tmp_path / "x", make_state(), format=format)
    done = subprocess.run(
        ["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=tmp_path / "x", capture_output=True, text=True
    )
    assert done.returncode == 0, done
    files = {str(p.relative_to(tmp_path / "x")) for p in (tmp_path / "x").rglob("*") if p.is_file()}
    assert {line.split(": ")[0] for line in done.stdout.splitlines()} == files - {"SHA256SUMS"}


@all_formats
def test_equal_states_make_equal_files_that_name_no_place(tmp_path, format):
    for name in ("x", "y"):
        save(tmp_path / name, make_state().clone(), format=format, metadata={"b": 1, "a": (1, 2)})
    assert (tmp_path / "x/SHA256SUMS").read_text() == (tmp_path / "y/SHA256SUMS").read_text()


@all_formats
def test_a_misfit_is_one_error_with_every_leaf_and_changes_nothing(tmp_path, format):
    state = make_state(extra={"t": torch.ones(1)})
    path = save(tmp_path / "x", state, format=format)
    asked = make_state(
        params={"a": torch.zeros(3, 2, dtype=torch.bfloat16), "b": torch.zeros(4), "c": torch.zeros(2)},
        opt_state={"adamw": {"exp_avg": {"a": torch.zeros(3, 2), "B": torch.zeros(3)}}},
        extra={"lr": 1.0},
    )
    before = asked.digest()
    with pytest.raises(CheckpointError) as caught:
        restore(path, asked)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"checkpoint {path} (step 4) does not fit the state asked for:"
    assert sorted(line.strip() for line in lines[1:]) == [
        "did you mean rename={'opt_state/adamw/exp_avg/b': 'opt_state/adamw/exp_avg/B'}?",
        "dtype of params/a: float32 in the checkpoint, bfloat16 asked for",
        "missing in the checkpoint: extra/lr",
        "missing in the checkpoint: opt_state/adamw/exp_avg/B",
        "missing in the checkpoint: params/c",
        "not in the state asked for: extra/t",
        "not in the state asked for: opt_state/adamw/exp_avg/b",
        "shape of params/b: (3,) in the checkpoint, (4,) asked for",
        "to cast, use strict='exact_but_dtype'",
    ]
    assert asked.digest() == before
    for wrong in (state.replace(opt_state={}), state.replace(ema={"a": torch.ones(1)}), state.replace(params={})):
        with pytest.raises(CheckpointError, match="does not fit"):
            restore(path, wrong)


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({"extra": {"a": {"\udc80": 2}}}, {}, ValueError, r"'extra/a/\udc80': it holds half a surrogate pair"),
        ({"extra": {"a": ["\ud83d\ude00"]}}, {}, ValueError, "'extra/a/0': it holds half a surrogate pair"),
        ({"extra": {"n": 1 << 2048}}, {}, ValueError, "'extra/n' is an integer of 2049 bits, a checkpoint keeps 2048"),
        (
            {"params": {1: torch.ones(1), "1": torch.ones(1)}},
            {},
            ValueError,
            "'params/1' and 'params/~i1' are both '1'",
        ),
        (
            {"params": {"x": torch.ones(1)}, "buffers": {"x": torch.ones(1)}},
            {},
            ValueError,
            "leaves 'buffers/x' and 'params/x' are both 'x' in model/",
        ),
        ({"params": {"__metadata__": torch.ones(1)}}, {}, ValueError, "'params/__metadata__': safetensors keeps"),
        ({"params": {"z": torch.ones(1, dtype=torch.complex128)}}, {}, ValueError, "'params/z' is torch.complex128"),
        ({"params": {"m": torch.ones(1, device="meta")}}, {}, ValueError, "'params/m' is a meta tensor"),
        ({"params": {"\ud800": torch.ones(1)}}, {}, ValueError, "cannot be written as UTF-8"),
        ({}, {"format": "pt"}, ValueError, "format must be one of 'safetensors', 'dcp', 'safetensors_dcp', got 'pt'"),
        ({}, {"metadata": {"lr": [1, {"x": float("nan")}]}}, TypeError, "metadata['lr'][1]['x'] is nan"),
        ({}, {"metadata": {"when": object}}, TypeError, "metadata['when'] is <class 'object'>"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name_before_anything_is_written(tmp_path, changes, options, error, message):
    with pytest.raises(error) as caught:
        save(tmp_path / "x", make_state(**changes), **options)
    assert message in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda leaf: leaf.to_sparse(), r"a Tensor \(torch.sparse_coo\)"),
        (lambda leaf: TwoTensor(leaf, leaf.clone()), "a TwoTensor"),
    ],
)
@all_formats
def test_a_tensor_that_is_not_dense_is_refused_by_name(tmp_path, format, convert, message):
    state = torch.utils._pytree.tree_map_only(torch.Tensor, convert, make_state())
    with pytest.raises(ValueError, match=rf"leaf 'buffers/mean' is {message}.*: a checkpoint keeps dense tensors"):
        save(tmp_path / "x", state, format=format)


def test_dcp_keeps_what_a_model_folder_cannot(tmp_path):
    one = torch.ones(1)
    odd = {"x": one, "__metadata__": one + 1, "z": torch.ones(1, dtype=torch.complex128)}
    state = make_state(params=odd, buffers={"x": one + 2})
    assert_same(restore(save(tmp_path / "x", state, format="dcp"), state), state)


def test_restore_puts_plain_leaves_where_it_is_told(tmp_path):
    state = make_state()
    save(tmp_path / "x", state)
    assert {x.device.type for x in restore(tmp_path / "x", abstract_of(state)).leaves().values()} == {"cpu"}
    # The one other device that every machine has is `meta`, which takes no values: ask what would be filled.
    assert allocate(state.params["a"], "meta").leaf.is_meta
    assert allocate(state.params["a"].to("meta"), torch.device("cpu")).leaf.device.type == "cpu"
    assert allocate(state.params["a"].to("meta"), None).leaf.device.type == "cpu"


def test_restored_leaves_are_the_callers_own(tmp_path):
    state = make_state()
    save(tmp_path / "x", state)
    first, second = restore(tmp_path / "x", state), restore(tmp_path / "x", state)
    before = state.digest()
    first.params["a"].zero_()
    assert (second.digest(), state.digest()) == (before, before)
    assert restore(tmp_path / "x", state).digest() == before


def test_a_checkpoint_can_be_moved_and_written_through_links(tmp_path):
    state = make_state()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save(tmp_path / "link/x", state)
    (tmp_path / "latest").symlink_to("real/x")
    save(tmp_path / "latest", state.replace(step=5))
    assert (tmp_path / "latest").is_symlink()
    assert os.listdir(tmp_path / "real") == ["x"]
    assert restore(tmp_path / "real/x", state).step == 5
    (tmp_path / "real").rename(tmp_path / "elsewhere")
    assert restore(tmp_path / "elsewhere/x", state).step == 5
    (tmp_path / "dangling").symlink_to("not/yet")
    assert restore(save(tmp_path / "dangling", state), state).step == 4
    assert verify(tmp_path / "not/yet").step == 4


def test_a_relative_path_is_one_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(save("x", make_state())) == "x"
    assert restore("x", make_state()).step == 4


def test_a_directory_that_is_no_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("notes")
    with pytest.raises(CheckpointError, match=r"holds 'thesis.tex'"):
        save(tmp_path / "home", make_state())
    with pytest.raises(CheckpointError, match="is a file"):
        save(tmp_path / "file", make_state())
    assert sorted(os.listdir(tmp_path)) == ["file", "home"]
    assert (tmp_path / "home/thesis.tex").read_text() == "years of work"


def test_a_newer_format_is_refused_by_number(tmp_path):
    path = save(tmp_path / "x", make_state())
    text = (path / "state.json").read_text().replace('"format_version": 1', '"format_version": 99')
    reseal(path, text)
    with pytest.raises(CheckpointError, match=rf"format version 99, this purestep reads up to {FORMAT_VERSION}"):
        restore(path, make_state())


def reseal(path: Path, manifest: str) -> None:
    """Change `state.json` as somebody would who also knows how to write sums."""
    import hashlib

    (path / "state.json").write_text(manifest)
    lines = [line for line in (path / "SHA256SUMS").read_text().splitlines() if not line.endswith("  state.json")]
    lines.append(f"{hashlib.sha256(manifest.encode()).hexdigest()}  state.json")
    (path / "SHA256SUMS").write_text("\n".join(sorted(lines, key=lambda line: line[66:])) + "\n")


def test_describe_and_verify_need_no_torch(tmp_path):
    path = save(tmp_path / "x", make_state(), metadata={"note": "first"})
    program = f"""
import sys, purestep as ps
assert ps.describe({str(path)!r}) == ps.verify({str(path)!r})
print(ps.describe({str(path)!r}))
assert not {{"torch", "numpy", "safetensors"}} & set(sys.modules), sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for text in (
        "step      4",
        "safetensors (version 1)",
        make_state().digest(),
        "note: first",
        "opt_state/adamw/exp_avg/a",
    ):
        assert text in done.stdout


def test_describe_says_what_is_there(tmp_path):
    state = make_state()
    path = save(tmp_path / "x", state, metadata={"epoch": 2})
    said = describe(path)
    assert (said.step, said.key, said.digest, said.format) == (4, state.key.hex(), state.digest(), "safetensors")
    assert said.metadata == {"epoch": 2}
    assert said.topology == {"world_size": 1, "mesh": None}
    assert said.versions["torch"] == torch.__version__
    assert said.bytes == sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    rows = {name: (row.shape, row.dtype, row.nbytes) for name, row in said.leaves.items()}
    assert rows == {
        name: (tuple(x.shape), str(x.dtype).removeprefix("torch."), x.numel() * x.element_size())
        for name, x in state.leaves().items()
    }
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        describe(tmp_path / "gone")
