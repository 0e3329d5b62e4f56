"""`ps.main`: exit codes, one line for what went wrong, nothing left behind by a start that failed."""

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import purestep as ps
from purestep.training import command_line, config_json
from purestep.training.command_line import main, read_arguments
from purestep.training.resuming import check_order, refit
from purestep.training.run_directory import RunDirectory
from tests.ranks import run_ranks
from tests.training.programs import Config, build

PROGRAM = Path(__file__).with_name("programs.py")
SHORT = ["--accelerator.device", "cpu", "--steps", "2", "--batch-size", "4", "--log-every", "1"]


def _fails(capsys, argv, code):
    """The one line with which `main` exits with `code`."""
    with pytest.raises(SystemExit) as caught:
        main(Config, build, argv)
    assert caught.value.code == code
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1, err
    assert out == ""
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--stepz", "3"], 2, "unknown flag --stepz; did you mean --steps?"),
        (["--steps", "0"], 2, "--steps 0: must be at least 1"),
        (["--parallelism.dp-shard", "3"], 2, "--parallelism.dp-shard 3 does not fit 1 process"),
        (["--parallelism.tp", "2"], 2, "--parallelism.tp 2: this degree is reserved"),
        (
            ["--batch-size", "6", "--accelerator.gradient-accumulation.steps", "4"],
            2,
            "--batch-size 6 cannot be divided",
        ),
        (["--units", "layers.*"], 2, "unit rule 'layers.*' matches no module"),
        (["--samples", "0"], 2, "Experiment.data is empty: check --data.path"),
        (["--data.path", "/no/such/file"], 1, "No such file or directory: '/no/such/file'"),
        (["--log-with", "wandb", "trackio"], 2, "--log-with wandb: not installed here; pip install wandb"),
        (["--config", "/no/such.json"], 2, "/no/such.json: cannot be read"),
        (["--config"], 2, "--config needs a file"),
        (["--resume"], 2, "does not exist; name the directory of a run, or drop --resume"),
        (["--resume", "--config", "x.json"], 2, "--config and --resume both choose the defaults"),
    ],
)
def test_a_failed_start_is_one_line_and_leaves_nothing(tmp_path, capsys, monkeypatch, flags, code, message):
    monkeypatch.chdir(tmp_path)
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    line = _fails(capsys, [*SHORT, "--output-dir", "a/run", *flags], code)
    assert line.startswith("error: ")
    assert message in line
    assert list(tmp_path.iterdir()) == []


def test_an_interfering_environment_variable_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "1")
    line = _fails(capsys, [*SHORT, "--output-dir", str(tmp_path / "run")], 2)
    assert "FSDP_SHARDING_STRATEGY=1" in line
    assert list(tmp_path.iterdir()) == []


def test_an_existing_run_is_refused_before_anything_is_built(tmp_path, capsys):
    argv = [*SHORT, "--output-dir", str(tmp_path)]
    (tmp_path / "train_config.json").write_text("{}")
    line = _fails(capsys, [*argv, "--fail", "build"], 2)
    assert line == f"error: --output-dir {tmp_path} exists; pass --resume to continue it or choose another --output-dir"


def test_a_bug_keeps_its_traceback(tmp_path, capsys):
    with pytest.raises(KeyError, match="planted"):
        main(Config, build, [*SHORT, "--output-dir", str(tmp_path / "run"), "--fail", "build"])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError, match="planted"):
        main(Config, build, [*SHORT, "--output-dir", str(tmp_path / "run"), "--fail", "loss"])


def test_build_returns_an_experiment(tmp_path):
    with pytest.raises(TypeError, match="build returns an Experiment, got dict"):
        main(Config, lambda config: {}, [*SHORT, "--output-dir", str(tmp_path / "run")])


def test_a_run_from_its_config_file_is_the_same_run(tmp_path, capsys):
    first = main(Config, build, [*SHORT, "--output-dir", str(tmp_path / "a"), "--width", "5", "--seed", "3"])
    flags = ["--config", str(tmp_path / "a" / "train_config.json"), "--output-dir", str(tmp_path / "b")]
    second = main(Config, build, flags)
    assert second.state.digest() == first.state.digest()
    assert second.config == dataclasses.replace(first.config, output_dir=tmp_path / "b")
    assert "loss" in second.metrics
    assert "eval/loss" in second.metrics


def _saved(path, **changes):
    config = Config(output_dir=Path("somewhere/else"), **changes)
    RunDirectory(path).create(config)
    return config


def test_resume_takes_the_runs_config_and_only_given_flags_change_it(tmp_path):
    saved = _saved(tmp_path / "run", steps=7, width=9, learning_rate=1e-05)
    config = read_arguments(Config, ["--resume", "--output-dir", str(tmp_path / "run"), "--steps", "8"])
    assert config == dataclasses.replace(saved, output_dir=tmp_path / "run", resume=True, steps=8)


def test_resume_without_a_directory_takes_the_default_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _saved(Path("runs/default"), steps=7)
    assert read_arguments(Config, ["--resume"]).steps == 7


def test_a_config_file_of_another_program_is_refused(tmp_path):
    RunDirectory(tmp_path / "run").create(ps.TrainConfig())
    with pytest.raises(ps.ConfigError, match=r"train_config.json: missing field `width` \(add \"width\": 6"):
        read_arguments(Config, ["--resume", "--output-dir", str(tmp_path / "run")])


REFITS = [
    ((1, 1), 1, (1, 1)),
    ((1, 1), 4, (1, 1)),
    ((1, 4), 4, (1, 4)),
    ((1, 4), 1, (1, -1)),
    ((1, 4), 2, (1, -1)),
    ((1, -1), 3, (1, -1)),
    ((4, 1), 1, (-1, 1)),
    ((4, 1), 2, (-1, 1)),
    ((2, 2), 4, (2, 2)),
    ((2, 2), 1, (1, 1)),
    ((-1, 2), 6, (-1, 2)),
]


@pytest.mark.parametrize(("saved", "world_size", "expected"), REFITS)
def test_degrees_that_do_not_fit_the_processes_are_inferred_again(saved, world_size, expected):
    config, note = refit(ps.ParallelismConfig(*saved), world_size)
    assert (config.dp_replicate, config.dp_shard) == expected
    assert (note is None) == (saved == expected)
    config.resolve(world_size)


@pytest.mark.parametrize(("saved", "world_size"), [((2, 2), 2), ((2, 2), 8), ((-1, 2), 3)])
def test_hybrid_degrees_are_not_guessed(saved, world_size):
    with pytest.raises(ps.ConfigError, match=f"--parallelism.dp-shard 2 does not fit {world_size}"):
        refit(ps.ParallelismConfig(*saved), world_size)


def test_given_degrees_are_not_inferred_again(tmp_path, capsys):
    _saved(tmp_path / "run", parallelism=ps.ParallelismConfig(dp_shard=4))
    argv = ["--resume", "--output-dir", str(tmp_path / "run")]
    assert read_arguments(Config, argv).parallelism == ps.ParallelismConfig(dp_shard=-1)
    assert "resuming on 1 process as local" in capsys.readouterr().err
    assert read_arguments(Config, [*argv, "--parallelism.dp-replicate", "2"]).parallelism.dp_shard == 4
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("num_samples", 11, "--data.path"), ("batch_size", 4, "--batch-size"), ("key", "ff", "--seed")],
)
def test_another_order_names_the_flag(name, value, message):
    order = ps.BatchOrder(10, 2, ps.key(0)).describe()
    check_order(order, dict(order))
    with pytest.raises(ps.ConfigError, match=f"--resume: .*{message}"):
        check_order(order, {**order, name: value})


# ---- as a program

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parents[2])}


def _program(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROGRAM), *flags]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)


def test_help_and_bad_flags_take_no_torch():
    code = (
        "import sys; sys.argv[0] = 'program'\n"
        "from tests.training.programs import *\n"
        "try: ps.main(Config, build, sys.argv[1:])\n"
        "finally: assert not {'torch', 'accelerate'} & set(sys.modules), 'imported'"
    )
    for flags, expected in ((["--help"], 0), (["--stepz"], 2), (["--resume", "--output-dir", "/no/such"], 2)):
        result = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, env=ENVIRONMENT)
        assert result.returncode == expected, result.stderr
        assert "imported" not in result.stderr


def test_sigterm_ends_a_run_with_a_line_and_a_code(tmp_path):
    path = tmp_path / "run"
    command = [sys.executable, str(PROGRAM), *SHORT, "--output-dir", str(path), "--steps", "1000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 60
        while not (path / "metrics.jsonl").exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        process.terminate()
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert err.splitlines()[-1] == f"stopped by SIGTERM; continue with --resume --output-dir {path}"


def test_an_interrupt_ends_a_run_with_a_line_and_a_code(tmp_path, capsys):
    path = tmp_path / "run"
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        main(Config, build, [*SHORT, "--output-dir", str(path), "--fail", "interrupt"])
    assert caught.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == f"stopped by SIGINT; continue with --resume --output-dir {path}"
    assert signal.getsignal(signal.SIGTERM) is before


CASES = [
    (["--parallelism.dp-shard", "3"], 2, "--parallelism.dp-shard 3 does not fit 2 processes"),
    (["--data.path", "/no/such/file"], 1, "No such file or directory"),
    (["--batch-size", "3"], 2, "--batch-size 3 cannot be divided evenly over 2 data-parallel processes"),
]


def _exits_of_rank(output_dir: str) -> list:
    """What `main` exits with and writes to stderr in each case; last, the bug in `build`."""
    command_line._GRACE_S = 0.1
    found = []
    for flags in [*(case[0] for case in CASES), ["--fail", "build"]]:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                main(Config, build, [*SHORT, "--output-dir", output_dir, *flags])
            except SystemExit as stop:
                found.append((stop.code, err.getvalue()))
            except KeyError:
                found.append(("KeyError", err.getvalue()))
    return found


def test_one_rank_speaks_for_all(tmp_path):
    first, second = run_ranks(_exits_of_rank, 2, str(tmp_path / "run"))
    for (_, code, message), told, silent in zip(CASES, first, second, strict=False):
        assert told[0] == code
        assert re.fullmatch(rf"error: .*{re.escape(message)}.*\n", told[1]), told[1]
        assert silent == (code, "")
    assert first[-1] == ("KeyError", "")  # its traceback is for the interpreter
    assert second[-1] == (1, "")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_config_of_a_run_is_named(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    tree = {**config_json.to_json(Config()), "stepz": 3}
    (path / "train_config.json").write_text(json.dumps(tree))
    result = _program("--resume", "--output-dir", str(path))
    assert result.returncode == 2
    assert result.stderr == (f"error: {path}/train_config.json: unknown field `stepz`, did you mean `steps`?\n")
