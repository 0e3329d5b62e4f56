"""A config class's command line, by tyro: its flags, its help, and errors of one line."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from purestep.sharding.config import ConfigError
from purestep.training.sharding_flags import spec_flags

C = TypeVar("C")

_FILES = """\
--config FILE takes the defaults of all flags from a train_config.json. --resume takes them from the run in
--output-dir. Flags given beside it win."""
_RULE = re.compile(r"│ ─+ │")


class FlagError(ConfigError):
    """The command line could not be understood."""


def parse_flags(config_class: type[C], argv: Sequence[str], *, default: C | None = None) -> C:
    """The config that `argv` asks for. `--help` prints and exits.

    Args:
        config_class: a dataclass.
        argv: arguments, without the program's name.
        default: where flags that are not given come from; None: the class.

    Raises:
        FlagError: a flag is unknown, lacks its value, or its value has the wrong type; one line that names it.
        ConfigError: the class refused the values.
    """
    import tyro

    def parse() -> C:
        kwargs: dict[str, Any] = {} if default is None else {"default": default}
        with spec_flags():
            return tyro.cli(config_class, args=list(argv), description=_description(config_class), **kwargs)

    return with_one_line_errors(parse, _flags_of(config_class))


def with_one_line_errors(parse: Callable[[], C], known: Sequence[str] = ()) -> C:
    """`parse()`, a call of `tyro.cli`; what it would draw as a box of several lines becomes the error's message.

    Raises:
        FlagError: the arguments could not be parsed; one line, in which `known` flags are suggested for unknown ones.
    """
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            return parse()
    except SystemExit as stop:
        if stop.code in (0, None):
            sys.stderr.write(shown.getvalue())
            raise
    # tyro draws its errors in a box for the terminal that stdout is. Drawn again for a wide one without colours, no
    # sentence is broken.
    shown, wide = io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with (
        _columns(10_000),
        contextlib.redirect_stdout(wide),
        contextlib.redirect_stderr(shown),
        contextlib.suppress(SystemExit),
    ):
        return parse()
    raise FlagError(one_line(shown.getvalue(), known))


def one_line(box: str, known: Sequence[str] = ()) -> str:
    """The message of one of tyro's error boxes; `known` flags are suggested for unknown ones.

    >>> one_line('''
    ... ╭─ Unrecognized options ─────────────╮
    ... │ Unrecognized options: --stepz, 3   │
    ... │ ────────────────────────────────── │
    ... │ For full helptext, run a.py --help │
    ... ╰────────────────────────────────────╯''', ["--steps", "--seed"])
    'unknown flag --stepz; did you mean --steps? (--help lists all)'
    """
    sections = _sections(box)
    head = " ".join(sections[0]) if sections else "the arguments could not be parsed"
    if unknown := re.match(r"Unrecognized (?:or misspelled )?(?:options|arguments): (.*)", head):
        return _unknown(re.split(r",? ", unknown[1]), known)
    if re.match(r"(Missing from|Required options)", head):
        names = re.findall(r"(?<![\w-])--[\w.-]+", " ".join(sections[0][1:]))
        names = names or [line for line in sections[0][1:] if line.isupper()]  # positional arguments
        return f"missing: {', '.join(dict.fromkeys(names)) or head} (--help lists all flags)"
    # A class's own ConfigError names its flag already.
    head = re.sub(r"^Error parsing \S+: (?=--)", "", head)
    return re.sub(r"\s+", " ", head).replace("Error parsing ", "").rstrip(" .")


def value_of(argv: Sequence[str], flag: str) -> str | None:
    """The last value that `argv` gives to `--flag`, or None.

    >>> value_of(["--output_dir", "a", "--output-dir=b"], "output-dir")
    'b'
    """
    value = None
    for i, token in enumerate(argv):
        name, equals, attached = token.partition("=")
        if _is_flag(name, flag):
            value = attached if equals else (argv[i + 1] if i + 1 < len(argv) else None)
    return value


def without(argv: Sequence[str], flag: str) -> list[str]:
    """`argv` without `--flag` and its value."""
    kept: list[str] = []
    tokens = iter(argv)
    for token in tokens:
        name, equals, _ = token.partition("=")
        if not _is_flag(name, flag):
            kept.append(token)
        elif not equals:
            next(tokens, None)
    return kept


def is_on(argv: Sequence[str], flag: str) -> bool:
    """Whether the last of `--flag` and `--no-flag` in `argv` is `--flag`."""
    given = [token for token in argv if _is_flag(token, flag) or _is_flag(token, f"no-{flag}")]
    return bool(given) and _is_flag(given[-1], flag)


def any_below(argv: Sequence[str], prefix: str) -> bool:
    """Whether `argv` has a flag of the group `prefix`."""
    return any(token.startswith(f"--{prefix}.") for token in argv)


def path_of(argv: Sequence[str], flag: str) -> Path | None:
    """`value_of` as a path."""
    value = value_of(argv, flag)
    return None if value is None else Path(value)


def _is_flag(token: str, flag: str) -> bool:
    return token.replace("_", "-") == f"--{flag}"


def _description(config_class: type) -> str:
    own = config_class.__dict__.get("__doc__") or ""
    if own.startswith(f"{config_class.__name__}("):  # what dataclass writes when there is none
        own = ""
    first = own.strip().split("\n\n")[0]
    return "\n".join(part for part in (re.sub(r"\s+", " ", first), _FILES.replace("\n", " ")) if part)


def _sections(box: str) -> list[list[str]]:
    """The lines of a box, divided at its inner rules, without the border and the last part, which points to --help."""
    sections: list[list[str]] = [[]]
    for line in box.strip().splitlines():
        if line[:1] in "╭╰":
            continue
        if _RULE.match(line):
            sections.append([])
        else:
            sections[-1].append(line.strip("│ "))
    return [lines for lines in sections if lines and not lines[0].startswith("For full helptext")]


def _unknown(tokens: Sequence[str], known: Sequence[str]) -> str:
    flags = [token.partition("=")[0] for token in tokens if token.startswith("--")]
    if not flags:
        return f"unexpected argument {' '.join(tokens)} (--help lists all flags)"
    closest = [match for flag in flags for match in difflib.get_close_matches(flag, known, n=1)]
    meant = f"; did you mean {' and '.join(closest)}?" if closest else ""
    return f"unknown flag {', '.join(flags)}{meant} (--help lists all)"


def _flags_of(config_class: Any, prefix: str = "--") -> list[str]:
    flags = []
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        name = prefix + field.name.replace("_", "-")
        nested = next(
            (arm for arm in (hints[field.name], *typing.get_args(hints[field.name])) if _is_nested(arm)), None
        )
        flags += _flags_of(nested, f"{name}.") if nested else [name]
    return flags


def _is_nested(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


@contextlib.contextmanager
def _columns(width: int) -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
