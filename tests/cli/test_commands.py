"""The commands of `purestep`: what they print, and their exit codes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import purestep as ps
from purestep.cli import progress
from purestep.cli.inspection import printable
from purestep.state.files.integrity import write_sums
from tests.cli.runs import damage, make_run
from tests.state.test_checkpoint import make_state, reseal

# What a path means


def test_a_run_and_its_folder_of_checkpoints_stand_for_the_newest_valid_one(run, tmp_path):
    steps = make_run(tmp_path / "run")
    newest, older = steps.path(2), steps.path(1)
    for path in (tmp_path / "run", tmp_path / "run/checkpoints"):
        code, out, err = run("inspect", path)
        assert (code, err) == (0, [f"the newest valid checkpoint of {path} is {newest}"])
        assert out.startswith(f"checkpoint {newest}\n  step      2\n")
    assert run("inspect", newest)[2] == []
    (newest / "model/model.safetensors").write_bytes(b"")
    code, out, err = run("inspect", tmp_path / "run")
    assert code == 0
    assert err[0].startswith(f"skipping {newest}: checkpoint {newest} is damaged: model/model.safetensors has 0 bytes")
    assert err[1] == f"the newest valid checkpoint of {tmp_path / 'run'} is {older}"
    (older / "SHA256SUMS").unlink()
    code, out, err = run("inspect", tmp_path / "run")
    assert (code, out) == (1, "")
    assert err[-1] == f"error: all 2 checkpoints of {tmp_path / 'run'} are damaged"


@pytest.mark.parametrize("command", ["inspect", "verify", "diff"])
def test_a_folder_without_checkpoints(run, tmp_path, command):
    (tmp_path / "checkpoints").mkdir()
    code, out, err = run(command, tmp_path, *([tmp_path] if command == "diff" else []))
    assert (code, out, len(err)) == (1, "", 1)
    assert err[0].startswith(f"error: {tmp_path} is no checkpoint and holds none; expected step-00000100")


# inspect


def test_inspect_shows_groups_and_totals(run, tmp_path):
    params = {f"blocks.{i}.w": torch.ones(4, 4) for i in range(3)} | {"head.bias": torch.ones(5).bfloat16()}
    slots = {"adamw": {slot: {name: torch.ones_like(p) for name, p in params.items()} for slot in ("m", "v")}}
    state = make_state(params=params, opt_state=slots, extra={"scale": 2.0, "seen": torch.tensor(7)})
    path = ps.save(tmp_path / "x", state, metadata={"note": "first"})
    code, out, _ = run("inspect", path)
    assert code == 0
    rows = [" ".join(line.split()) for line in out.splitlines()]
    for row in (
        "step 4",
        "format safetensors, version 1",
        f"digest {state.digest()}",
        f"key {state.key.hex()}",
        "saved by 1 process",
        'metadata note: "first"',
        "params 4 leaves 53 elements bfloat16, float32 202 B",
        "blocks.*.w 3 x (4, 4) float32 192 B",
        "head.bias (5,) bfloat16 10 B",
        "buffers 1 leaf 3 elements float32 12 B",
        "opt_state/adamw/m 4 leaves 53 elements bfloat16, float32 202 B",
        "opt_state/adamw/v 4 leaves 53 elements bfloat16, float32 202 B",
        "extra 1 leaf 1 elements int64 8 B",
        "seen () int64 8 B",
        "all 14 leaves 163 elements bfloat16, float32, int64 626 B",
    ):
        assert row in rows, out
    assert "opt_state/adamw/m/head.bias" not in out
    code, out, _ = run("inspect", path, "--leaves")
    described = ps.describe(path)
    rows = [line.split() for line in out.splitlines()]
    for leaf in described.leaves.values():
        (row,) = [row for row in rows if row and row[0] == leaf.name]
        assert row[-2:] == [leaf.placement, leaf.digest]


def test_inspect_as_json_is_what_describe_says(run, tmp_path):
    path = ps.save(tmp_path / "x", make_state(), metadata={"note": "first"})
    code, out, err = run("inspect", path, "--json")
    table, described = json.loads(out), ps.describe(path)
    assert (code, err) == (0, [])
    for field in (
        "step",
        "key",
        "digest",
        "format",
        "format_version",
        "bytes",
        "topology",
        "versions",
        "metadata",
        "files",
    ):
        assert table[field] == getattr(described, field), field
    assert [leaf["name"] for leaf in table["leaves"]] == list(described.leaves)
    assert table["trees"]["params"] == {"leaves": 2, "elements": 9, "bytes": 36}
    assert (table["checkpoint"], table["skipped"], table["problems"]) == (str(path), [], [])


def test_inspect_shows_a_checkpoint_that_misses_a_file_and_says_so(run, tmp_path):
    path = ps.save(tmp_path / "x", make_state())
    (path / "model/model.safetensors").unlink()
    code, out, err = run("inspect", path)
    assert code == 1
    assert "blocks" not in out
    assert "step      4" in out
    assert err == ["damaged: model/model.safetensors cannot be read: No such file or directory"]
    code, out, _ = run("inspect", path, "--json")
    assert (code, json.loads(out)["problems"]) == (1, [err[0].removeprefix("damaged: ")])


def test_names_from_a_file_cannot_steer_the_terminal(run, tmp_path):
    path = ps.save(tmp_path / "x", make_state(params={"a\x1b[2Jb": torch.ones(1)}, opt_state={}), format="dcp")
    for flags in ((), ("--leaves",), ("--json",)):
        out = run("inspect", path, *flags)[1]
        assert "\x1b" not in out
        assert "[2Jb" in out
    assert printable("ä\tb\r") == "ä\\tb\\r"


# verify


def test_verify_answers_with_its_exit_code(run, tmp_path):
    path = ps.save(tmp_path / "x", make_state())
    code, out, err = run("verify", path)
    assert (code, err) == (0, [])
    assert out.startswith(f"{path}: valid, step 4, 4 files, ")
    assert json.loads(run("verify", path, "--json")[1])["valid"] is True
    damage(path)
    assert run("inspect", path)[0] == 0  # its size is right, its bits are not
    code, out, (line,) = run("verify", path)
    assert (code, out) == (1, "")
    assert line.startswith(
        f"error: checkpoint {path} is damaged: model/model.safetensors does not match its sum in SHA256SUMS"
    )
    code, out, err = run("verify", path, "--json")
    assert (code, err) == (1, [line])
    assert json.loads(out) == {"valid": False, "error": line.removeprefix("error: ")}


def test_verify_of_a_run_tells_of_damage_even_if_an_older_checkpoint_is_valid(run, tmp_path):
    steps = make_run(tmp_path, (1, 2, 3))
    assert run("verify", tmp_path)[0] == 0
    damage(steps.path(3))
    code, out, err = run("verify", tmp_path)
    assert code == 1
    assert out.startswith(f"{steps.path(2)}: valid, step 2")
    assert [line.split(":")[0] for line in err] == [
        f"skipping {steps.path(3)}",
        f"the newest valid checkpoint of {tmp_path} is {steps.path(2)}",
    ]
    damage(steps.path(1))
    code, out, err = run("verify", tmp_path, "--all", "--json")
    rows = json.loads(out)["checkpoints"]
    assert (code, [row["valid"] for row in rows]) == (1, [False, True, False])
    assert run("verify", tmp_path, "--all")[1].count("valid") == 1


# diff


def test_diff_answers_with_its_exit_code(run, tmp_path):
    state = make_state()
    a, same = ps.save(tmp_path / "a", state), ps.save(tmp_path / "same", state, format="dcp")
    other = ps.save(tmp_path / "b", state.replace(step=9, params={**state.params, "a": state.params["a"] + 0.5}))
    code, out, err = run("diff", a, same)
    assert (code, err) == (0, [])
    assert "equal" in out
    code, out, err = run("diff", a, other)
    assert (code, err) == (1, [])
    assert "params/a" in out
    assert "step" in out
    code, out, _ = run("diff", a, other, "--values", "--json")
    table = json.loads(out)
    assert (code, table["equal"]) == (1, False)
    (row,) = table["values"]
    assert (row["name"], row["num_elements"]) == ("params/a", 6)
    assert abs(row["max_abs"] - 0.5) < 1e-6
    assert table["a"]["checkpoint"] == str(a)
    (tmp_path / "b/SHA256SUMS").unlink()
    code, out, err = run("diff", a, other)
    assert (code, out, len(err)) == (1, "", 1)


def test_diff_takes_runs_and_gives_json_for_what_json_has_no_number_for(run, tmp_path):
    make_run(tmp_path / "r")
    nan = ps.save(tmp_path / "nan", make_state(step=2, buffers={"mean": torch.tensor([float("nan")] * 3)}))
    code, out, err = run("diff", tmp_path / "r", nan, "--values", "--json")
    assert code == 1
    assert err == [f"the newest valid checkpoint of {tmp_path / 'r'} is {tmp_path / 'r/checkpoints/step-00000002'}"]
    assert "NaN" not in out
    assert json.loads(out)["values"][0]["max_abs"] == "nan"


# convert


def test_convert_writes_what_plain_safetensors_reads(run, tmp_path):
    steps = make_run(tmp_path / "run")
    code, out, err = run("convert", tmp_path / "run", tmp_path / "out", "--dtype", "bfloat16")
    assert (code, err) == (0, [f"the newest valid checkpoint of {tmp_path / 'run'} is {steps.path(2)}"])
    assert out.splitlines()[0] == f"converted safetensors checkpoint of step 2 {steps.path(2)}"
    assert "cast      float32 -> bfloat16: 3 tensors" in out
    read = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(read["a"], make_state().params["a"].bfloat16())
    line = f"error: the target {tmp_path / 'out'} exists: choose another, or pass --overwrite"
    assert run("convert", tmp_path / "run", tmp_path / "out")[::2] == (2, [line])
    damage(steps.path(2))
    code, out, err = run("convert", steps.path(2), tmp_path / "out", "--overwrite")
    assert (code, out, len(err)) == (1, "", 1)
    assert "model/model.safetensors does not match its sum" in err[0]
    code, out, _ = run("convert", tmp_path / "run", tmp_path / "out", "--overwrite", "--json")
    table = json.loads(out)
    assert (code, table["checkpoint"], table["num_tensors"]) == (0, str(steps.path(1)), 3)
    assert [row["checkpoint"] for row in table["skipped"]] == [str(steps.path(2))]


def test_convert_takes_what_others_write(run, tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "x.safetensors")
    code, out, err = run("convert", tmp_path / "x.safetensors", tmp_path / "out", "--json")
    assert (code, err) == (0, [])
    table = json.loads(out)
    assert (table["kind"], table["files"]) == (
        "safetensors file",
        {"model.safetensors": (tmp_path / "out/model.safetensors").stat().st_size},
    )
    (tmp_path / "x.bin").write_bytes(b"x")
    code, out, err = run("convert", tmp_path / "x.bin", tmp_path / "out2")
    assert (code, out, len(err)) == (1, "", 1)
    assert "pickles are not opened" in err[0]


# What all share


def test_a_bar_appears_when_work_takes_longer_than_a_second(run, tmp_path, monkeypatch):
    path = ps.save(tmp_path / "x", make_state())
    assert run("verify", path)[2] == []
    monkeypatch.setattr(progress, "_DELAY_S", 0.0)
    code, out, err = run("verify", path)
    assert code == 0
    assert "verifying x" in "".join(err)
    assert "valid" in out
    code, out, err = run("convert", path, tmp_path / "out")
    assert "verifying" in "".join(err)
    assert "writing" in "".join(err)
    state = make_state()
    other = ps.save(tmp_path / "y", state.replace(params={name: leaf + 1 for name, leaf in state.params.items()}))
    code, out, err = run("diff", path, other, "--values")
    assert code == 1
    assert "comparing" in "".join(err)


def test_a_newer_format_version_is_refused_by_number(run, tmp_path):
    path = ps.save(tmp_path / "x", make_state())
    text = (path / "state.json").read_text().replace('"format_version": 1', '"format_version": 99')
    reseal(path, text)
    for command in ("inspect", "verify"):
        code, out, err = run(command, path)
        assert (code, out, len(err)) == (1, "", 1)
        assert "has format version 99" in err[0]


def test_a_hostile_list_of_files_leads_nowhere_else(run, tmp_path):
    path = ps.save(tmp_path / "x", make_state())
    sums = {"state.json": "0" * 64, "../outside": "0" * 64}
    (path / "SHA256SUMS").unlink()
    write_sums(path, sums)
    code, out, err = run("verify", path)
    assert (code, out, len(err)) == (1, "", 1)
    assert "SHA256SUMS is damaged" in err[0]
