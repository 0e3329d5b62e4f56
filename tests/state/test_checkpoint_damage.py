"""Damage, hostile files and dead processes: nothing wrong is ever loaded, and what was whole stays so."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import random
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch

import purestep.state.files.commit as commit
import purestep.state.files.dcp_files as dcp_files
from purestep.state import TrainState
from purestep.state.checkpoint.checkpoints import Checkpoints
from purestep.state.checkpoint.restoring import restore
from purestep.state.checkpoint.saving import save
from purestep.state.files.dcp_files import read_metadata
from purestep.state.files.integrity import verify
from purestep.state.files.manifest import FORMATS, CheckpointError, parse
from tests.dying import die_at
from tests.ranks import run_ranks
from tests.state.test_checkpoint import assert_same, make_state, reseal

all_formats = pytest.mark.parametrize("format", FORMATS)


def _damages(path: Path):
    """(what, damaged bytes) for a file: every cut of case B18, bytes added, one bit flipped."""
    data = path.read_bytes()
    for size in {0, 4, 20, len(data) // 2, len(data) - 1}:
        yield f"cut to {size}", data[:size]
    yield "8 bytes added", data + b"\0" * 8
    for place in random.Random(path.name).sample(range(len(data)), 4):
        yield f"bit flipped at {place}", data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]


@all_formats
def test_every_damage_is_found_and_named_and_an_older_checkpoint_is_used(tmp_path, format, caplog):
    state = make_state()
    checkpoints = Checkpoints(tmp_path, format=format)
    older, newer = checkpoints.save(state.replace(step=1)), checkpoints.save(state.replace(step=2))
    files = sorted(p.relative_to(newer) for p in newer.rglob("*") if p.is_file())
    assert len(files) >= 4
    for file in files:
        whole = (newer / file).read_bytes()
        for what, data in _damages(newer / file):
            (newer / file).write_bytes(data)
            for read in (verify, lambda path: restore(path, state)):
                with pytest.raises(CheckpointError) as caught:
                    read(newer)
                assert str(file) in str(caught.value), (file, what, str(caught.value))
            caplog.clear()
            assert checkpoints.latest() == older, (file, what)
            assert any(str(file) in record.getMessage() for record in caplog.records), (file, what)
            assert caplog.records[0].name == "purestep"
        (newer / file).unlink()
        with pytest.raises(CheckpointError, match=file.name):
            restore(newer, state)
        assert checkpoints.restore_latest(state).step == 1
        (newer / file).write_bytes(whole)
    assert checkpoints.restore_latest(state).step == 2
    (newer / "state.json").write_bytes(b"")
    assert_same(restore(checkpoints.save(state.replace(step=2)), state), state.replace(step=2))


def test_verify_names_everything_at_once(tmp_path):
    path = save(tmp_path / "x", make_state(), format="safetensors_dcp")
    (path / "model/model.safetensors").unlink()
    (path / "state/__0_0.distcp").write_bytes(b"")
    (path / "state/new").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        verify(path)
    for text in (
        "model/model.safetensors cannot be read",
        "__0_0.distcp has 0 bytes instead of",
        "state/new is not listed",
    ):
        assert text in str(caught.value)


def test_when_nothing_is_left_the_error_names_every_candidate(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    assert (checkpoints.steps(), checkpoints.latest()) == ([], None)
    with pytest.raises(CheckpointError, match=r"no undamaged checkpoint step-\* in .*run: \(there is none\)"):
        checkpoints.restore_latest(make_state())
    for step in (1, 2):
        path = checkpoints.save(make_state(step=step))
        (path / "model/model.safetensors").write_bytes(b"x")
    (tmp_path / "run/step-00000003").mkdir()
    (tmp_path / "run/step-new").mkdir()
    assert checkpoints.steps() == [1, 2]
    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore_latest(make_state())
    for step in (1, 2):
        assert f"step-0000000{step} is damaged: model/model.safetensors has 1 bytes" in str(caught.value)


def test_a_misfit_is_not_answered_with_an_older_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(make_state(step=1))
    checkpoints.save(make_state(step=2, params={"other": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"step 2\) does not fit"):
        checkpoints.restore_latest(make_state())


def test_steps_are_ordered_as_numbers(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (100_000_000, 99_999_999, 0):
        checkpoints.save(make_state(step=step))
    assert checkpoints.steps() == [0, 99_999_999, 100_000_000]
    assert checkpoints.latest().name == "step-100000000"


def test_files_swapped_between_two_checkpoints_are_noticed(tmp_path):
    state = make_state()
    one, two = (
        save(tmp_path / "1", state),
        save(tmp_path / "2", state.replace(params={**state.params, "b": torch.ones(3)})),
    )
    shutil.copy(two / "model/model.safetensors", one / "model/model.safetensors")
    with pytest.raises(CheckpointError, match=r"model/model\.safetensors does not match its sum"):
        restore(one, state)
    shutil.copy(two / "state.json", one / "state.json")
    with pytest.raises(CheckpointError, match=r"state\.json does not match"):
        restore(one, state)


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_values_that_are_not_just_copied_are_compared_with_the_leafs_own_digest(tmp_path, format):
    """Cast, or taken out of DCP's archives: then the sum of the file says nothing about what was made of it."""
    path = save(tmp_path / "x", make_state(), format=format)
    manifest = json.loads((path / "state.json").read_text())
    (row,) = [row for row in manifest["leaves"] if row["name"] == "params/b"]
    row["digest"] = "0" * 16
    reseal(path, json.dumps(manifest))
    asked = make_state()
    if format == "safetensors":
        assert restore(path, asked).step == 4
        asked = asked.replace(params={**asked.params, "b": torch.zeros(3, dtype=torch.float64)})
    said = r"values differ from their digest in state.json: params/b \(in (model|state)/"
    with pytest.raises(CheckpointError, match=said):
        restore(path, asked, strict="exact_but_dtype")
    assert restore(path, asked, strict="exact_but_dtype", verify=False).step == 4


class _Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_hostile_pickle_is_refused_before_anything_runs(tmp_path):
    path = save(tmp_path / "x", make_state(), format="dcp")
    metadata = read_metadata(path / "state/.metadata")
    metadata.planner_data = _Payload(tmp_path / "ran")
    data = pickle.dumps(metadata)
    (path / "state/.metadata").write_bytes(data)
    manifest = json.loads((path / "state.json").read_text())
    manifest["files"]["state/.metadata"] = len(data)
    with pytest.raises(CheckpointError, match=r"state/\.metadata"):
        restore(path, make_state())  # the sums
    _reseal_file(path, "state/.metadata")
    reseal(path, json.dumps(manifest))
    verify(path)
    with pytest.raises(CheckpointError, match=r"\.metadata is not trusted: it asks for (posix|nt)\.mkdir"):
        restore(path, make_state())
    assert not (tmp_path / "ran").exists()
    pickle.loads(data)  # the payload works
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [("getattr", "an attribute of"), ("eval", "builtins.eval"), ("__import__", "builtins.__import__")],
)
def test_builtins_cannot_be_reached_through_the_metadata(tmp_path, name, message):
    import builtins

    class Reach:
        def __reduce__(self):
            return getattr(builtins, name), (("", "join") if name == "getattr" else ("os",))

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Reach()))
    with pytest.raises(CheckpointError, match=f"not trusted: it asks for {message}"):
        read_metadata(tmp_path / ".metadata")


def test_an_enum_member_may_be_asked_for_as_python_3_11_first_did():
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    class Member:
        def __reduce__(self):
            return getattr, (_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")

    data = io.BytesIO(pickle.dumps(Member()))
    assert dcp_files._MetadataUnpickler(data).load() is _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST


def test_a_dcp_table_that_lacks_a_part_of_a_leaf_is_refused(tmp_path):
    path = save(tmp_path / "x", make_state(), format="dcp")
    metadata = read_metadata(path / "state/.metadata")
    metadata.state_dict_metadata["params/a"].chunks.clear()
    (path / "state/.metadata").write_bytes(pickle.dumps(metadata))
    manifest = json.loads((path / "state.json").read_text())
    manifest["files"]["state/.metadata"] = (path / "state/.metadata").stat().st_size
    _reseal_file(path, "state/.metadata")
    reseal(path, json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"cannot read leaf 'params/a' from state/.metadata: 0 of 6 elements"):
        restore(path, make_state(), verify=False)


def test_a_hostile_data_file_of_dcp_runs_nothing(tmp_path):
    path = save(tmp_path / "x", make_state(params={"a": torch.ones(2)}, buffers={}, opt_state={}), format="dcp")
    data = path / "state/__0_0.distcp"
    torch.save(_Payload(tmp_path / "ran"), data)
    metadata = read_metadata(path / "state/.metadata")
    (info,) = metadata.storage_data.values()
    info.offset, info.length = 0, data.stat().st_size
    (path / "state/.metadata").write_bytes(pickle.dumps(metadata))
    manifest = json.loads((path / "state.json").read_text())
    for name in ("state/.metadata", "state/__0_0.distcp"):
        manifest["files"][name] = (path / name).stat().st_size
        _reseal_file(path, name)
    reseal(path, json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"cannot read leaf 'params/a' from state/__0_0.distcp"):
        restore(path, make_state(params={"a": torch.ones(2)}, buffers={}, opt_state={}))
    assert not (tmp_path / "ran").exists()


def _reseal_file(path: Path, name: str) -> None:
    import hashlib

    lines = (path / "SHA256SUMS").read_text().splitlines()
    new = f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}"
    (path / "SHA256SUMS").write_text("\n".join(new if line.endswith(f"  {name}") else line for line in lines) + "\n")


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "model/../../outside", "model//x", "./x", "a\\b", "a b", ""]
)
def test_names_cannot_lead_out_of_the_checkpoint(tmp_path, name):
    path = save(tmp_path / "x", make_state())
    manifest = json.loads((path / "state.json").read_text())
    manifest["files"][name] = 5
    with pytest.raises(CheckpointError, match="is no file inside a checkpoint"):
        parse(json.dumps(manifest))
    del manifest["files"][name]
    manifest["leaves"][0]["blocks"][0]["file"] = name
    with pytest.raises(CheckpointError, match="has a block that cannot be"):
        parse(json.dumps(manifest))
    with (path / "SHA256SUMS").open("a") as sums:
        sums.write(f"{'0' * 64}  {name}\n")
    with pytest.raises(CheckpointError, match="SHA256SUMS is damaged"):
        restore(path, make_state())


@pytest.mark.parametrize("name", ["model/model.safetensors", "state.json", "SHA256SUMS", "model"])
def test_links_inside_a_checkpoint_are_refused(tmp_path, name):
    path = save(tmp_path / "x", make_state())
    (path / name).rename(tmp_path / "outside")
    (path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="is a link"):
        restore(path, make_state())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(step=-1),
        lambda m: m.update(step=True),
        lambda m: m.update(key="00"),
        lambda m: m.update(format="zip"),
        lambda m: m.pop("leaves"),
        lambda m: m["leaves"].append(m["leaves"][0]),
        lambda m: m["leaves"][0].update(name="other/x"),
        lambda m: m["leaves"][0].update(shape=[-1]),
        lambda m: m["leaves"][0].pop("blocks"),
        lambda m: m["leaves"][0].update(blocks=[]),
        lambda m: m["leaves"][0]["blocks"][0].update(offset=[2]),
        lambda m: m.update(extra={"dict": {"t": {"tensor": "extra/t"}}}),
        lambda m: m.update(extra={"object": "os"}),
        lambda m: m.update(extra={"dict": {"x": {"float": "1"}}}),
        lambda m: m.update(files=[]),
    ],
)
def test_tables_that_cannot_be_are_refused(tmp_path, change):
    path = save(tmp_path / "x", make_state())
    manifest = json.loads((path / "state.json").read_text())
    parse(json.dumps(manifest))
    change(manifest)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        parse(json.dumps(manifest))


def test_tables_nested_without_end_are_refused():
    with pytest.raises(CheckpointError, match="is not JSON"):
        parse("[" * 200_000)


# --- dead processes -------------------------------------------------------------------------------------------------


def _killed_saving(path: Path, state: TrainState, format: str, moment: int) -> bool:
    """Save in a process of its own that dies at `moment`; False if the save came through before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads: the harness's watchdog is one
        child = os.fork()
    if child == 0:
        try:
            die_at(moment)
            save(path, state, format=format)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


def _save_killed_at_every_moment(directory: str, format: str) -> tuple[list[int], list[str]]:
    """Steps found after each kill, and what is in the directory after the first save that came through."""
    state, path = make_state(), Path(directory, "x")
    save(path, state.replace(step=1), format=format)
    steps, killed = [], True
    while killed:
        newer = state.replace(step=2, params={**state.params, "b": torch.full((3,), float(len(steps)))})
        killed = _killed_saving(path, newer, format, len(steps))
        found = restore(path, state)
        assert found.digest() == {1: state.replace(step=1), 2: newer}[found.step].digest(), "a mixture"
        steps.append(found.step)
        if found.step == 2 and killed:
            save(path, state.replace(step=1), format=format)
    return steps, os.listdir(directory)


@all_formats
def test_a_save_killed_at_any_moment_leaves_the_older_or_the_newer_checkpoint(tmp_path, format):
    ((steps, left),) = run_ranks(_save_killed_at_every_moment, 1, str(tmp_path), format)
    assert steps == sorted(steps), "once it is in place, it stays"
    assert steps.count(1) > 10
    assert steps.count(2) > 3
    assert left == ["x"], "the save that came through removed what the killed ones left"


def test_leftovers_of_the_living_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    (tmp_path / ".step-00000009.tmp-dead").mkdir()
    (tmp_path / ".other.tmp-dead").mkdir()
    alive = commit.Replacement(tmp_path / "step-00000008", ())
    checkpoints.save(make_state(step=1))
    checkpoints.close()
    assert sorted(os.listdir(tmp_path)) == sorted([".other.tmp-dead", alive.temporary.name, "step-00000001"])
    alive.abort()
    assert sorted(os.listdir(tmp_path)) == sorted([".other.tmp-dead", "step-00000001"])


def test_without_an_exchange_call_two_renames_do(tmp_path, monkeypatch):
    path = save(tmp_path / "x", make_state(step=1))
    monkeypatch.setattr(commit, "_swap", lambda a, b: False)
    save(path, make_state(step=2))
    assert restore(path, make_state()).step == 2
    assert os.listdir(tmp_path) == ["x"]


def test_when_the_second_of_two_renames_fails_the_first_is_taken_back(tmp_path, monkeypatch):
    path = save(tmp_path / "x", make_state(step=1))
    monkeypatch.setattr(commit, "_swap", lambda a, b: False)
    rename, calls = os.rename, []

    def second_fails(old, new):
        calls.append(new)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        rename(old, new)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", second_fails)
        with pytest.raises(CheckpointError, match="Input/output error"):
            save(path, make_state(step=2))
    assert restore(path, make_state()).step == 1
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("call", ["fsync", "rename"])
@all_formats
def test_a_save_that_fails_leaves_the_older_checkpoint_and_nothing_else(tmp_path, monkeypatch, format, call):
    path = save(tmp_path / "x", make_state(step=1), format=format)
    monkeypatch.setattr(commit, "_swap", lambda a, b: False)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(CheckpointError, match=r"x: .*No space left on device"):
            save(path, make_state(step=2), format=format)
    assert restore(path, make_state()).step == 1
    assert os.listdir(tmp_path) == ["x"]
    save(path, make_state(step=2), format=format)
    assert restore(path, make_state()).step == 2


def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_save(tmp_path, monkeypatch, caplog):
    path = save(tmp_path / "x", make_state(step=1))

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "purestep"):
        patched.setattr(shutil, "rmtree", refuse)
        save(path, make_state(step=2))
    assert "could not remove" in caplog.text
    assert restore(path, make_state()).step == 2
