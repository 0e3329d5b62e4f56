"""What the README shows is what happens: its Python runs, its flags exist, its paths are there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = ("inspect", "verify", "diff", "convert", "plan")
LAUNCHER_FLAGS = {"--nproc-per-node", "--multi_gpu", "--num_processes", "--help"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_the_first_example_is_short_and_on_the_first_screen():
    first = blocks("python")[0]
    lines = [line for line in first.splitlines() if line and not line.startswith(("import", "assert"))]
    assert len(lines) <= 10
    assert README.splitlines().index("bash scripts/train.sh") < 40


def test_the_python_runs_as_one_program_and_says_what_is_promised(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert len(blocks("python")) == 2
    exec(compile("\n".join(blocks("python")), "<README>", "exec"), {"__name__": "readme"})
    assert "state.clone()" in capsys.readouterr().out


def test_every_flag_exists():
    programs = [[ROOT / "examples" / "lm.py"], *(["-m", "purestep", command] for command in COMMANDS)]
    help_text = "".join(
        subprocess.run(
            [sys.executable, *program, "--help"], capture_output=True, text=True, check=True, env=environment()
        ).stdout
        for program in programs
    )
    known = set(re.findall(r"--[a-z][\w.-]*", help_text)) | LAUNCHER_FLAGS
    shown = {flag.rstrip(".") for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*", README)}
    assert len(shown) > 20
    assert shown <= known


def test_the_page_on_sharding_runs():
    page = ROOT / "docs" / "sharding.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {"__name__": "page"}
    exec(compile(block, str(page), "exec"), names)
    assert [unit.path for unit in names["plan"].units] == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", ""]


@pytest.mark.parametrize("path", re.findall(r"`((?:purestep|examples|scripts|tests|docs|benchmarks)/[\w./]*)`", README))
def test_every_path_exists(path):
    assert (ROOT / path).exists()


def test_every_script_that_is_named_exists_and_parses():
    scripts = set(re.findall(r"scripts/\w+\.sh", README))
    assert scripts == {"scripts/train.sh", "scripts/test.sh"}
    for script in [*scripts, "scripts/setup.sh", ".ci/run"]:
        subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_every_public_name_that_is_used_is_public():
    import purestep as ps

    names = set(re.findall(r"\bps\.([A-Za-z_]+)", README))
    assert len(names) > 10
    assert names <= set(ps.__all__)


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
