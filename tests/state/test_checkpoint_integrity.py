"""Damage in random places, files that changed places, hostile files and full disks: each is found, and where it is."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import purestep.state.files.safetensors_files as safetensors_files
from purestep.state import TrainState, key
from purestep.state.blocks import allocate, flat_bytes
from purestep.state.checkpoint.checkpoints import Checkpoints
from purestep.state.checkpoint.restoring import restore
from purestep.state.checkpoint.saving import save
from purestep.state.files.dcp_archives import find_saved
from purestep.state.files.dcp_files import DcpReader, read_metadata
from purestep.state.files.integrity import open_checkpoint, verify
from purestep.state.files.manifest import FORMATS, CheckpointError, DamagedCheckpointError, LeafInfo
from purestep.state.files.safetensors_reading import SafetensorsReader
from tests.state.test_checkpoint import make_state, reseal
from tests.state.test_checkpoint_damage import _Payload, _reseal_file

all_formats = pytest.mark.parametrize("format", FORMATS)


def _state(step: int = 2) -> TrainState:
    """Leaves of some hundred bytes each, so that most places in the files are data."""
    torch.manual_seed(step)
    params = {"a": torch.randn(16, 9), "b": torch.randn(33).bfloat16(), "c": torch.randint(9, (7, 3)).to(torch.uint8)}
    moments = {name: torch.rand(p.shape) for name, p in params.items()}
    return TrainState(
        step=step,
        params=params,
        buffers={"count": torch.tensor(3)},
        opt_state={"adamw": {"exp_avg": moments}},
        key=key(0),
        extra={"t": torch.randn(8, dtype=torch.complex128)},
    )


def _leaf_places(path: Path) -> list[tuple[str, int, int, str]]:
    """(file, first byte, one past the last, leaf) of every leaf's values, from the formats' own tables."""
    places = []
    for file in path.rglob("*.safetensors"):
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        for name, entry in header.items():
            if name != "__metadata__":
                tree = "buffers/" if name == "count" else "params/"
                leaf = name if file.parent.name == "state" else tree + name
                begin, end = (8 + size + offset for offset in entry["data_offsets"])
                places.append((file.relative_to(path).as_posix(), begin, end, leaf))
    if (path / "state/.metadata").exists():
        for index, info in read_metadata(path / "state/.metadata").storage_data.items():
            name = f"state/{info.relative_path}"
            leaf = _state().leaves()[index.fqn]
            whole = tuple(slice(0, n) for n in leaf.shape)
            with (path / name).open("rb", buffering=0) as file:
                extent = find_saved(
                    file, info.offset, info.length,
                    dtype=leaf.dtype, shape=tuple(leaf.shape), cut=(whole, whole), local=leaf, done=lambda: None,
                )  # fmt: skip
            places.append((name, extent.begin, extent.end, index.fqn))
    return places


@all_formats
def test_a_bit_flipped_in_200_random_places_is_found_there(tmp_path, format):
    checkpoints = Checkpoints(tmp_path, format=format)
    older, newer = checkpoints.save(_state(1)), checkpoints.save(_state(2))
    sizes = {p.relative_to(newer).as_posix(): p.stat().st_size for p in sorted(newer.rglob("*")) if p.is_file()}
    places = _leaf_places(newer)
    if format == "safetensors_dcp":  # its params and buffers are read from model/: their copies in state/ are no leaf's
        places = [p for p in places if not (p[0].startswith("state/") and p[3].startswith(("params/", "buffers/")))]
    draw, in_data = random.Random(0), 0
    anywhere = [(name, draw.randrange(sizes[name])) for name in draw.choices(list(sizes), list(sizes.values()), k=120)]
    of_leaves = [(file, draw.randrange(begin, end)) for file, begin, end, _ in draw.choices(places, k=80)]
    for i, (name, place) in enumerate(anywhere + of_leaves):
        data = bytearray((newer / name).read_bytes())
        data[place] ^= 1 << draw.randrange(8)
        whole = (newer / name).read_bytes()
        (newer / name).write_bytes(data)
        hit = [leaf for file, begin, end, leaf in places if file == name and begin <= place < end]
        for read in (lambda: restore(newer, _state()), lambda: verify(newer)):
            with pytest.raises(DamagedCheckpointError) as caught:
                read()
            said = str(caught.value)
            assert name in said, (name, place, said)
            assert all(repr(leaf) in said for leaf in hit), (name, place, said)
            if hit:
                assert said.count("'") == 2, said  # and no other leaf
        if i % 10 == 0:
            assert checkpoints.latest() == older
            assert checkpoints.restore_latest(_state()).digest() == _state(1).digest()
        in_data += bool(hit)
        (newer / name).write_bytes(whole)
    assert in_data >= 80
    assert restore(newer, _state()).digest() == _state(2).digest()


@all_formats
def test_files_that_changed_places_in_a_checkpoint_are_noticed(tmp_path, format, monkeypatch):
    monkeypatch.setattr(safetensors_files, "MAX_FILE_BYTES", 300)
    monkeypatch.setattr(safetensors_files, "SHARD_FILE_BYTES", 300)
    path = save(tmp_path / "x", _state(), format=format)
    names = [p.relative_to(path).as_posix() for p in sorted(path.rglob("*")) if p.is_file()]
    assert len(names) >= (4 if format == "dcp" else 6)
    for one in names:
        for other in names[: names.index(one)]:
            _swap(path / one, path / other)
            with pytest.raises(DamagedCheckpointError) as caught:
                restore(path, _state())
            assert one in str(caught.value) or other in str(caught.value)
            _swap(path / one, path / other)
    assert restore(path, _state()).digest() == _state().digest()


def _swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def test_a_damaged_file_of_many_leaves_is_not_a_list_of_them_all(tmp_path):
    path = save(tmp_path / "x", make_state(params={f"p{i}": torch.ones(2) for i in range(20)}))
    (path / "model/model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"0 bytes instead of \d+ \(wrong: 'buffers/mean', .* and 16 more\)"):
        verify(path)


# --- hostile files --------------------------------------------------------------------------------------------------


@all_formats
def test_a_pickle_in_the_place_of_any_file_does_not_run(tmp_path, format):
    """Even when its sums and sizes are those that the tables name."""
    state = make_state()
    save(tmp_path / "good", state, format=format)
    payload = pickle.dumps(_Payload(tmp_path / "ran"))
    names = [p.relative_to(tmp_path / "good") for p in (tmp_path / "good").rglob("*") if p.is_file()]
    for name in names:
        path = tmp_path / "bad"
        shutil.copytree(tmp_path / "good", path)
        (path / name).write_bytes(payload)
        if name.name not in ("state.json", "SHA256SUMS"):
            manifest = json.loads((path / "state.json").read_text())
            manifest["files"][str(name)] = len(payload)
            _reseal_file(path, str(name))
            reseal(path, json.dumps(manifest))
            verify(path)
        elif name.name == "state.json":
            _reseal_file(path, "state.json")
        with pytest.raises(CheckpointError) as caught:
            restore(path, state)
        assert name.name in str(caught.value)
        with pytest.raises(CheckpointError):
            restore(path, state, verify=False)
        assert not (tmp_path / "ran").exists(), name
        shutil.rmtree(path)
    pickle.loads(payload)  # it works
    assert (tmp_path / "ran").exists()


def test_torch_load_and_pickle_load_are_never_called(tmp_path, monkeypatch):
    state = make_state()
    paths = [save(tmp_path / format, state, format=format) for format in FORMATS]

    def refuse(*args, **kwargs):
        raise AssertionError("called")

    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads")):
        monkeypatch.setattr(module, name, refuse)
    for path in paths:
        assert restore(path, state).digest() == state.digest()


def test_what_torch_itself_saved_is_read_whatever_its_layout(tmp_path):
    """DCP directories that others wrote hold strided tensors."""
    import torch.distributed.checkpoint as dcp

    leaves = {
        "transposed": torch.randn(4, 3).t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "sliced": torch.randn(10)[3:7],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "float8": torch.randn(5).to(torch.float8_e4m3fn),
        "uint16": torch.arange(5).to(torch.uint16),
        "complex": torch.randn(3, dtype=torch.complex128),
        "bool": torch.tensor([True, False]),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.save(leaves, checkpoint_id=tmp_path / "x", no_dist=True)
    with DcpReader(tmp_path, "x") as reader:
        for name, leaf in leaves.items():
            target = allocate(leaf, None)
            reader.read(LeafInfo(name, tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."), "whole", ""), target)
            assert torch.equal(flat_bytes(target.leaf), flat_bytes(leaf)), name


@pytest.mark.parametrize(
    ("offsets", "message"),
    [([0, 23], "at \\[0, 23\\]"), ([-4, 20], "at \\[-4, 20\\]"), ([10**9, 10**9 + 24], "at \\["), ("x", "at 'x'")],
)
def test_a_header_that_leads_out_of_its_file_is_refused(tmp_path, offsets, message):
    path = save(tmp_path / "x", make_state())
    file = path / "model/model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["a"]["data_offsets"] = offsets
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(CheckpointError, match=f"cannot read leaf 'params/a' from model/model.safetensors.*{message}"):
        restore(path, make_state(), verify=False)
    row = open_checkpoint(path).manifest.leaves["params/a"]
    target = allocate(torch.empty(3, 2), None)
    with SafetensorsReader(path) as reader, pytest.raises(CheckpointError, match="cannot read leaf 'params/a'"):
        reader.read(row, target)


# --- full disks -----------------------------------------------------------------------------------------------------


@contextmanager
def _largest_file(size: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [10, 5_000, 700_000, 3_000_000])
@all_formats
def test_a_file_size_limit_hit_anywhere_leaves_the_older_checkpoint(tmp_path, monkeypatch, format, limit):
    """In a table, in a small file, in the middle of one of several large ones that threads write side by side."""
    monkeypatch.setattr(safetensors_files, "SHARD_FILE_BYTES", 1 << 20)
    large = {f"p{i}": torch.randn(1 << 18) for i in range(4)}
    state = make_state(params=large, opt_state={"o": {"s": {n: p.clone() for n, p in large.items()}}})
    path = save(tmp_path / "x", make_state(step=1), format=format)
    began = time.monotonic()
    with _largest_file(limit), pytest.raises(CheckpointError, match=r"x: .*File too large"):
        save(path, state, format=format)
    assert time.monotonic() - began < 10
    assert os.listdir(tmp_path) == ["x"]
    assert restore(path, make_state()).step == 1
    save(path, state, format=format)
    assert restore(path, state).digest() == state.digest()


def test_a_disk_that_takes_a_part_and_then_is_full(tmp_path, monkeypatch):
    """`write` then reports fewer bytes first: what it did not take must not be lost without an error."""

    class AlmostFull:
        def __init__(self, file):
            self._file, self._room = file, 1000

        def write(self, data):
            if not self._room:
                raise OSError(28, "No space left on device")
            num = self._file.write(memoryview(data)[: self._room])
            self._room -= num
            return num

        def __getattr__(self, name):
            return getattr(self._file, name)

    opened = safetensors_files.SafetensorsWriter._open

    def open_almost_full(writer, tensors, tied):
        opened(writer, tensors, tied)
        writer._file = AlmostFull(writer._file)

    path = save(tmp_path / "x", make_state(step=1))
    with monkeypatch.context() as patched:
        patched.setattr(safetensors_files.SafetensorsWriter, "_open", open_almost_full)
        with pytest.raises(CheckpointError, match="No space left"):
            save(path, make_state(params={"a": torch.ones(500)}))
        save(path, make_state(params={"a": torch.ones(5)}))
    assert restore(path, make_state(params={"a": torch.ones(5)})).step == 4
    assert os.listdir(tmp_path) == ["x"]
