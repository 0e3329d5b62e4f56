"""Params from what others write: read as they were, from where they are, and nowhere else."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file

from purestep.state.blocks import flat_bytes
from purestep.state.checkpoint.saving import save
from purestep.state.exchange.importing import import_params
from purestep.state.exchange.tensor_source import check_pieces
from purestep.state.files.manifest import FORMATS, CheckpointError
from purestep.state.files.safetensors_files import DTYPES
from tests.state.test_checkpoint import make_state


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(50, 8, generator=generator),
        "blocks.0.w": torch.randn(8, 8, generator=generator).bfloat16(),
        "blocks.1.w": torch.randn(8, 8, generator=generator).half(),
        "scale": torch.tensor(3.5, dtype=torch.float64),
        "count": torch.tensor(2**60),
        "mask": torch.tensor([True, False]),
        "nothing": torch.empty(0, 3),
    }


def read_all(source: str | Path, **options) -> dict[str, torch.Tensor]:
    with import_params(source, **options) as params:
        read = {name: stored.read() for name, stored in params.items()}
        for name, stored in params.items():
            assert (stored.name, stored.shape, stored.dtype) == (name, tuple(read[name].shape), read[name].dtype)
            assert stored.nbytes == read[name].nbytes
    return read


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert sorted(a) == sorted(b)
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(flat_bytes(a[name]), flat_bytes(b[name])), name


def dcp_save(tree: dict, folder: Path, writer: type = dcp.FileSystemWriter, **options) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process is no mistake here
        dcp.save(tree, storage_writer=writer(str(folder), **options), no_dist=True)
    return folder


def refused(source: Path, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_all(source, **options)
    return str(caught.value)


def write_index(folder: Path, weight_map) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


# Real files


def test_a_plain_file_and_the_folder_it_is_in(tmp_path):
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    assert_equal(read_all(tmp_path / "model.safetensors"), tensors)
    assert_equal(read_all(tmp_path), tensors)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert_equal(read_all(tmp_path), tensors)


def test_every_dtype_of_the_format(tmp_path):
    bits = torch.arange(16, dtype=torch.uint8)
    tensors = {str(dtype): bits.bool() if dtype == torch.bool else bits.clone().view(dtype) for dtype in DTYPES}
    assert len(tensors) > 12
    save_file(tensors, tmp_path / "x.safetensors")
    assert_equal(read_all(tmp_path / "x.safetensors"), tensors)


def test_what_the_hub_library_splits(tmp_path):
    tensors = make_tensors()
    save_torch_state_dict(tensors, tmp_path, max_shard_size=500)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_equal(read_all(tmp_path), tensors)
    assert_equal(read_all(tmp_path / "model.safetensors.index.json"), tensors)


def test_the_download_cache_of_the_hub(tmp_path):
    snapshot, blobs = tmp_path / "models--org--name/snapshots/abc", tmp_path / "models--org--name/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    tensors = make_tensors()
    (tmp_path / "plain").mkdir()
    save_torch_state_dict(tensors, tmp_path / "plain", max_shard_size=500)
    for i, file in enumerate(sorted((tmp_path / "plain").iterdir())):
        shutil.move(file, blobs / f"{i:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i:040x}")
    assert_equal(read_all(snapshot), tensors)
    outside = tmp_path / "models--org--other/blobs"
    outside.mkdir(parents=True)
    for link in snapshot.glob("*.safetensors"):
        shutil.copy(link, outside / link.name)
        link.unlink()
        link.symlink_to(outside / link.name)
    assert "is a link, which is not followed" in refused(snapshot)


@pytest.mark.parametrize("tree", ["flat", "nested", "deeper"])
def test_dcp_folders(tmp_path, tree):
    tensors = make_tensors() | {"model.inner": torch.ones(2)}  # a module may have a child called model
    trees = {
        "flat": tensors,
        "nested": {"model": tensors, "optimizer": {"state": {"exp_avg": torch.ones(2)}, "lr": 0.1}, "epoch": 3},
        "deeper": {"model": {"a": {"w": tensors["scale"]}, "b": [tensors["mask"]]}},
    }
    folder = dcp_save(trees[tree], tmp_path / "pytorch_model_fsdp_0")
    expected = tensors if tree != "deeper" else {"a.w": tensors["scale"], "b.0": tensors["mask"]}
    assert_equal(read_all(folder), expected)
    if tree != "flat":  # as accelerate's save_state lays it out
        dcp_save({"optimizer": {"state": {"exp_avg": torch.ones(2)}}}, tmp_path / "optimizer_0")
        assert_equal(read_all(tmp_path), expected)
        with import_params(folder) as params:
            left_out = ("epoch", "optimizer.lr", "optimizer.state.exp_avg") if tree == "nested" else ()
            assert params.left_out == left_out
    assert "holds no 'model', only optimizer" in refused(
        dcp_save({"optimizer": {"state": torch.ones(2)}}, tmp_path / "o")
    )
    dcp_save({"model": tensors}, tmp_path / "pytorch_model_fsdp_1")
    assert "holds several models: pytorch_model_fsdp_0, pytorch_model_fsdp_1; name one" in refused(tmp_path)


@pytest.mark.parametrize("distributed", [False, True])
def test_what_torchs_hugging_face_writer_writes(tmp_path, distributed):
    storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    tensors = {name: tensor for name, tensor in make_tensors().items() if tensor.numel()}
    dcp_save(tensors, tmp_path / "x", storage.HuggingFaceStorageWriter, save_distributed=distributed)
    assert_equal(read_all(tmp_path / "x"), tensors)


def test_checkpoints_in_every_format(tmp_path):
    state = make_state(ema={"a": torch.full((3, 2), 9.0)})
    model = {**state.params, **state.buffers}
    for format in FORMATS:
        path = save(tmp_path / format, state, format=format)
        assert_equal(read_all(path), model)
        assert_equal(read_all(path, ema=True), {**model, "a": state.ema["a"]})
    save(tmp_path / "x", make_state())
    with pytest.raises(ValueError, match="x holds no EMA"):
        import_params(tmp_path / "x", ema=True)
    save_file(make_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is no checkpoint of purestep, so it holds no EMA"):
        import_params(tmp_path / "model.safetensors", ema=True)


@pytest.mark.parametrize("format", FORMATS)
def test_a_damaged_checkpoint_is_refused_before_anything_is_read(tmp_path, format):
    path = save(tmp_path / "x", make_state(), format=format)
    file = max((path / ("state" if format == "dcp" else "model")).iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"is damaged: .*{file.name} does not match its sum"):
        import_params(path)
    if format == "safetensors":
        with import_params(path, verify=False) as params:
            assert params["a"].read().shape == (3, 2)


def test_values_that_changed_after_the_check_are_noticed_when_they_are_read(tmp_path):
    path = save(tmp_path / "x", make_state())
    with import_params(path) as params:
        model = load_file(path / "model/model.safetensors")
        save_file({name: tensor + 1 for name, tensor in model.items()}, path / "model/model.safetensors")
        with pytest.raises(CheckpointError, match=r"values of params/a \(in model/model.safetensors\) differ"):
            params["a"].read()


# Ties


def test_tied_names_become_one_and_must_agree(tmp_path):
    tensors = make_tensors() | {"head.weight": make_tensors()["embed.weight"].clone()}
    save_file(tensors, tmp_path / "x.safetensors")
    tie = ("tok.weight", "embed.weight", "head.weight")
    read = read_all(tmp_path / "x.safetensors", ties=[tie, ("not", "there")])
    assert "head.weight" not in read
    assert "embed.weight" not in read
    assert torch.equal(read["tok.weight"], tensors["embed.weight"])
    tensors["head.weight"][3, 3] += 1e-6
    save_file(tensors, tmp_path / "x.safetensors")
    message = refused(tmp_path / "x.safetensors", ties=[tie])
    assert "x.safetensors" in message
    assert "hold different values" in message
    assert len(read_all(tmp_path / "x.safetensors")) == len(tensors)


# What is not opened


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_hostile_pickle_does_not_run(tmp_path):
    folder = dcp_save({"model": make_tensors()}, tmp_path / "x")
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "owned")))
    assert "is not trusted: it asks for posix.mkdir" in refused(folder)
    metadata = dcp.FileSystemReader(str(dcp_save({"model": make_tensors()}, tmp_path / "y"))).read_metadata()
    metadata.planner_data = Payload(tmp_path / "owned")
    (tmp_path / "y/.metadata").write_bytes(pickle.dumps(metadata))
    assert "is not trusted" in refused(tmp_path / "y")
    (data,) = dcp_save({"model": {"w": torch.ones(2)}}, tmp_path / "z").glob("*.distcp")
    data.write_bytes(pickle.dumps(Payload(tmp_path / "owned")).ljust(data.stat().st_size, b"\0"))
    assert "cannot read" in refused(tmp_path / "z")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "x.pt", "x.pth", "x.ckpt"])
def test_pickles_are_not_opened(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps(Payload(tmp_path / "owned")))
    for path in (tmp_path, tmp_path / name):
        message = refused(path)
        assert name in message
        assert "pickles are not opened" in message
    assert not (tmp_path / "owned").exists()


def test_dcp_tables_that_cannot_be(tmp_path):
    folder = dcp_save({"w": torch.ones(4, 2), "v": torch.ones(2)}, tmp_path / "x")
    chunk = dcp.metadata.ChunkStorageMetadata

    def with_table(**changes) -> str:
        metadata = dcp.FileSystemReader(str(folder)).read_metadata()
        for name, value in changes.items():
            setattr(metadata.state_dict_metadata["w"], name, value)
        shutil.copytree(folder, tmp_path / "y", dirs_exist_ok=True)
        (tmp_path / "y/.metadata").write_bytes(pickle.dumps(metadata))
        return refused(tmp_path / "y")

    size = torch.Size
    assert "entry 'w' cannot be: the pieces do not add up" in with_table(chunks=[])
    two = [chunk(size((0, 0)), size((2, 2))), chunk(size((1, 0)), size((2, 2)))]
    assert "two pieces of shape (4, 2) overlap" in with_table(chunks=two)
    assert "is not in shape" in with_table(chunks=[chunk(size((1, 0)), size((4, 2)))])
    huge = size((1 << 40, 2))
    assert "more than all files together" in with_table(size=huge, chunks=[chunk(size((0, 0)), huge)])
    metadata = dcp.FileSystemReader(str(folder)).read_metadata()
    for index, info in metadata.storage_data.items():
        if index.fqn == "w":
            info.relative_path = "../outside.distcp"
    (tmp_path / "y/.metadata").write_bytes(pickle.dumps(metadata))
    assert "'../outside.distcp' is no data file of DCP" in refused(tmp_path / "y")


def test_an_index_leads_nowhere_else(tmp_path):
    outside = tmp_path / "outside.safetensors"
    save_file({"w": torch.ones(2)}, outside)
    folder = tmp_path / "x"
    (folder / "sub").mkdir(parents=True)
    save_file({"w": torch.ones(2)}, folder / "sub/in.safetensors")
    (folder / "link.safetensors").symlink_to(outside)
    os.mkfifo(folder / "pipe.safetensors")
    for name in ("../outside.safetensors", str(outside), "sub/in.safetensors", "..", "", ".", 7, None, "a\0b", "a\nb"):
        assert "is no name of a file in this folder" in refused(write_index(folder, {"w": name})), name
    assert "link.safetensors is a link" in refused(write_index(folder, {"w": "link.safetensors"}))
    assert "nowhere.safetensors does not exist" in refused(write_index(folder, {"w": "nowhere.safetensors"}))
    assert "pipe.safetensors is no file" in refused(write_index(folder, {"w": "pipe.safetensors"}))
    for map_ in ({}, [], None, "x"):
        assert "is no index of safetensors files" in refused(write_index(folder, map_))
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)
    assert "is no index of safetensors files" in refused(folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors.index.json").symlink_to(outside)
    assert "is a link" in refused(folder)


def test_an_index_and_its_files_must_agree(tmp_path):
    save_file({"w": torch.ones(2), "more": torch.ones(3)}, tmp_path / "a.safetensors")
    save_file({"w": torch.zeros(2), "v": torch.ones(1)}, tmp_path / "b.safetensors")
    where = {"w": "a.safetensors", "v": "b.safetensors"}
    with import_params(write_index(tmp_path, where)) as params:
        assert params.left_out == ("more in a.safetensors", "w in b.safetensors")
        assert torch.equal(params["w"].read(), torch.ones(2))
    assert "lists tensors that are not there: 'gone' (in a.safetensors)" in refused(
        write_index(tmp_path, where | {"gone": "a.safetensors"})
    )
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "holds several safetensors files and no *.safetensors.index.json" in refused(tmp_path)


def test_damaged_files_and_empty_places_are_named(tmp_path):
    save_file(make_tensors(), tmp_path / "x.safetensors")
    whole = (tmp_path / "x.safetensors").read_bytes()
    for size in (0, 4, 20, len(whole) // 2, len(whole) - 1):
        (tmp_path / "x.safetensors").write_bytes(whole[:size])
        assert "x.safetensors: cannot read" in refused(tmp_path / "x.safetensors")
    (tmp_path / "empty").mkdir()
    assert "empty holds nothing to import; expected a checkpoint" in refused(tmp_path / "empty")
    assert "there is nothing at" in refused(tmp_path / "nowhere")
    (tmp_path / "README.md").write_text("x")
    assert "README.md is no .safetensors file" in refused(tmp_path / "README.md")


@pytest.mark.parametrize(
    ("shape", "pieces", "fits"),
    [
        ((4,), [((0,), (2,)), ((2,), (2,))], True),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2))], True),
        ((4, 4), [((i, j), (2, 2)) for i in (0, 2) for j in (0, 2)], True),
        ((), [((), ())], True),
        ((0, 3), [((0, 0), (0, 3)), ((0, 0), (0, 3))], True),
        ((4,), [((0,), (2,)), ((1,), (2,))], False),
        ((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))], False),
        ((4, 4), [((0, 0), (4, 2)), ((0, 2), (2, 2)), ((0, 2), (2, 2))], False),
        ((4,), [((0,), (2,))], False),
        ((4,), [((-1,), (4,))], False),
        ((4,), [((0,), (4, 1))], False),
        ((4,), [((0.0,), (4,))], False),
        ((), [((), ()), ((), ())], False),
    ],
)
def test_pieces_fill_a_tensor_exactly_or_are_refused(shape, pieces, fits):
    if fits:
        check_pieces(shape, pieces)
    else:
        with pytest.raises(ValueError, match="piece"):
            check_pieces(shape, pieces)
