"""Names of leaves: the way to each through the trees of a state, never the same for two. Needs no torch.

A name is the tree and the keys below it, joined by slashes: `params/blocks.0.mlp.weight`. Ordinary keys stand for
themselves. What would be ambiguous is marked with a tilde, for the first two as in JSON Pointer (RFC 6901):

    ~ -> ~0     / -> ~1     "" -> ~     the integer 5 -> ~i5 (the string "5" stays 5)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_INTEGER_BITS = 64


def join(prefix: str, key: Any) -> str:
    """Name of what is at `key` of the mapping named `prefix`.

    Raises:
        TypeError: the key is neither a string nor an integer.

    >>> join("params", "blocks.0.weight"), join("extra", "a/b"), join("extra", 7), join("extra", "")
    ('params/blocks.0.weight', 'extra/a~1b', 'extra/~i7', 'extra/~')
    """
    return f"{prefix}/{escape(key, prefix)}"


def some(names: Iterable[str], limit: int = 8) -> str:
    """The first of `names`, quoted, and how many more there are: for messages.

    >>> some(["a", "b", "c"], limit=2)
    "'a', 'b' and 1 more"
    """
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more


def escape(key: Any, where: str) -> str:
    """The part of a name that stands for `key`, a key of the mapping named `where`; see `join`."""
    if type(key) is str:
        if not key:
            return "~"
        return key.replace("~", "~0").replace("/", "~1") if "~" in key or "/" in key else key
    if type(key) is int and key.bit_length() <= _INTEGER_BITS:
        return f"~i{key}"
    raise TypeError(
        f"{where!r} has the key {key!r} ({type(key).__name__}): keys are strings, or integers of up to "
        f"{_INTEGER_BITS} bits"
    )


def unescape(part: str) -> str | int:
    """The key that `escape` turned into `part`.

    Raises:
        ValueError: it turned no key into that.

    >>> unescape("a~1b"), unescape("~i7"), unescape("7")
    ('a/b', 7, '7')
    """
    if "~" not in part and part:
        return part
    key: str | int
    if re.fullmatch(r"~i-?[0-9]{1,20}", part):
        key = int(part[2:])
    else:
        key = "" if part == "~" else part.replace("~1", "/").replace("~0", "~")
    if escape(key, "") != part:
        raise ValueError(f"{part!r} is no part of a leaf name")
    return key


def module_name(name: str) -> str:
    """What a leaf of params, buffers or ema is called in the module, and in `model/` files: nothing is marked there.

    >>> module_name("params/blocks.0.weight"), module_name("params/a~1b")
    ('blocks.0.weight', 'a/b')
    """
    path = name.partition("/")[2]
    return path if "~" not in path else "/".join(str(unescape(part)) for part in path.split("/"))
