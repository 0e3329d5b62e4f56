"""Ties: the other names that a module has for a tensor which a state holds once. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from purestep.state.checkpoint.renaming import split

Ties = tuple[tuple[str, ...], ...]
"""Module paths of each tied tensor; under the first a state holds it."""


def as_ties(ties: Iterable[Sequence[str]]) -> Ties:
    """Ties as somebody wrote them.

    Raises:
        TypeError: they are no sequences of module paths.
        ValueError: a tie of one name, or a name in two ties.
    """
    found = tuple(tie if isinstance(tie, str) else tuple(tie) for tie in ties)
    names = [name for tie in found for name in tie]
    if any(isinstance(tie, str) for tie in found) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"ties takes tuples of module paths, (('embed.weight', 'head.weight'),), got {found!r}")
    if any(len(tie) < 2 for tie in found) or len(set(names)) < len(names):
        raise ValueError(f"each of ties needs two names or more, and a name belongs to one of them; got {found!r}")
    return found  # type: ignore[return-value]


def refuse_untrue_ties(ties: Ties, leaves: Mapping[str, Any]) -> None:
    """Raise unless a state with these leaves can be one of a module with these ties.

    Raises:
        ValueError: names what is missing, or held twice.
    """
    paths = {name.partition("/")[2] for name in leaves if name.startswith(("params/", "buffers/"))}
    for first, *others in ties:
        if first not in paths:
            raise ValueError(f"tie of {first!r}: the state has no such parameter or buffer")
        held = [other for other in others if other in paths]
        if held:
            raise ValueError(f"tie of {first!r}: the state holds {held[0]!r} as well, which is to be the same tensor")


def other_names(ties: Ties, name: str) -> Iterator[str]:
    """The leaf names that the ties make of a leaf name: of a parameter, and of what any tree holds for it."""
    head, path = split(name)
    for tie in ties:
        if path in tie:
            yield from (head + other for other in tie if other != path)


def first_name(ties: Ties, name: str) -> str:
    """The leaf name under which a state with these ties holds `name`."""
    head, path = split(name)
    return next((head + tie[0] for tie in ties if path in tie), name)
