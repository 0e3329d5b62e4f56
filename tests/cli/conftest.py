"""What the tests of the command line share."""

from __future__ import annotations

import pytest

from purestep.cli import main


@pytest.fixture
def run(capsys, monkeypatch):
    """`run(*arguments)`: exit code, stdout, lines of stderr."""
    monkeypatch.setenv("COLUMNS", "120")
    capsys.readouterr()

    def command(*arguments) -> tuple[int, str, list[str]]:
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err.splitlines()

    return command
