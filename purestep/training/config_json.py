"""Configs as JSON files, typed by the annotations of the dataclass, and back.

What JSON has no word for is a string that its annotation reads back: an Enum's member name, a path, and the floats
Infinity, -Infinity and NaN. Equal configs give equal bytes; reading runs no code but the config classes' own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from purestep.sharding.config import ConfigError
from purestep.training.codecs import codec_of

T = TypeVar("T")


def to_json(config: Any) -> dict[str, Any]:
    """The dataclass instance `config` as a tree of dicts, lists and plain values that `from_json` reads back.

    Raises:
        ConfigError: a value does not have its field's type, or the type has no JSON form; the path is named.

    >>> from purestep.sharding.config import ParallelismConfig
    >>> to_json(ParallelismConfig(dp_shard=-1))
    {'dp_replicate': 1, 'dp_shard': -1, 'tp': 1, 'cp': 1}
    """
    return codec_of(type(config)).write(config, "")


def from_json(config_class: type[T], tree: Any, *, source: str = "config") -> T:
    """The instance of `config_class` that `tree` describes. Every field must be there, and nothing else.

    Args:
        config_class: a dataclass.
        tree: what `json.load` gave.
        source: what to call the tree in errors, e.g. its file.

    Raises:
        ConfigError: one message with every problem: the field's full path, the value, what was expected.

    >>> from purestep.sharding.config import ParallelismConfig
    >>> from_json(ParallelismConfig, {"dp_replicate": 1, "dp_shard": "2", "tp": 1, "cp": 1})
    Traceback (most recent call last):
    purestep.sharding.config.ConfigError: config: `dp_shard` is "2", expected int
    """
    problems: list[str] = []
    config = codec_of(config_class).read(tree, "", problems)
    if problems:
        raise ConfigError(f"{source}: {'; '.join(problems)}")
    return config


def dumps(config: Any) -> str:
    """`config` as the text of a JSON file. Equal configs give equal text."""
    return json.dumps(to_json(config), indent=2, allow_nan=False) + "\n"


def load(config_class: type[T], path: Path) -> T:
    """The config in the file `path`.

    Raises:
        ConfigError: the file cannot be read, is not JSON, or does not describe a `config_class`.
    """
    return from_json(config_class, read_tree(path), source=str(path))


def read_tree(path: Path) -> Any:
    """The JSON in the file `path`; a field that is there twice and a bare NaN are refused.

    Raises:
        ConfigError: the file cannot be read, or is not JSON.
    """
    try:
        text = path.read_bytes().decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not a JSON config ({error})") from None


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of `to_json` as one level.

    >>> flatten({"steps": 3, "optimizer": {"betas": [0.9, 0.95]}})
    {'steps': 3, 'optimizer.betas': [0.9, 0.95]}
    """
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Fields in which two trees of `to_json` differ: `{path: [old, new]}`, null for a field that is not there.

    >>> changes({"steps": 3, "data": {"path": None}}, {"steps": 5, "data": {"path": None}})
    {'steps': [3, 5]}
    """
    before, after = flatten(old), flatten(new)
    # As text, so that 1, 1.0 and true differ.
    return {
        name: [before.get(name), after.get(name)]
        for name in dict.fromkeys([*before, *after])
        if json.dumps(before.get(name)) != json.dumps(after.get(name))
    }


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return tree


def _refuse_constant(name: str) -> Any:
    raise ValueError(f'bare {name} is not JSON; write "{name}"')
