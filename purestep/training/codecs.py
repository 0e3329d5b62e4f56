"""One codec for each kind of annotation: how a value becomes a JSON tree, and how the tree becomes the value again.

`codec(annotation)` parses an annotation into a small tree of codecs; each writes a value (raising `ConfigError`) and
reads a tree (noting every problem in a list, so that one error can name them all). Reading constructs the annotated
dataclasses and nothing else: a name in the file is only ever looked up among what the annotation lists.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import enum
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from purestep.sharding.config import ConfigError

_TYPE, _VALUE = "__type__", "__value__"  # keys of a value that carries its type's name
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Codec:
    """Base: `write(value, path)`, `read(tree, path, problems)`, and `expected`, what to call the kind in errors."""

    expected: str

    def write(self, value: Any, path: str) -> Any:
        """`value` as a JSON tree; raises `ConfigError` when it is not of the annotated type."""
        raise NotImplementedError

    def read(self, tree: Any, path: str, problems: list[str]) -> Any:
        """The value that `tree` stands for; when there is none, a line in `problems` and None."""
        raise NotImplementedError

    def _refuse(self, value: Any, path: str) -> ConfigError:
        where = f"`{path}`" if path else "the config"
        return ConfigError(f"{where} is {value!r} ({type(value).__name__}), expected {self.expected}")

    def _mismatch(self, tree: Any, path: str, near: str = "") -> str:
        shown = json.dumps(tree)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return f"{f'`{path}`' if path else 'the file'} is {shown}, expected {self.expected}{near}"


@dataclass(frozen=True)
class _PlainCodec(Codec):
    """int, bool, str and None: themselves, of exactly that type."""

    kind: type

    @property
    def expected(self) -> str:  # type: ignore[override]
        return "null" if self.kind is type(None) else self.kind.__name__

    def write(self, value: Any, path: str) -> Any:
        if type(value) is not self.kind:
            raise self._refuse(value, path)
        return value

    def read(self, tree: Any, path: str, problems: list[str]) -> Any:
        if type(tree) is not self.kind:
            problems.append(self._mismatch(tree, path))
            return None
        return tree


class _FloatCodec(Codec):
    """float; an int is taken for the float it equals. What JSON has no number for is a string."""

    expected = 'a number, "Infinity", "-Infinity" or "NaN"'

    def write(self, value: Any, path: str) -> Any:
        if not isinstance(value, float) and type(value) is not int:
            raise self._refuse(value, path)
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")

    def read(self, tree: Any, path: str, problems: list[str]) -> Any:
        if isinstance(tree, str) and tree in _NON_FINITE:
            return _NON_FINITE[tree]
        if type(tree) in (int, float):
            return float(tree)
        problems.append(self._mismatch(tree, path))
        return None


@dataclass(frozen=True)
class _PathCodec(Codec):
    """A path, as the string it is."""

    kind: type[PurePath]
    expected = "a path"

    def write(self, value: Any, path: str) -> Any:
        if not isinstance(value, self.kind):
            raise self._refuse(value, path)
        return str(value)

    def read(self, tree: Any, path: str, problems: list[str]) -> Any:
        if not isinstance(tree, str):
            problems.append(self._mismatch(tree, path))
            return None
        return self.kind(tree)


@dataclass(frozen=True)
class _ChoiceCodec(Codec):
    """Literal and Enum: one of a few values, each with the plain value that is written for it."""

    choices: tuple[tuple[Any, Any], ...]
    """(value, what is written)."""

    @property
    def expected(self) -> str:  # type: ignore[override]
        return "one of " + ", ".join(json.dumps(written) for _, written in self.choices)

    def write(self, value: Any, path: str) -> Any:
        for choice, written in self.choices:
            if choice == value and type(choice) is type(value):  # True is not 1
                return written
        raise self._refuse(value, path)

    def read(self, tree: Any, path: str, problems: list[str]) -> Any:
        for choice, written in self.choices:
            if written == tree and type(written) is type(tree):
                return choice
        names = [written for _, written in self.choices if isinstance(written, str)]
        problems.append(self._mismatch(tree, path, near(tree, names) if isinstance(tree, str) else ""))
        return None


@dataclass(frozen=True)
class _ItemsCodec(Codec):
    """list[X], tuple[X, ...] and tuple[X, Y]."""

    kind: type
    items: tuple[Codec, ...]
    variadic: bool

    @property
    def expected(self) -> str:  # type: ignore[override]
        if self.variadic:
            return f"a list of: {self.items[0].expected}"
        if not self.items:
            return "an empty list"
        return f"a list of {len(self.items)}: ({'; '.join(item.expected for item in self.items)})"

    def write(self, value: Any, path: str) -> Any:
        if not isinstance(value, (list, tuple)) or type(value) is not self.kind or not self._fits(len(value)):
            raise self._refuse(value, path)
        return [codec.write(item, f"{path}[{i}]") for i, (codec, item) in enumerate(self._pairs(value))]

    def read(self, tree: Any, path: str, problems: list[str]) -> Any:
        if not isinstance(tree, list) or not self._fits(len(tree)):
            problems.append(self._mismatch(tree, path))
            return None
        pairs = enumerate(self._pairs(tree))
        return self.kind(codec.read(item, f"{path}[{i}]", problems) for i, (codec, item) in pairs)

    def _fits(self, length: int) -> bool:
        return self.variadic or length == len(self.items)

    def _pairs(self, values: list | tuple) -> list[tuple[Codec, Any]]:
        codecs = self.items * len(values) if self.variadic else self.items
        return list(zip(codecs, values, strict=True))


@dataclass(frozen=True)
class _TableCodec(Codec):
    """dict[str, X]."""

    item: Codec

    @property
    def expected(self) -> str:  # type: ignore[override]
        return f"an object whose values are: {self.item.expected}"

    def write(self, value: Any, path: str) -> Any:
        if not isinstance(value, dict) or not all(type(name) is str for name in value):
            raise self._refuse(value, path)
        return {name: self.item.write(item, join(path, name)) for name, item in value.items()}

    def read(self, tree: Any, path: str, problems: list[str]) -> Any:
        if not isinstance(tree, dict):
            problems.append(self._mismatch(tree, path))
            return None
        return {name: self.item.read(item, join(path, name), problems) for name, item in tree.items()}


@dataclass(frozen=True)
class _RecordCodec(Codec):
    """A dataclass: an object with exactly its fields; of a `sparse` one, without those that are None."""

    kind: type

    @property
    def expected(self) -> str:  # type: ignore[override]
        return f"an object with the fields of {self.kind.__name__}"

    def write(self, value: Any, path: str) -> Any:
        if type(value) is not self.kind:
            raise self._refuse(value, path)
        tree = {name: codec.write(getattr(value, name), join(path, name)) for name, codec in self._fields(path).items()}
        return {name: item for name, item in tree.items() if item is not None or not self._is_sparse}

    def read(self, tree: Any, path: str, problems: list[str]) -> Any:
        if not isinstance(tree, dict):
            problems.append(self._mismatch(tree, path))
            return None
        before, codecs, values = len(problems), self._fields(path), {}
        for name in tree:
            if name not in codecs:
                problems.append(f"unknown field `{join(path, name)}`{near(name, codecs, path)}")
        for name, codec in codecs.items():
            if name in tree:
                values[name] = codec.read(tree[name], join(path, name), problems)
            elif not self._may_lack(name):
                problems.append(f"missing field `{join(path, name)}`{self._default(name, codec)}")
        if len(problems) > before:
            return None
        try:
            return self.kind(**values)
        except (ValueError, TypeError) as error:  # the class's own validation; a ConfigError names its flag itself
            problems.append(str(error) if isinstance(error, ConfigError) or not path else f"`{path}`: {error}")
            return None

    @property
    def _is_sparse(self) -> bool:
        return getattr(self.kind, "sparse", None) is True

    def _may_lack(self, name: str) -> bool:
        """Whether None is meant when the field is not there."""
        (field,) = (field for field in dataclasses.fields(self.kind) if field.name == name)
        return self._is_sparse and field.default is None

    def _fields(self, path: str) -> dict[str, Codec]:
        hints = typing.get_type_hints(self.kind)
        fields = [field.name for field in dataclasses.fields(self.kind) if field.init]
        return {name: codec_of(hints[name], join(path, name)) for name in fields}

    def _default(self, name: str, codec: Codec) -> str:
        """How to complete an older file, when the class has a default for the field."""
        (field,) = (field for field in dataclasses.fields(self.kind) if field.name == name)
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        else:
            return ""
        return f' (add "{name}": {json.dumps(codec.write(default, name))} for the default of now)'


@dataclass(frozen=True)
class _UnionCodec(Codec):
    """X | Y: as the arm that fits writes it, with the type's name where plain reading would give something else."""

    arms: tuple[tuple[str, Codec], ...]
    """(name, codec), the stricter ones first."""

    @property
    def expected(self) -> str:  # type: ignore[override]
        return " or ".join(codec.expected for _, codec in self.arms)

    def write(self, value: Any, path: str) -> Any:
        for name, codec in self.arms:
            try:
                tree = codec.write(value, path)
            except ConfigError:
                continue
            tagged = {_TYPE: name, **(tree if isinstance(tree, dict) else {_VALUE: tree})}
            for candidate in (tree, tagged):
                if self._gives_back(value, candidate):
                    return candidate
        raise self._refuse(value, path)

    def read(self, tree: Any, path: str, problems: list[str]) -> Any:
        arms = self.arms
        if isinstance(tree, dict) and _TYPE in tree:
            arms = tuple((name, codec) for name, codec in arms if name == tree[_TYPE])
            tree = tree[_VALUE] if _VALUE in tree else {name: item for name, item in tree.items() if name != _TYPE}
        failures = []
        for _, codec in arms:
            attempt: list[str] = []
            value = codec.read(tree, path, attempt)
            if not attempt:
                return value
            if isinstance(codec, _RecordCodec) and isinstance(tree, dict):
                failures.append(attempt)
        # An object was meant for the union's only dataclass: say what is wrong in it, not that nothing fits.
        problems.extend(failures[0] if len(failures) == 1 else [self._mismatch(tree, path)])
        return None

    def _gives_back(self, value: Any, tree: Any) -> bool:
        problems: list[str] = []
        back = self.read(tree, "", problems)
        # repr tells 1 from 1.0 and True at any depth, and takes NaN for itself.
        return not problems and type(back) is type(value) and repr(back) == repr(value)


def codec_of(annotation: Any, path: str = "") -> Codec:
    """The codec of an annotation.

    Raises:
        ConfigError: the annotation has no JSON form; `path` is named.
    """
    annotation = _bare(annotation)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        arms = sorted(((_name(arm), codec_of(arm, path)) for arm in args), key=_looseness)
        return _UnionCodec(tuple(arms))
    if origin is Literal:
        return _ChoiceCodec(tuple((choice, getattr(choice, "name", choice)) for choice in args))
    if origin is list or (origin is tuple and args[1:] == (Ellipsis,)):
        return _ItemsCodec(origin, (codec_of(args[0], path),), variadic=True)
    if origin is tuple:
        return _ItemsCodec(tuple, tuple(codec_of(arg, path) for arg in args), variadic=False)
    if origin in (dict, collections.abc.Mapping) and args[0] is str:
        return _TableCodec(codec_of(args[1], path))
    if annotation in (int, bool, str, type(None)):
        return _PlainCodec(annotation)
    if annotation is float:
        return _FloatCodec()
    if isinstance(annotation, type):
        if dataclasses.is_dataclass(annotation):
            return _RecordCodec(annotation)
        if issubclass(annotation, PurePath):
            return _PathCodec(annotation)
        if issubclass(annotation, enum.Enum):
            return _ChoiceCodec(tuple((member, name) for name, member in annotation.__members__.items()))
    raise ConfigError(
        f"`{path}` is annotated {_name(annotation)}, which has no JSON form; use int, float, bool, str, Path, Enum, "
        "Literal, tuple[...], list[...], dict[str, ...], a dataclass, or a union of these"
    )


def near(name: str, known: Iterable[str], path: str = "") -> str:
    """`, did you mean ...?` when a known name is close, else nothing."""
    matches = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
    return f", did you mean {' or '.join(f'`{join(path, match)}`' for match in matches)}?" if matches else ""


def join(path: str, name: str) -> str:
    """The path of field `name` inside `path`."""
    return f"{path}.{name}" if path else name


def _bare(annotation: Any) -> Any:
    """`annotation` without what says nothing about the values: Annotated, NewType, a name given by `type`."""
    while True:
        if hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        elif hasattr(annotation, "__metadata__"):
            annotation = annotation.__origin__
        elif type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        else:
            return annotation


def _looseness(arm: tuple[str, Codec]) -> int:
    """Order in which the arms of a union are tried: an int is no float, and what a stricter type takes is no str."""
    loose: Mapping[str, int] = {"float": 1, "str": 3}
    return loose.get(arm[0], 2 if isinstance(arm[1], _PathCodec) else 0)


def _name(annotation: Any) -> str:
    annotation = _bare(annotation)
    if annotation is type(None):
        return "None"
    if typing.get_origin(annotation) is None and isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).replace("typing.", "")
