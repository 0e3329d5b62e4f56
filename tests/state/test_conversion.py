"""Converted models: what every reader of the field opens, made whole or not at all, a tensor at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import load_torch_model, save_torch_state_dict, split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file

import purestep.state.exchange.conversion as conversion
from purestep.state.checkpoint.saving import save
from purestep.state.exchange.conversion import convert, parse_size
from purestep.state.exchange.importing import import_params
from purestep.state.files.manifest import FORMATS, CheckpointError
from purestep.state.files.safetensors_files import DTYPES
from tests.state.test_checkpoint import make_state
from tests.state.test_importing import assert_equal, dcp_save, make_tensors


def read_back(folder: Path) -> dict[str, torch.Tensor]:
    """What plain safetensors finds in a folder."""
    read: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        part = load_file(file)
        assert not read.keys() & part.keys()
        read |= part
    return read


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def save_config(folder: Path, **fields) -> bytes:
    text = json.dumps({"model_type": "x", **fields}).encode()
    (folder / "config.json").write_bytes(text)
    return text


@pytest.mark.parametrize("format", FORMATS)
def test_checkpoints_become_one_file(tmp_path, format):
    state = make_state()
    report = convert(save(tmp_path / "x", state, format=format), tmp_path / "deep/out")
    assert names_in(tmp_path / "deep/out") == ["model.safetensors"]
    assert_equal(read_back(tmp_path / "deep/out"), {**state.params, **state.buffers})
    assert (report.num_tensors, report.casts, report.left_out, report.notes) == (3, {}, (), ())
    assert dict(report.files) == {"model.safetensors": (tmp_path / "deep/out/model.safetensors").stat().st_size}
    assert names_in(tmp_path / "deep") == ["out", "out/model.safetensors"]  # no leftover beside


def test_what_others_write_becomes_the_same_folder(tmp_path):
    tensors = make_tensors()
    save_file(tensors, tmp_path / "plain.safetensors")
    (tmp_path / "hub").mkdir()
    save_torch_state_dict(tensors, tmp_path / "hub", max_shard_size=500)
    dcp_save({"model": tensors, "optimizer": {"lr": 0.1}}, tmp_path / "run/pytorch_model_fsdp_0")
    sources = ["plain.safetensors", "hub", "run", "run/pytorch_model_fsdp_0"]
    for i, source in enumerate(sources):
        convert(tmp_path / source, tmp_path / f"out{i}", max_shard_size=700)
        assert_equal(read_back(tmp_path / f"out{i}"), tensors)
    folders = [{f.name: f.read_bytes() for f in (tmp_path / f"out{i}").iterdir()} for i in range(len(sources))]
    assert all(folder == folders[0] for folder in folders[1:])
    convert(tmp_path / "out0", tmp_path / "again", max_shard_size=700)
    assert {f.name: f.read_bytes() for f in (tmp_path / "again").iterdir()} == folders[0]


def test_the_layout_is_the_hubs(tmp_path):
    model = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(6)))
    state = make_state(params=dict(model.state_dict()), buffers={}, opt_state={})
    convert(save(tmp_path / "x", state), tmp_path / "out", max_shard_size="4KB")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    theirs = split_torch_state_dict_into_shards(dict(sorted(state.params.items())), max_shard_size="4KB")
    assert index["weight_map"] == theirs.tensor_to_filename
    assert index["metadata"] == theirs.metadata
    assert len(theirs.filename_to_tensors) > 2
    for file, names in theirs.filename_to_tensors.items():
        assert sorted(load_file(tmp_path / "out" / file)) == sorted(names)
        assert (tmp_path / "out" / file).stat().st_size < 5000
    other = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(6)))
    load_torch_model(other, tmp_path / "out", strict=True, safe=True)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


def test_a_tensor_larger_than_a_file_has_one_of_its_own(tmp_path):
    save_file({"a": torch.ones(4), "b": torch.ones(1000), "c": torch.ones(4)}, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "out", max_shard_size=100)
    assert [list(load_file(file)) for file in sorted((tmp_path / "out").glob("*.safetensors"))] == [["a"], ["b"], ["c"]]


def test_casts_are_made_of_floating_point_tensors_alone_and_told(tmp_path):
    tensors = make_tensors() | {"z": torch.ones(2, dtype=torch.complex64)}
    save_file(tensors, tmp_path / "x.safetensors")
    before = save_config(tmp_path, torch_dtype="float32", dtype="float32")
    report = convert(tmp_path / "x.safetensors", tmp_path / "out", dtype=torch.bfloat16)
    cast = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    assert_equal(read_back(tmp_path / "out"), cast)
    counts = {"float16 -> bfloat16": 1, "float32 -> bfloat16": 2, "float64 -> bfloat16": 1}
    assert dict(sorted(report.casts.items())) == counts
    assert "float32 -> bfloat16: 2 tensors" in str(report)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == {"model_type": "x", "torch_dtype": "bfloat16", "dtype": "bfloat16"}
    assert "with the new dtype and torch_dtype" in report.notes[0]
    convert(tmp_path / "x.safetensors", tmp_path / "same")
    assert (tmp_path / "same/config.json").read_bytes() == before


def test_a_cast_that_would_make_infinities_is_refused(tmp_path):
    save_file(
        {"w": torch.tensor([1.0, float("inf"), float("nan")]), "big": torch.tensor([7e4])}, tmp_path / "x.safetensors"
    )
    with pytest.raises(ValueError, match="'big' has values that are too large for float16"):
        convert(tmp_path / "x.safetensors", tmp_path / "out", dtype="float16")
    assert names_in(tmp_path) == ["x.safetensors"]
    convert(tmp_path / "x.safetensors", tmp_path / "out", dtype="bfloat16")  # what was not finite may stay so


@pytest.mark.parametrize("name", conversion.CASTS)
def test_every_floating_point_dtype_can_be_cast(tmp_path, name):
    dtypes = [dtype for dtype in DTYPES if dtype.is_floating_point]
    assert len(dtypes) >= 6
    tensors = {str(dtype): torch.tensor([1.0, 2.0, 0.5]).to(dtype) for dtype in dtypes}
    save_file(tensors, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "out", dtype=name)
    for tensor in read_back(tmp_path / "out").values():
        assert tensor.dtype == conversion.CASTS[name]
        assert tensor.tolist() == [1.0, 2.0, 0.5]


def test_averages_go_beside_the_params_or_in_their_place(tmp_path):
    state = make_state(ema={"a": torch.full((3, 2), 9.0)})
    path = save(tmp_path / "x", state)
    averaged = {**state.params, **state.buffers, "a": state.ema["a"]}
    convert(path, tmp_path / "both", include_ema=True, max_shard_size=30)
    assert_equal(read_back(tmp_path / "both"), {**state.params, **state.buffers})
    assert_equal(read_back(tmp_path / "both/ema"), averaged)
    with import_params(tmp_path / "both/ema") as params:
        assert len(params) == 3
    convert(path, tmp_path / "only", ema_only=True)
    assert_equal(read_back(tmp_path / "only"), averaged)
    convert(path, tmp_path / "both", overwrite=True)
    assert names_in(tmp_path / "both") == ["model.safetensors"]
    with pytest.raises(ValueError, match="choose one"):
        convert(path, tmp_path / "no", ema_only=True, include_ema=True)
    for option in ("ema_only", "include_ema"):
        with pytest.raises(ValueError, match="holds no EMA"):
            convert(save(tmp_path / "y", make_state()), tmp_path / "no", **{option: True})
    assert not (tmp_path / "no").exists()


def test_the_config_is_the_one_beside_the_source(tmp_path):
    run = tmp_path / "run"
    path = save(run / "checkpoints/step-00000004", make_state())
    (tmp_path / "config.json").write_text("not this one")
    convert(path, tmp_path / "none")
    assert names_in(tmp_path / "none") == ["model.safetensors"]
    text = save_config(run)
    report = convert(path, tmp_path / "out")
    assert (tmp_path / "out/config.json").read_bytes() == text
    assert report.notes == (f"config.json is that of {run}",)
    (run / "config.json").unlink()
    (run / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json is a link, which is not followed"):
        convert(path, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_exists_is_not_lost(tmp_path):
    path = save(tmp_path / "x", make_state())
    old = tmp_path / "out"
    convert(path, old, max_shard_size=20)
    files = names_in(old)
    with pytest.raises(FileExistsError, match=r"the target .*out exists: choose another, or overwrite it"):
        convert(path, old)
    assert names_in(old) == files
    for name in ("tokenizer.json", "config.json"):
        (old / name).write_text("{}")
        with pytest.raises(FileExistsError, match=f"holds {name}, which would be lost"):
            convert(path, old, overwrite=True)
        (old / name).unlink()
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError, match="is a file"):
        convert(path, tmp_path / "file", overwrite=True)
    convert(path, old, overwrite=True)
    assert names_in(old) == ["model.safetensors"]
    (tmp_path / "empty").mkdir()
    convert(path, tmp_path / "empty")
    assert names_in(tmp_path / "empty") == ["model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "out", "x"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("x", "holds the source"),
        (".", "holds the source"),
        ("x/model", "is a checkpoint, or in one"),
        ("x/new", "is a checkpoint, or in one"),
        ("model.safetensors", "looks like a file"),
    ],
)
def test_targets_that_would_do_harm_are_refused(tmp_path, target, message):
    path = save(tmp_path / "x", make_state())
    before = names_in(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=message):
            convert(path, tmp_path / target, overwrite=overwrite)
    assert names_in(tmp_path) == before


@pytest.mark.parametrize("format", FORMATS)
def test_a_damaged_source_leaves_nothing_behind(tmp_path, format):
    path = save(tmp_path / "x", make_state(), format=format)
    file = max((path / ("state" if format == "dcp" else "model")).iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"is damaged: .*{file.name}"):
        convert(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_write_that_fails_leaves_the_old_model_and_nothing_else(tmp_path, monkeypatch):
    path = save(tmp_path / "x", make_state())
    convert(path, tmp_path / "out")
    before = (tmp_path / "out/model.safetensors").read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion.SafetensorsWriter, "_append_tensors", full)
    with pytest.raises(CheckpointError, match=r"out could not be written: .*No space left"):
        convert(path, tmp_path / "out", overwrite=True)
    monkeypatch.setattr(
        conversion.SafetensorsWriter, "_append_tensors", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        convert(path, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out/model.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "x"]


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("7", 7), (7, 7), ("200kb", 200_000), ("3B", 3), ("2TB", 2 * 10**12)],
)
def test_sizes(size, num_bytes):
    assert parse_size(size) == num_bytes


@pytest.mark.parametrize("size", ["", "x", "-5", 0, "0GB", "5GiB", "5 G B", True, None, "0.1B"])
def test_sizes_that_are_none(size):
    with pytest.raises(ValueError, match=r"expected bytes or a size like 500MB or 5GB"):
        parse_size(size)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", torch.int64, "", "half"])
def test_dtypes_that_nothing_is_cast_to(tmp_path, dtype):
    with pytest.raises(ValueError, match="dtype must be one of float64, float32, bfloat16, float16"):
        convert(save(tmp_path / "x", make_state()), tmp_path / "out", dtype=dtype)


MEMORY = """
import resource, sys
import purestep as ps, torch
from safetensors.torch import save_file
source, target = sys.argv[1:]
ps.convert(source + "/small", target + "/small")  # whatever is loaded once
peak = lambda: int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1000
before = peak()
ps.convert(source + "/big", target + "/big", dtype="bfloat16" if source.endswith("safetensors") else None)
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kind", ["safetensors", "dcp", "plain"])
def test_memory_is_bounded_by_the_largest_tensor(tmp_path, kind):
    def make(megabytes):
        return {f"w{i}": torch.full((2_500_000,), float(i)) for i in range(megabytes // 10)}

    for size, megabytes in {"small": 10, "big": 300}.items():
        if kind == "plain":
            (tmp_path / kind / size).mkdir(parents=True)
            save_file(make(megabytes), tmp_path / kind / size / "model.safetensors")
        else:
            save(tmp_path / kind / size, make_state(params=make(megabytes), opt_state={}), format=kind)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / kind), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        # Without this, glibc's heap keeps up to 100 MB of what was freed, however much is converted.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"},
    )
    assert done.returncode == 0, done.stderr
    growth = float(done.stdout)
    assert growth < 70, f"{growth} MB more than for one tensor of 10 MB"  # 300 MB would be all of it
    assert len(read_back(tmp_path / "out/big")) == 30 + (kind != "plain")
