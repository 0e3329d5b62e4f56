"""Renaming the leaves of a checkpoint by patterns, and guessing the patterns somebody needs. Needs no torch."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from purestep.state.files.manifest import TREES

Shapes = Mapping[str, tuple[int, ...]]
"""Leaf name -> shape."""

_ROOTS = tuple(f"{tree}/" for tree in TREES)
_MAX_GUESSES = 4  # patterns suggested at once
_MAX_CANDIDATES = 64  # names compared letter by letter


@dataclass(frozen=True)
class Rule:
    """One pattern of a `rename=`, and what becomes of the names it matches."""

    old: str
    new: tuple[str, ...]
    whole: bool = field(init=False)
    """Whether it is about whole leaf names; if not, about module paths."""
    _pattern: re.Pattern = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for text in (self.old, *self.new):
            if not isinstance(text, str) or not text:
                raise TypeError(f"rename takes patterns, {{'old.*': 'new.*'}}, got {text!r}")
            if text.startswith(_ROOTS) != self.old.startswith(_ROOTS):
                raise ValueError(f"rename {self.old!r} -> {text!r}: start both with a tree such as 'params/', or none")
            if text.count("*") != self.old.count("*"):
                raise ValueError(f"rename {self.old!r} -> {text!r}: both sides need the same number of '*'")
        if not self.new:
            raise ValueError(f"rename {self.old!r} -> nothing: give it a new name")
        object.__setattr__(self, "whole", self.old.startswith(_ROOTS))
        object.__setattr__(self, "_pattern", re.compile("(.*)".join(map(re.escape, self.old.split("*"))), re.DOTALL))

    def apply(self, name: str) -> tuple[str, ...] | None:
        """The names that `name` turns into; None if the pattern does not match."""
        head, path = ("", name) if self.whole else split(name)
        found = None if path is None else self._pattern.fullmatch(path)
        return found and tuple(head + _fill(new, found.groups()) for new in self.new)


@dataclass(frozen=True)
class Renaming:
    """The rules of a `rename=` together.

    >>> renaming = Renaming.of({"old.*": "new.*", "opt_state/adamw/*": "opt_state/opt/*"})
    >>> renaming.apply(["params/old.w", "params/b", "opt_state/adamw/exp_avg/old.w"])
    {'params/old.w': ('params/new.w',), 'params/b': ('params/b',),
     'opt_state/adamw/exp_avg/old.w': ('opt_state/opt/exp_avg/new.w',)}
    """

    rules: tuple[Rule, ...] = ()

    @classmethod
    def of(cls, rename: Mapping[str, str | tuple[str, ...]] | None) -> Renaming:
        """The renaming that somebody wrote.

        Raises:
            TypeError: it is no mapping of patterns.
            ValueError: the two sides of a rule do not belong together.
        """
        if not isinstance(rename, Mapping | None):
            raise TypeError(f"rename takes a mapping of patterns, {{'old.*': 'new.*'}}, got {rename!r}")
        items = (rename or {}).items()
        return cls(tuple(Rule(old, tuple(new) if isinstance(new, list | tuple) else (new,)) for old, new in items))

    def apply(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Each of the names with what it turns into: itself, if no rule matches.

        Raises:
            ValueError: a rule matches none of the names.
        """
        used: set[Rule] = set()
        renamed = {name: self._apply(name, used) for name in names}
        idle = [repr(rule.old) for rule in self.rules if rule not in used]
        if idle:
            raise ValueError(f"rename {', '.join(idle)} matches no leaf (that no earlier pattern took)")
        return renamed

    def _apply(self, name: str, used: set[Rule]) -> tuple[str, ...]:
        new = self._first(name, True, used)
        return tuple(dict.fromkeys(last for between in new for last in self._first(between, False, used)))

    def _first(self, name: str, whole: bool, used: set[Rule]) -> tuple[str, ...]:
        for rule in self.rules:
            new = rule.apply(name) if rule.whole == whole else None
            if new is not None:
                used.add(rule)
                return new
        return (name,)


def split(name: str) -> tuple[str, str | None]:
    """A leaf name as what comes before its module path, and that path: None in `extra`, which has no modules."""
    tree = name.partition("/")[0]
    if tree == "extra":
        return name, None
    head = name.rpartition("/")[0] if tree == "opt_state" else tree
    return f"{head}/", name[len(head) + 1 :]


def suggest(missing: Shapes, unexpected: Shapes, matched: Iterable[str]) -> dict[str, str]:
    """A `rename=` that turns names of `unexpected` into names of `missing`; empty if nothing is likely.

    Each pattern given is right for every leaf of the checkpoint it matches: none of `matched` is touched, and shapes
    agree. The cost is linear in the number of names.
    """
    missing, unexpected, matched = dict(missing), dict(unexpected), list(matched)
    rules: dict[str, str] = {}
    for old, new in _guesses(missing, unexpected):
        rule = Rule(old, (new,))
        applied = {name: rule.apply(name) for name in unexpected}
        pairs = {name: renamed[0] for name, renamed in applied.items() if renamed}
        sound = all(missing.get(renamed) == unexpected[name] for name, renamed in pairs.items())
        if pairs and sound and len(set(pairs.values())) == len(pairs) and not any(map(rule.apply, matched)):
            rules[old] = new
            for name in pairs:
                del unexpected[name], missing[pairs[name]]
            if len(rules) == _MAX_GUESSES:
                break
    return rules


def _guesses(missing: dict[str, tuple[int, ...]], unexpected: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, str]]:
    """Candidates, likeliest first, each made while `suggest` takes what it has explained out of the two tables."""
    by_ending: dict[tuple, str] = {}
    for name, shape in unexpected.items():
        for start in _starts(name):
            by_ending.setdefault((name.partition("/")[0], name[start:], shape), name)
    votes: Counter = Counter()
    for name, shape in missing.items():
        for start in _starts(name):
            other = by_ending.get((name.partition("/")[0], name[start:], shape))
            if other:
                votes[other[: len(other) - len(name) + start], name[:start]] += 1
                break
    for (old, new), _ in votes.most_common(2 * _MAX_GUESSES):
        (head, old_path), (new_head, new_path) = split(old), split(new)
        if head == new_head and old_path is not None:
            yield f"{old_path}*", f"{new_path}*"
        yield f"{old}*", f"{new}*"
    for name in list(missing)[:_MAX_CANDIDATES]:
        others = [other for other, shape in unexpected.items() if shape == missing.get(name)][:_MAX_CANDIDATES]
        for other in difflib.get_close_matches(name, others, n=1, cutoff=0.7):
            (head, old_path), (new_head, new_path) = split(other), split(name)
            if head == new_head and old_path and new_path:
                yield old_path, new_path
            yield other, name


def _starts(name: str) -> Iterator[int]:
    """Where a part of a name begins: after each slash and dot, the longest ending first."""
    return (found.end() for found in re.finditer(r"[/.]", name))


def _fill(pattern: str, texts: tuple[str, ...]) -> str:
    first, *rest = pattern.split("*")
    return first + "".join(text + part for text, part in zip(texts, rest, strict=True))
