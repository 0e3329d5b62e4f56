"""Models by name: import a builder, call it on the meta device, and say in a line what went wrong."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from purestep.sharding.config import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from purestep.sharding.rules import ShardingSpec


@dataclass(frozen=True)
class Built:
    """What a target gave."""

    model: nn.Module
    spec: ShardingSpec | None = None
    optimizer: Any = None


def build(target: str, arguments: Mapping[str, Any]) -> Built:
    """The model that `target` builds, without memory or values.

    Args:
        target: `package.module:name` or `path/to/file.py:name`. The name is that of a class of modules, a function that
            returns a module or a `ps.Experiment`, or a transformers model class, whose config is then built.
        arguments: keyword arguments of the call.

    Raises:
        ConfigError: there is no such thing, it cannot be called so, or it returns something else.
    """
    import torch
    from torch import nn

    found = imported(target)
    if not isinstance(found, nn.Module):
        config_class = getattr(found, "config_class", None)  # the convention of transformers
        with torch.device("meta"):
            if isinstance(config_class, type):
                config = _called(target, config_class, arguments)
                found = _called(target, found, {}, config)
            else:
                found = _called(target, found, arguments)
    model = getattr(found, "model", None)
    if isinstance(found, nn.Module):
        return Built(found)
    if isinstance(model, nn.Module):  # an Experiment
        return Built(model, getattr(found, "spec", None), getattr(found, "optimizer", None))
    raise ConfigError(f"{target} gives a {type(found).__name__}, expected a torch.nn.Module or a ps.Experiment")


def imported(target: str) -> Any:
    """What `module:name` or `file.py:name` stands for.

    Raises:
        ConfigError: it cannot be found or imported.
    """
    where, colon, name = target.rpartition(":")
    if not (colon and where and name):
        raise ConfigError(f"{target!r}: expected package.module:name or path/to/file.py:name")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else _from_path(where)
    except ConfigError:
        raise
    except Exception as error:  # whatever a module does when it is imported
        raise ConfigError(f"{target}: importing {where} failed: {_said(error)}") from error
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [n for n in dir(found) if not n.startswith("_")], n=3)
            raise ConfigError(f"{target}: {where} has no {part!r}" + (f"; near: {', '.join(near)}" if near else ""))
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{target} is a {type(found).__name__}, expected a function or a class that builds a module")
    return found


def keyword_arguments(flag: str, given: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` words as keyword arguments; a value is JSON, else a Python literal, else text.

    Raises:
        ConfigError: a word without a key.

    >>> keyword_arguments("--arg", ["layers=4", "bias=false", "betas=(0.9, 0.95)", "kind=gelu"])
    {'layers': 4, 'bias': False, 'betas': (0.9, 0.95), 'kind': 'gelu'}
    """
    arguments: dict[str, Any] = {}
    for word in given:
        key, equals, value = word.partition("=")
        if not (equals and key.isidentifier()):
            raise ConfigError(f"{flag} {word}: expected KEY=VALUE")
        if key in arguments:
            raise ConfigError(f"{flag} {key} is given twice")
        arguments[key] = _value(value)
    return arguments


def _value(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # a program's imports are those of its folder
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickles look there
    spec.loader.exec_module(module)
    return module


def _from_path(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:  # as `python -m` has it, and a console script not
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _called(target: str, function: Callable[..., Any], arguments: Mapping[str, Any], *first: Any) -> Any:
    try:
        inspect.signature(function).bind(*first, **arguments)
    except TypeError as error:
        raise ConfigError(f"{target}: {error}; arguments are given as --arg KEY=VALUE") from None
    except ValueError:  # no signature to be had
        pass
    try:
        return function(*first, **arguments)
    except Exception as error:  # whatever the builder does
        raise ConfigError(f"{target} failed: {_said(error)}") from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
