"""`load_params`: weights from a file, a folder, a checkpoint or the Hub, streamed into a module's own shards."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from purestep.sharding.load_matching import Asked, Found, LoadReport, Stored, match
from purestep.state.blocks import Target, flat_bytes
from purestep.state.checkpoint.casting import cast_into
from purestep.state.checkpoint.checkpoints import Checkpoints
from purestep.state.checkpoint.matching import STRICT
from purestep.state.checkpoint.opening import fingerprint, open_together
from purestep.state.checkpoint.renaming import Renaming
from purestep.state.checkpoint.restoring import restore
from purestep.state.collective import gather_objects, on_every_rank
from purestep.state.exchange import hub
from purestep.state.exchange.importing import import_params, is_checkpoint
from purestep.state.exchange.tensor_source import StoredTensor
from purestep.state.files.commit import held_for_reading
from purestep.state.files.manifest import CheckpointError, DamagedCheckpointError
from purestep.state.keys import Key
from purestep.state.patience import with_patience
from purestep.state.placement import block_of, default_rank, empty_leaf, is_dtensor
from purestep.state.train_state import clone_leaf, make_state

if TYPE_CHECKING:
    from purestep.sharding.pure_module import PureModule

_logger = logging.getLogger("purestep")
_CHUNK_BYTES = 16 << 20  # of a file, that are in memory beside the shards
_STEP = re.compile(r"step-\d{8,}")
Strict = Literal["exact", "exact_but_dtype", "partial"]
Rename = Mapping[str, str | Sequence[str]]
Leaves = dict[str, Tensor]


class _Request(NamedTuple):
    """What is asked for, apart from the module."""

    source: str | None
    strict: str
    rename: Rename | None
    renaming: Renaming
    revision: str | None
    token: str | bool | None


@overload
def load_params(
    module: PureModule,
    source: str | os.PathLike | None = ...,
    *,
    rename: Rename | None = ...,
    strict: Strict = ...,
    revision: str | None = ...,
    token: str | bool | None = ...,
    with_report: Literal[False] = ...,
) -> tuple[Leaves, Leaves]: ...


@overload
def load_params(
    module: PureModule,
    source: str | os.PathLike | None = ...,
    *,
    rename: Rename | None = ...,
    strict: Strict = ...,
    revision: str | None = ...,
    token: str | bool | None = ...,
    with_report: Literal[True],
) -> tuple[Leaves, Leaves, LoadReport]: ...


def load_params(
    module: PureModule,
    source: str | os.PathLike | None = None,
    *,
    rename: Rename | None = None,
    strict: Strict = "exact",
    revision: str | None = None,
    token: str | bool | None = None,
    with_report: bool = False,
) -> tuple[Leaves, Leaves] | tuple[Leaves, Leaves, LoadReport]:
    """Read weights into leaves placed as the module's: `ps.init(module, optimizer, key, params=..., buffers=...)`.

    Each rank reads the bytes of its own shards, straight into them: no rank ever holds the whole model, not even a
    whole tensor. (Of a checkpoint of purestep each rank also hashes its share of the files.) Nothing is unpickled. In a
    process group this is a collective call, and if it fails on one rank, all raise.

    Args:
        module: from `ps.shard`; built on the meta device, say.
        source: a safetensors file; a folder in Hugging Face's layout, or a DCP folder, as `ps.import_params` takes
            them; a checkpoint of purestep, a folder of such or a run directory (its newest undamaged one); or the name
            of a model on the Hugging Face Hub, `org/name`, whose safetensors files one process of each machine puts
            into the cache. None: the values the module was built with, before `ps.init`.
        rename: patterns of names in the source -> patterns of the module's names, as in `ps.restore`:
            `{"*": "model.*"}`. A list of new names unties.
        strict: `exact`: the source must hold exactly the module's parameters and persistent buffers. (What it holds for
            non-persistent ones is passed over: the module computes them.) `exact_but_dtype`: values are cast to the
            module's dtypes, as in `ps.restore`. `partial`: what both have is loaded, and the rest is missing in what
            is returned.
        revision: of a model on the Hub: a branch, a tag or a commit.
        token: for the Hub: a token, or True for the one that is stored; default that, or HF_TOKEN, if there is one.
        with_report: also return a `LoadReport`: what was loaded, missing, unexpected, cast and renamed.

    Returns:
        (params, buffers), by the module's names, on the runtime's device, and the report if asked for. Where the source
        holds several names of a tied weight, their values must be equal.

    Raises:
        CheckpointError: there is nothing to load, it is damaged, the Hub does not give it, or it does not fit the
            module (names every missing, unexpected, mis-shaped and differently typed leaf).
        ValueError, TypeError: an argument is not as described.

    >>> import tempfile, torch, purestep as ps
    >>> from safetensors.torch import save_file
    >>> module = ps.shard(torch.nn.Linear(2, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"net.weight": torch.ones(1, 2), "net.bias": torch.zeros(1)}, f"{folder}/x.safetensors")
    ...     params, buffers = ps.load_params(module, f"{folder}/x.safetensors", rename={"net.*": "*"})
    >>> params["weight"], buffers
    (tensor([[1., 1.]]), {})
    """
    request = _agree(source, strict, rename, revision, token)
    if request.source is None:
        leaves, report = _constructed(module, request)
    elif os.path.lexists(request.source):
        leaves, report = _from_path(module, Path(request.source), request)
    else:
        path = _from_hub(module, request)
        leaves, report = _from_tensors(module, path, request)
    if report.cast and default_rank() == 0:
        _logger.info("%s", report)
    params = {name: leaves[name] for name in module.leaves.params if name in leaves}
    buffers = {name: leaves[name] for name in module.leaves.buffers if name in leaves}
    return (params, buffers, report) if with_report else (params, buffers)


def _agree(source: Any, strict: str, rename: Any, revision: str | None, token: Any) -> _Request:
    """The request, the same on every rank: ranks that read different leaves would wait for each other."""

    def said() -> tuple[dict[str, Any], bool]:
        path = os.fspath(source) if isinstance(source, str | os.PathLike) else source
        if path is not None and not isinstance(path, str):
            raise TypeError(f"source must be a path or the name of a model on the Hub, got {source!r}")
        if strict not in STRICT:
            raise ValueError(f"strict must be one of {', '.join(map(repr, STRICT))}, got {strict!r}")
        here = path is not None and os.path.lexists(path)
        if path is not None and not here and not hub.is_hub_id(source):
            raise CheckpointError(f"there is nothing at {path}, and it is not the name of a model on the Hub, org/name")
        if (path is None or here) and revision is not None:
            raise ValueError(f"revision={revision!r} is for a model on the Hub, and source is {path or 'None'}")
        renaming = Renaming.of(rename)
        if path is None and renaming.rules:
            raise ValueError("rename is for what is read from a source, and source is None")
        options = {"source": path, "strict": strict, "rename": repr(renaming), "revision": revision}
        return options, here

    (first, here), *others = on_every_rank(said)
    for rank, (other, also_here) in enumerate(others, start=1):
        wrong = " and ".join(name for name, value in first.items() if other[name] != value)
        if wrong:
            raise ValueError(f"every rank must load the same, but {wrong} of rank {rank} is not that of rank 0")
        if here != also_here:
            rank_without = rank if here else 0
            raise CheckpointError(f"rank {rank_without} finds nothing at {first['source']}, others do: copy it there")
    return _Request(first["source"], strict, rename, Renaming.of(rename), revision, token)


def _constructed(module: PureModule, request: _Request) -> tuple[Leaves, LoadReport]:
    """Copies of what the constructor set; it must be one value on all ranks."""
    leaves = {**module.leaves.params, **module.leaves.buffers}
    missing = [name for name in leaves if name not in module.constructed]
    if missing and request.strict != "partial":
        raise ValueError(
            f"{missing[0]!r} was built on the meta device and has no values; name a source"
            if leaves[missing[0]].is_meta
            else f"the value {missing[0]!r} was built with is gone: ps.init drops it; call ps.load_params before"
        )
    names = [name for name in leaves if name in module.constructed]
    tables = gather_objects({name: module.kept.get(name) for name in names})
    for name in names:
        if any(table.get(name) != tables[0].get(name) for table in tables):
            raise ValueError(
                f"{name!r} was built with different values on different ranks: seed the constructors alike, or load a "
                "file on all of them"
            )
    values = {}
    for name in names:
        value = module.constructed[name]
        values[name] = clone_leaf(value if is_dtensor(value) else value.to(module.runtime.device))
    report = LoadReport("the module's own values", request.strict, loaded=tuple(names), missing=tuple(missing))
    return values, report


def _from_path(module: PureModule, path: Path, request: _Request) -> tuple[Leaves, LoadReport]:
    if on_every_rank(lambda: is_checkpoint(path))[0]:
        return _from_checkpoint(module, path, request)
    for folder in (path, path / "checkpoints"):
        if any(on_every_rank(partial(_has_steps, folder))):
            return _from_newest(module, Checkpoints(folder), request)
    return _from_tensors(module, path, request)


def _has_steps(folder: Path) -> bool:
    return folder.is_dir() and any(_STEP.fullmatch(name) for name in os.listdir(folder))


def _from_newest(module: PureModule, checkpoints: Checkpoints, request: _Request) -> tuple[Leaves, LoadReport]:
    damage = []
    for step in reversed(checkpoints.steps()):
        try:
            return _from_checkpoint(module, checkpoints.path(step), request)
        except DamagedCheckpointError as error:
            damage.append(str(error))
            if default_rank() == 0:
                _logger.warning("skipping %s: %s", checkpoints.path(step), error)
    found = "".join(f"\n  {line}" for line in damage) or " (there is none)"
    raise CheckpointError(f"no undamaged checkpoint in {checkpoints.directory}:{found}")


def _from_checkpoint(module: PureModule, path: Path, request: _Request) -> tuple[Leaves, LoadReport]:
    """Params and buffers of a checkpoint of ours: read and verified as `restore` does."""
    with held_for_reading(path):
        contents = open_together(path, verify=False)  # restore does
        rows = contents.manifest.leaves
        stored = {
            name: Stored(tuple(row.shape), row.dtype)
            for name, row in rows.items()
            if name.startswith(("params/", "buffers/"))
        }
        asked, ties = _asked(module), contents.manifest.ties
        where = f"checkpoint {path} (step {contents.manifest.step})"
        found = match(where, stored, asked, request.strict, request.renaming, source_ties=ties)
        trees = {
            "params": {name: leaf for name, leaf in module.abstract_params().items() if name in found.sources},
            "buffers": {name: leaf for name, leaf in module.abstract_buffers().items() if name in found.sources},
        }
        state = make_state(step=0, opt_state={}, key=Key(b"\0" * 16), ema=None, extra={}, **trees)
        restored = restore(
            path,
            state,
            device=module.runtime.device,
            strict="partial",
            include=[f"{tree}/*" for tree, leaves in trees.items() if leaves],
            rename=request.rename,
            ties=asked.ties,
        )
    return {**restored.params, **restored.buffers}, found.report


def _from_hub(module: PureModule, request: _Request) -> Path:
    """The file in this machine's cache. Rank 0 asks the Hub; the first rank of a machine downloads what is missing."""
    assert request.source is not None
    repo, runtime = request.source, module.runtime

    def ask() -> hub.HubFile | None:
        return hub.download(repo, revision=request.revision, token=request.token) if runtime.is_main else None

    file = gather_objects(with_patience(ask))[0]

    def complete() -> None:
        if runtime.local_rank == 0 and hub.locate(file) is None:
            hub.download(repo, revision=file.commit, token=request.token)

    with_patience(complete)
    path = with_patience(lambda: hub.locate(file))
    if any(gather_objects(path is None)):
        raise CheckpointError(f"{repo} was downloaded, but {file.name} is not in the cache of every machine")
    assert path is not None
    return path


def _from_tensors(module: PureModule, path: Path, request: _Request) -> tuple[Leaves, LoadReport]:
    """Stored tensors of any kind, each rank its blocks."""

    def read() -> tuple[Leaves, Found]:
        with import_params(path) as tensors, torch.no_grad():
            stored = {f"params/{name}": Stored(t.shape, _dtype(t.dtype)) for name, t in tensors.items()}
            where = f"{tensors.kind} {request.source}"
            found = match(where, stored, _asked(module), request.strict, request.renaming)
            like = {**module.abstract_params(), **module.abstract_buffers()}
            leaves = {}
            for name, olds in found.sources.items():
                of_name = [tensors[old.removeprefix("params/")] for old in olds]
                leaves[name] = _read(name, of_name, like[name], module.runtime.device)
            return leaves, found

    leaves, found = with_patience(read)
    tables = gather_objects(fingerprint({name: list(olds) for name, olds in found.sources.items()}))
    if len(set(tables)) > 1:
        raise CheckpointError(f"{path}: the ranks see different files; copy it to every machine, or to one they share")
    return leaves, found.report


def _asked(module: PureModule) -> Asked:
    leaves = {**module.leaves.params, **module.leaves.buffers}
    names = _all_names(module)
    wanted = {name: Stored(tuple(leaf.shape), _dtype(leaf.dtype)) for name, leaf in leaves.items()}
    dtypes = {name: leaf.dtype for name, leaf in leaves.items()}
    constants = {other for name in module.leaves.constants for other in names[name]}
    return Asked(wanted, dtypes, frozenset(constants), tuple(names[name] for name in leaves if len(names[name]) > 1))


def _all_names(module: PureModule) -> dict[str, tuple[str, ...]]:
    """Every name of each leaf, its own first: those of tied weights, and those under which a shared module is found."""
    paths: dict[int, list[str]] = {}
    for path, submodule in module.module.named_modules(remove_duplicate=False):
        paths.setdefault(id(submodule), []).append(f"{path}." if path else "")
    leaves = {**module.leaves.params, **module.leaves.buffers, **module.leaves.constants}
    return {
        name: tuple(dict.fromkeys([name, *(p + s.attr for s in leaf.slots for p in paths[id(s.module)])]))
        for name, leaf in leaves.items()
    }


def _read(name: str, stored: list[StoredTensor], like: Tensor, device: torch.device) -> Tensor:
    """This rank's block of a leaf, from one tensor, or from several that must be equal."""
    leaf = empty_leaf(like, device)
    block = block_of(leaf)
    target = Target(leaf, block.local, block.offset)
    first, *others = stored
    in_place = first.dtype == leaf.dtype and block.local.device.type == "cpu" and not others
    if in_place and block.local.is_contiguous():
        first.fill(target)
        return leaf
    for part in _parts(target, max(tensor.dtype.itemsize for tensor in stored)):
        values = _fetch(first, part)
        for other in others:
            same = other.dtype == first.dtype
            if not same or not torch.equal(flat_bytes(values.local), flat_bytes(_fetch(other, part).local)):
                raise CheckpointError(
                    f"{first.name!r} and {other.name!r} (in {other.file}) are one tied weight, {name!r}, but hold "
                    "different values: keep the right one, or use a model that does not tie them"
                )
        try:
            cast_into(part, values)
        except ValueError as error:
            raise CheckpointError(f"{first.name!r} (in {first.file}): {error}") from None
    return leaf


def _fetch(stored: StoredTensor, part: Target) -> Target:
    local = torch.empty(part.local.shape, dtype=stored.dtype)
    values = replace(part, leaf=local, local=local)
    stored.fill(values)
    return values


def _parts(target: Target, itemsize: int) -> Iterator[Target]:
    """The target cut along its first dim into parts of about `_CHUNK_BYTES`."""
    shape = target.local.shape
    if not shape or target.local.numel() == 0:
        yield target
        return
    rows = max(1, _CHUNK_BYTES // (itemsize * math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        local = target.local[start : start + rows]
        yield Target(local, local, (target.offset[0] + start, *target.offset[1:]))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
