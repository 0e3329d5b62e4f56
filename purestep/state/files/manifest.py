"""What a checkpoint says about itself: `state.json`, written and read without torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from purestep.state.names import escape, unescape

MANIFEST = "state.json"
FORMAT_VERSION = 1
FORMATS = ("safetensors", "dcp", "safetensors_dcp")
_INTEGER_BITS = 2048  # Python itself may refuse to read more than 640 digits
TREES = ("params", "buffers", "opt_state", "ema", "extra")


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, cannot be trusted or does not fit; the message names the file or leaf."""


class DamagedCheckpointError(CheckpointError):
    """What is on disk is not what was saved: an older checkpoint may still be good."""


@dataclass(frozen=True)
class StoredBlock:
    """Where a block of a leaf is kept. In its file it goes by the leaf's name (in `model/`: by its module path)."""

    file: str
    """Path of the safetensors file, relative to the checkpoint."""
    offset: tuple[int, ...]
    """Index in the leaf of the block's first element."""
    shape: tuple[int, ...]
    """Lengths of the block."""


@dataclass(frozen=True)
class LeafInfo:
    """One row of the leaf table."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name for it, e.g. `bfloat16`."""
    placement: str
    """How the run that saved it held it: `whole`, or one word a mesh axis."""
    digest: str
    """16 hex digits over the values, whatever the topology; see `state.digests`."""
    blocks: tuple[StoredBlock, ...] | None = None
    """Where it is kept; None: in the DCP checkpoint `state/`."""

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * _itemsize(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything `state.json` holds."""

    format: str
    """`safetensors`, `dcp` or `safetensors_dcp`."""
    step: int
    """Optimizer updates done."""
    key: str
    """The run's base key in hex."""
    digest: str
    """`TrainState.digest()` of the state."""
    topology: Mapping[str, Any]
    """`world_size`, and `mesh` (axis name -> size) when leaves were sharded."""
    versions: Mapping[str, str]
    """Versions of the libraries that wrote it."""
    metadata: Mapping[str, Any]
    """The user's own, as given to `save`."""
    extra: Any
    """The tree of `TrainState.extra`: plain values, and the names of tensors; see `encode_tree`."""
    files: Mapping[str, int]
    """Path -> bytes of every file but `state.json` and `SHA256SUMS`."""
    leaves: Mapping[str, LeafInfo]
    """Leaf name -> row, sorted by name."""
    ties: tuple[tuple[str, ...], ...] = ()
    """The names that the module had for each tied tensor; the first is the state's."""
    format_version: int = FORMAT_VERSION


def digest_text(total: int) -> str:
    """A leaf's digest as the leaf table has it: 16 hex digits of a sum modulo 2**64."""
    return f"{total % 2**64:016x}"


def dump(manifest: Manifest) -> str:
    """The text of `state.json`: the same for the same manifest, a leaf a line."""
    leaves = [
        {
            "name": leaf.name,
            "shape": leaf.shape,
            "dtype": leaf.dtype,
            "placement": leaf.placement,
            "digest": leaf.digest,
        }
        | ({} if leaf.blocks is None else {"blocks": [vars(block) for block in leaf.blocks]})
        for _, leaf in sorted(manifest.leaves.items())
    ]
    fields = {
        "format_version": manifest.format_version,
        "format": manifest.format,
        "step": manifest.step,
        "key": manifest.key,
        "digest": manifest.digest,
        "topology": manifest.topology,
        "versions": dict(sorted(manifest.versions.items())),
        "metadata": manifest.metadata,
        "extra": manifest.extra,
        **({"ties": manifest.ties} if manifest.ties else {}),
        "files": dict(sorted(manifest.files.items())),
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value, allow_nan=False)},\n" for name, value in fields.items()]
    rows = ",\n".join("  " + json.dumps(leaf) for leaf in leaves)
    return "{\n" + "".join(lines) + ' "leaves": [\n' + rows + "\n ]\n}\n"


def parse(text: str | bytes) -> Manifest:
    """Read and validate the text of `state.json`.

    Raises:
        CheckpointError: a newer purestep wrote it, or what it says is no state of ours.
    """
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{MANIFEST} is not JSON: {error}") from None
    version = _get(table, "format_version", int)
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{MANIFEST} has format version {version}, this purestep reads up to {FORMAT_VERSION}: use a newer purestep"
        )
    files = {name: size for name, size in _get(table, "files", dict).items() if _is_file(name, size)}
    leaves = [_parse_leaf(row, files) for row in _get(table, "leaves", list)]
    manifest = Manifest(
        format=_get(table, "format", str),
        step=_get(table, "step", int),
        key=_get(table, "key", str),
        digest=_get(table, "digest", str),
        topology=_get(table, "topology", dict),
        versions=_get(table, "versions", dict),
        metadata=_get(table, "metadata", dict),
        extra=_get(table, "extra", dict),
        files=files,
        leaves={leaf.name: leaf for leaf in leaves},
        ties=_parse_ties(table.get("ties", [])),
        format_version=version,
    )
    _validate(manifest, len(leaves))
    return manifest


def encode_tree(prefix: str, tree: Any, is_tensor: Callable[[Any], bool]) -> Any:
    """A tree of plain values and tensors as JSON: every object has one member, which says what it is.

    Keys are written as they are in leaf names, so that 1 and "1" stay two keys: see `purestep.state.names`.

    Raises:
        TypeError: a value or key of a type that JSON cannot keep; names it.
        ValueError: a value or key that JSON cannot keep; names it.

    >>> encode_tree("extra", {"scale": 2.0, "sizes": (1, 2), 3: None}, lambda value: False)
    {'dict': {'scale': 2.0, 'sizes': {'tuple': [1, 2]}, '~i3': None}}
    """
    if is_tensor(tree):
        return {"tensor": prefix}
    if isinstance(tree, Mapping):
        names = [(escape(key, prefix), value) for key, value in tree.items()]
        for name, _ in names:
            _refuse_surrogates(f"{prefix}/{name}", name)
        return {"dict": {name: encode_tree(f"{prefix}/{name}", value, is_tensor) for name, value in names}}
    if type(tree) in (list, tuple):
        kind = type(tree).__name__
        return {kind: [encode_tree(f"{prefix}/{i}", value, is_tensor) for i, value in enumerate(tree)]}
    if type(tree) is float and not math.isfinite(tree):
        return {"float": repr(tree)}
    if type(tree) is str:
        _refuse_surrogates(prefix, tree)
    if type(tree) is int and tree.bit_length() > _INTEGER_BITS:
        raise ValueError(f"{prefix!r} is an integer of {tree.bit_length()} bits, a checkpoint keeps {_INTEGER_BITS}")
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    raise TypeError(
        f"{prefix!r} is a {type(tree).__name__}, which a checkpoint cannot keep: use tensors, numbers, strings, bools, "
        "None, and dicts, lists and tuples of them"
    )


def decode_tree(node: Any, tensor: Callable[[str], Any]) -> Any:
    """The tree that `encode_tree` wrote, each tensor being what `tensor(name)` gives.

    >>> decode_tree({"dict": {"sizes": {"tuple": [1, {"float": "inf"}]}}}, str)
    {'sizes': (1, inf)}
    """
    return _decode("extra", node, tensor)


def plain_values(manifest: Manifest) -> dict[str, Any]:
    """The plain (non-tensor) values of a state, by name."""
    return dict(_plain_values("extra", manifest.extra))


def _plain_values(prefix: str, node: Any) -> Iterator[tuple[str, Any]]:
    ((kind, value),) = node.items() if isinstance(node, dict) else ((None, node),)
    if kind == "dict":
        for name, item in value.items():
            yield from _plain_values(f"{prefix}/{name}", item)
    elif kind in ("list", "tuple"):
        for i, item in enumerate(value):
            yield from _plain_values(f"{prefix}/{i}", item)
    elif kind != "tensor":
        yield prefix, decode_tree(node, str)


def as_json(where: str, value: Any) -> Any:
    """`value` as JSON keeps it (tuples become lists).

    Raises:
        TypeError: JSON cannot keep it; says where.
    """
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"{where!r} has the key {name!r} ({type(name).__name__}): JSON keeps string keys only")
            _refuse_surrogates(where, name)
        return {name: as_json(f"{where}[{name!r}]", item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(f"{where}[{i}]", item) for i, item in enumerate(value)]
    if type(value) is str:
        _refuse_surrogates(where, value)
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    raise TypeError(
        f"{where} is {value!r}, which JSON cannot keep: use strings, finite numbers, bools, None, lists, dicts"
    )


def is_inside(name: str) -> bool:
    """Whether `name` is a plain relative path that cannot leave the directory it is joined to."""
    return bool(re.fullmatch(r"[\x21-\x5b\x5d-\x7e]+", name)) and all(p not in ("", ".", "..") for p in name.split("/"))


def _parse_leaf(row: Any, files: Mapping[str, int]) -> LeafInfo:
    name = _get(row, "name", str)
    shape = _lengths(row, "shape")
    blocks = None
    if "blocks" in row:
        blocks = tuple(
            StoredBlock(_get(block, "file", str), _lengths(block, "offset"), _lengths(block, "shape"))
            for block in _get(row, "blocks", list)
        )
        for block in blocks:
            inside = len(block.offset) == len(block.shape) == len(shape) and all(
                start + length <= whole for start, length, whole in zip(block.offset, block.shape, shape, strict=True)
            )
            if block.file not in files or not inside:
                raise DamagedCheckpointError(f"{MANIFEST}: leaf {name!r} has a block that cannot be: {block}")
        if sum(math.prod(block.shape) for block in blocks) != math.prod(shape):
            raise DamagedCheckpointError(f"{MANIFEST}: the blocks of leaf {name!r} do not add up to its shape {shape}")
    dtype, digest = _get(row, "dtype", str), _get(row, "digest", str)
    if name.split("/")[0] not in TREES or "/" not in name or not re.fullmatch(r"[a-z]+[a-z0-9_]*", dtype):
        raise DamagedCheckpointError(f"{MANIFEST}: leaf {name!r} of dtype {dtype!r} is no leaf of a state")
    for part in name.split("/"):
        _key(part)
    return LeafInfo(name, shape, dtype, _get(row, "placement", str), digest, blocks)


def _parse_ties(ties: Any) -> tuple[tuple[str, ...], ...]:
    lists = isinstance(ties, list) and all(isinstance(tie, list) for tie in ties)
    if not lists or not all(isinstance(name, str) for tie in ties for name in tie):
        raise DamagedCheckpointError(f"{MANIFEST}: 'ties' must be lists of names, got {ties!r:.60}")
    return tuple(map(tuple, ties))


def _validate(manifest: Manifest, num_rows: int) -> None:
    if manifest.format not in FORMATS:
        raise DamagedCheckpointError(f"{MANIFEST}: unknown format {manifest.format!r}, expected one of {FORMATS}")
    if manifest.step < 0 or not re.fullmatch(r"[0-9a-f]{32}", manifest.key):
        raise DamagedCheckpointError(f"{MANIFEST}: step {manifest.step} and key {manifest.key!r} are no step and key")
    if num_rows != len(manifest.leaves):
        raise DamagedCheckpointError(f"{MANIFEST}: two leaves have one name")
    if manifest.format == "safetensors" and any(leaf.blocks is None for leaf in manifest.leaves.values()):
        raise DamagedCheckpointError(f"{MANIFEST}: leaves without blocks in a checkpoint of format 'safetensors'")
    named = [name for name in manifest.leaves if name.startswith("extra/")]
    used: list[str] = []
    if not isinstance(decode_tree(manifest.extra, used.append), dict) or sorted(used) != sorted(named):
        raise DamagedCheckpointError(f"{MANIFEST}: 'extra' and the leaf table do not agree")


def _get(table: Any, name: str, kind: type) -> Any:
    value = table.get(name) if isinstance(table, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise DamagedCheckpointError(f"{MANIFEST}: {name!r} must be {kind.__name__}, got {value!r:.60}")
    return value


def _lengths(table: Any, name: str) -> tuple[int, ...]:
    value = _get(table, name, list)
    if not all(type(length) is int and length >= 0 for length in value):
        raise DamagedCheckpointError(f"{MANIFEST}: {name!r} must be lengths, got {value!r:.60}")
    return tuple(value)


def _is_file(name: str, size: Any) -> bool:
    if not is_inside(name) or type(size) is not int:
        raise DamagedCheckpointError(f"{MANIFEST}: {name!r} ({size!r} bytes) is no file inside a checkpoint")
    return True


def _decode(prefix: str, node: Any, tensor: Callable[[str], Any]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items() if len(node) == 1 else ((None, None),)
    if kind == "tensor" and value == prefix:
        return tensor(prefix)
    if kind == "dict" and isinstance(value, dict):
        return {_key(name): _decode(f"{prefix}/{name}", item, tensor) for name, item in value.items()}
    if kind in ("list", "tuple") and isinstance(value, list):
        return (list if kind == "list" else tuple)(_decode(f"{prefix}/{i}", x, tensor) for i, x in enumerate(value))
    if kind == "float" and value in ("nan", "inf", "-inf"):
        return float(value)
    raise DamagedCheckpointError(f"{MANIFEST}: 'extra' holds something that is no tree: {json.dumps(node)[:80]}")


def _key(name: str) -> str | int:
    try:
        return unescape(name)
    except ValueError as error:
        raise DamagedCheckpointError(f"{MANIFEST}: {error}") from None


def _refuse_surrogates(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name!r}: it holds half a surrogate pair, which cannot be written as UTF-8") from None


def _itemsize(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1
