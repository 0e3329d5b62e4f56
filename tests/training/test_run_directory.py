"""A run directory is made whole or not at all, and never taken over by accident."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from purestep.sharding.config import ConfigError
from purestep.training import config_json
from purestep.training.config import TrainConfig
from purestep.training.run_directory import (
    RunDirectory,
    append_line,
    read_metrics,
    truncate_metrics,
    write_atomically,
)


def _everything_in(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def _config(path: Path, **changes) -> TrainConfig:
    return TrainConfig(output_dir=path, **changes)


@pytest.mark.parametrize("name", ["run", "a/b/run", "with space", "[glob]*"])
def test_create_makes_the_directory_with_its_config_and_nothing_else(tmp_path, name):
    directory = RunDirectory(tmp_path / name)
    directory.create(_config(directory.path, steps=7, resume=True))
    assert list(_everything_in(tmp_path)) == [f"{name}/train_config.json"]
    assert config_json.load(TrainConfig, directory.config_path) == _config(directory.path, steps=7)


def test_an_empty_directory_is_taken_as_it_is(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir(mode=0o750)
    inode = directory.path.stat().st_ino
    directory.create(_config(directory.path))
    assert directory.path.stat().st_ino == inode
    assert [p.name for p in directory.path.iterdir()] == ["train_config.json"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    directory = RunDirectory(tmp_path / "link")
    with pytest.raises(ConfigError, match="exists and holds something else"):  # a dangling link is somebody's
        directory.create(_config(directory.path))
    (tmp_path / "elsewhere").mkdir()
    directory.create(_config(directory.path))
    assert (tmp_path / "elsewhere" / "train_config.json").exists()


def test_an_existing_run_is_refused_untouched(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create(_config(directory.path))
    before = _everything_in(tmp_path)
    with pytest.raises(ConfigError) as caught:
        directory.create(_config(directory.path, steps=3))
    assert str(caught.value) == (
        f"--output-dir {directory.path} exists; pass --resume to continue it or choose another --output-dir"
    )
    assert _everything_in(tmp_path) == before


@pytest.mark.parametrize("make", [lambda p: p.write_text("x"), lambda p: (p.mkdir(), (p / "notes").write_text("x"))])
def test_somebody_elses_path_is_refused_untouched(tmp_path, make):
    path = tmp_path / "run"
    make(path)
    before = _everything_in(tmp_path)
    with pytest.raises(ConfigError, match="exists and holds something else than a run; choose another --output-dir"):
        RunDirectory(path).create(_config(path))
    assert _everything_in(tmp_path) == before


def test_nothing_is_left_when_the_config_cannot_be_written(tmp_path):
    path = tmp_path / "a" / "run"
    with pytest.raises(ConfigError, match=r"`steps` is 2\.5"):
        RunDirectory(path).create(dataclasses.replace(_config(path), steps=2.5))
    assert list(tmp_path.iterdir()) == []


def test_resuming_needs_a_run(tmp_path):
    with pytest.raises(ConfigError, match=r"--resume: --output-dir .*/run does not exist"):
        RunDirectory(tmp_path / "run").refuse_missing()
    with pytest.raises(ConfigError, match=r"holds no run \(no train_config.json\)"):
        RunDirectory(tmp_path).refuse_missing()


def test_a_killed_create_leaves_a_whole_run_or_none(tmp_path):
    """Kill it at the worst moments: in each system call that changes the file system."""
    program = """
import os, sys, signal
from pathlib import Path
calls, fatal = 0, int(sys.argv[2])
def deadly(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call
from purestep.training.config import TrainConfig
from purestep.training.run_directory import RunDirectory
for name in ("rename", "replace", "fsync", "mkdir"):
    setattr(os, name, deadly(getattr(os, name)))
Path.write_text = deadly(Path.write_text)
path = Path(sys.argv[1])
RunDirectory(path).create(TrainConfig(output_dir=path))
"""
    ended = False
    for fatal in range(1, 20):
        path = tmp_path / str(fatal) / "run"
        path.parent.mkdir()
        result = subprocess.run([sys.executable, "-c", program, str(path), str(fatal)], capture_output=True, text=True)
        if path.exists():
            assert config_json.load(TrainConfig, path / "train_config.json").output_dir == path
            with pytest.raises(ConfigError, match="pass --resume"):
                RunDirectory(path).create(_config(path))
        else:
            RunDirectory(path).create(_config(path))
        if result.returncode == 0:
            ended = True
            break
        assert result.returncode == -signal.SIGKILL, result.stderr
    assert ended
    assert fatal > 4


def test_old_leftovers_of_killed_starts_are_swept(tmp_path):
    old, new = tmp_path / ".run.new-1", tmp_path / ".run.new-2"
    old.mkdir()
    new.mkdir()
    os.utime(old, (time.time() - 7200,) * 2)
    RunDirectory(tmp_path / "run").create(_config(tmp_path / "run"))
    assert not old.exists()
    assert new.exists()


LINES = [{"step": 1, "loss": 0.1 + 0.2}, {"step": 2, "loss": "NaN"}, {"step": 2, "eval/loss": 5e-324}, {"step": 3}]


@pytest.mark.parametrize("tail", ["", '{"step": 4, "lo', "\0\0\0\n", '{"step": 4'])
@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_truncating_metrics_keeps_the_lines_up_to_the_step(tmp_path, tail, step):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES) + tail)
    truncate_metrics(path, step)
    kept = [line for line in LINES if line["step"] <= step]
    assert path.read_text() == "".join(json.dumps(line) + "\n" for line in kept)
    assert read_metrics(path) == kept
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncating_what_is_not_there_is_nothing(tmp_path):
    truncate_metrics(tmp_path / "metrics.jsonl", 3)
    assert list(tmp_path.iterdir()) == []


def test_a_resume_is_recorded_and_becomes_the_config(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create(_config(directory.path, steps=5))
    directory.metrics_path.write_text('{"step": 3}\n{"step": 4}\n')
    same = directory.continue_from(3, _config(directory.path, steps=5, resume=True), topology="local")
    more = directory.continue_from(3, _config(directory.path, steps=9, resume=True), topology="local")
    assert (same, more) == ({}, {"steps": [5, 9]})
    assert directory.metrics_path.read_text() == '{"step": 3}\n'
    assert config_json.load(TrainConfig, directory.config_path) == _config(directory.path, steps=9)
    records = [json.loads(line) for line in directory.resumes_path.read_text().splitlines()]
    assert [(r["step"], r["topology"], r["changed"]) for r in records] == [
        (3, "local", {}),
        (3, "local", {"steps": [5, 9]}),
    ]


def test_appending_after_a_line_that_was_cut_short(tmp_path):
    path = tmp_path / "resumes.jsonl"
    path.write_text('{"a": 1}\n{"b"')
    append_line(path, {"c": 3})
    assert path.read_text() == '{"a": 1}\n{"b"\n{"c": 3}\n'


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    path.write_text("old")

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert _everything_in(tmp_path) == {"file.json": b"old"}
