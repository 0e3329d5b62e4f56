"""The command `purestep`: its help, its answers to mistakes, and what it does not import."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import purestep as ps
from tests.state.test_checkpoint import make_state

NAME_ONE = ": name a checkpoint, a folder of checkpoints or a run"
COMMANDS = ("inspect", "verify", "diff", "convert", "plan")


def test_help_says_what_there_is(run):
    code, out, err = run("--help")
    assert (code, err) == (0, [])
    assert "usage: purestep [-h] {inspect,verify,diff,convert,plan}" in out
    assert "Exit code 0: fine, or equal. 1: damaged, different, or failed. 2: a mistake in the arguments." in out
    for line in (
        "inspect  Show what a checkpoint holds, from its tables alone.",
        "verify   Read every byte of a checkpoint and compare it with what was saved.",
        "diff     Compare two checkpoints: step, key, leaves and their digests.",
        "convert  Write a model, verified, to a folder of safetensors files that anything in the field opens.",
        "plan     Tell what each rank of a run would hold and send, without ranks or weights.",
    ):
        assert line in out


@pytest.mark.parametrize(
    ("command", "usage", "flags"),
    [
        ("inspect", "usage: purestep inspect [-h] PATH [--leaves] [--json]", ["--leaves", "--json"]),
        ("verify", "usage: purestep verify [-h] PATH [--all] [--json]", ["--all", "--json"]),
        ("diff", "usage: purestep diff [-h] A B [--values] [--json]", ["--values", "--json"]),
        (
            "convert",
            "usage: purestep convert [-h] [CONVERT OPTIONS] SOURCE TARGET",
            ["--max-shard-size", "--dtype", "--include-ema", "--ema-only", "--overwrite", "--json"],
        ),
        ("plan", "usage: purestep plan [-h] [PLAN OPTIONS] TARGET", ["--cpu-offload", "--diff", "--json"]),
    ],
)
def test_help_of_a_command(run, command, usage, flags):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert out.startswith(usage)
    assert [word for word in out.split() if word.startswith("--") and word != "--help"][-len(flags) :] == flags
    assert all(f"{flag} " in out for flag in flags)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "error: which command? One of inspect, verify, diff, convert, plan (--help tells what they do)"),
        (("verfy", "x"), "error: unknown command 'verfy'; did you mean verify? (--help tells what they do)"),
        (
            ("x",),
            "error: unknown command 'x': there are inspect, verify, diff, convert, plan (--help tells what they do)",
        ),
        (("inspect",), "error: missing: PATH (--help lists all flags)"),
        (("diff", "a"), "error: missing: B (--help lists all flags)"),
        (("inspect", "a", "--leafs"), "error: unknown flag --leafs; did you mean --leaves? (--help lists all)"),
        (("inspect", "a", "b"), "error: unexpected argument b (--help lists all flags)"),
        (
            ("inspect", "/no/where"),
            "error: there is nothing at /no/where: name a checkpoint, a folder of checkpoints or a run",
        ),
        (
            ("verify", "/no/where"),
            "error: there is nothing at /no/where: name a checkpoint, a folder of checkpoints or a run",
        ),
        (("convert", "/no/where", "x"), "error: there is nothing at /no/where: name what to convert"),
    ],
)
def test_mistakes_take_one_line(run, arguments, line):
    assert run(*arguments) == (2, "", [line])


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--dtype", "int8"), "error: invalid choice 'int8' for argument '--dtype'"),
        (
            ("--max-shard-size", "5 apples"),
            "error: --max-shard-size is '5 apples', expected bytes or a size like",
        ),
        (
            ("--ema-only", "--include-ema"),
            "error: --include-ema writes the averages beside the params and --ema-only in",
        ),
        (("--ema-only",), "holds no EMA"),
    ],
)
def test_mistakes_in_what_to_convert(run, tmp_path, flags, line):
    path = ps.save(tmp_path / "x", make_state())
    code, out, err = run("convert", path, tmp_path / "out", *flags)
    assert (code, out, len(err)) == (2, "", 1)
    assert line in err[0]
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def execute(*arguments, code: str = "", **environment) -> subprocess.CompletedProcess:
    command = ["-c", code] if code else ["-m", "purestep"]
    return subprocess.run(
        [sys.executable, *command, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(ps.__file__).parent.parent), **environment},
    )


IMPORTS = """
import sys
from purestep.cli import main
code = main(sys.argv[1:])
print("\\n%d" % code, sorted({"torch", "numpy", "safetensors", "accelerate"} & set(sys.modules)))
"""


def test_torch_is_imported_only_by_commands_that_need_it(tmp_path):
    path = ps.save(tmp_path / "x", make_state())
    for arguments in (
        ("--help",),
        *((command, "--help") for command in COMMANDS),
        ("inspect", path),
        ("verify", path),
        ("verify", path, "--all", "--json"),
        ("diff", path, path),
        ("bogus",),
    ):
        done = execute(*arguments, code=IMPORTS)
        expected = 2 if "bogus" in arguments else 0
        assert done.stdout.splitlines()[-1] == f"{expected} []", (arguments, done)
    done = execute("convert", path, tmp_path / "out", code=IMPORTS)
    assert "'torch'" in done.stdout.splitlines()[-1]  # so that the check above can fail


def test_it_is_a_program(tmp_path):
    path = ps.save(tmp_path / "x", make_state(params={"ä": torch.ones(2)}, opt_state={}))
    done = execute("inspect", path, LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert "\\xe4" in done.stdout
    assert execute("verify", tmp_path).returncode == 1
    assert execute().returncode == 2
    reader, writer = os.pipe()
    os.close(reader)
    closed = subprocess.run([sys.executable, "-m", "purestep", "inspect", path], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert closed.stderr == b""


def test_the_entry_point_is_declared():
    project = tomllib.loads((Path(ps.__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"purestep": "purestep.cli:main"}
