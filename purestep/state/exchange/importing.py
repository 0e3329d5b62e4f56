"""Params from wherever they are kept: checkpoints, and what other libraries write."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from purestep.state.exchange.checkpoint_source import from_checkpoint
from purestep.state.exchange.dcp_sources import from_dcp
from purestep.state.exchange.safetensors_sources import INDEX_SUFFIX, from_dcp_shards, from_file, from_index, is_shard
from purestep.state.exchange.tensor_source import TensorSource, file_in
from purestep.state.exchange.ties import resolve_ties
from purestep.state.files.dcp_files import METADATA
from purestep.state.files.integrity import SUMS, open_checkpoint
from purestep.state.files.manifest import MANIFEST, CheckpointError
from purestep.state.workers import Progress

_WHAT_IS_READ = (
    "a checkpoint (step-00000100), a safetensors file, a folder with model.safetensors or an index, or a DCP folder "
    "(accelerate: pytorch_model_fsdp_0)"
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NO_PICKLES = ": pickles are not opened, since that runs what is in them; save it as safetensors where you trust it"


def import_params(
    source: str | os.PathLike,
    *,
    ties: Iterable[Sequence[str]] = (),
    ema: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> TensorSource:
    """The parameters and buffers kept in a file or folder, by module path: listed at once, read one at a time.

    Nothing is unpickled, no link is followed out of the folder, and no name in it leads elsewhere.

    Args:
        source: a checkpoint of purestep in any format; a safetensors file; a Hugging Face folder, `model.safetensors`
            or several with an index; torch's `HuggingFaceStorageWriter` shards; or a DCP folder, such as accelerate's
            `pytorch_model_fsdp_0` or the `save_state` folder it is in (the model alone is taken).
        ties: names of each weight that the module they are for ties, its own name first; others are dropped, and must
            hold the same values.
        ema: of a checkpoint, take the averaged value of each param that has one.
        verify: of a checkpoint, hash the files that are needed first, and compare each tensor with its digest when it
            is read. Other formats say nothing about their contents that could be compared.
        progress: called while files are hashed.

    Returns:
        A read-only mapping, and a context manager that closes its files: `params[name].shape`, `.dtype`, `.read()`.

    Raises:
        CheckpointError: nothing to import there, or it is damaged or not to be trusted; names the file. Or the names of
            one tie hold different values.
        ValueError: `ema` for what has none.

    >>> import tempfile, torch, purestep as ps
    >>> state = ps.TrainState(step=3, params={"w": torch.ones(2)}, buffers={}, opt_state={}, key=ps.key(0))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = ps.save(f"{directory}/demo", state, format="dcp")
    ...     with ps.import_params(path) as params:
    ...         print({name: (stored.shape, stored.dtype, stored.read()) for name, stored in params.items()})
    {'w': ((2,), torch.float32, tensor([1., 1.]))}
    """
    path = Path(source)
    opened = _open(path, ema, verify, progress)
    try:
        return _untied(opened, ties)
    except ValueError as error:
        opened.close()
        raise CheckpointError(f"{path}: {error}") from None


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a checkpoint of purestep, perhaps a damaged one."""
    return (path / SUMS).exists() or (path / MANIFEST).exists()


def _open(path: Path, ema: bool, verify: bool, progress: Progress | None) -> TensorSource:
    if not os.path.lexists(path):
        raise CheckpointError(f"there is nothing at {path}")
    if is_checkpoint(path):
        return from_checkpoint(open_checkpoint(path), ema=ema, verify=verify, progress=progress)
    if ema:
        raise ValueError(f"{path} is no checkpoint of purestep, so it holds no EMA")
    try:
        return _from_file(path) if path.is_file() else _from_folder(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _untied(opened: TensorSource, ties: Iterable[Sequence[str]]) -> TensorSource:
    """`opened` with one tensor a tie, under its first name."""
    tensors = dict(opened)
    for tie in ties:
        held = [name for name in tie if name in tensors]
        if len(held) > 1:
            resolve_ties({name: tensors[name].read() for name in held}, [tie])
        stored = [tensors.pop(name) for name in held]
        if stored:
            tensors[tie[0]] = replace(stored[0], name=tie[0])
    return opened.of(tensors)


def _from_file(path: Path) -> TensorSource:
    if path.name.endswith(INDEX_SUFFIX):
        return from_index(path.parent, path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path} is no .safetensors file{_NO_PICKLES if path.suffix in PICKLES else ''}")
    return from_file(path)


def _from_folder(folder: Path) -> TensorSource:
    names = sorted(os.listdir(folder))
    weights = [name for name in names if name.endswith(".safetensors")]
    if index := _only(folder, [name for name in names if name.endswith(INDEX_SUFFIX)]):
        return from_index(folder, folder / index)
    whole = "model.safetensors" if "model.safetensors" in weights else weights[0] if len(weights) == 1 else None
    if whole and not is_shard(file_in(folder, whole)):
        return from_file(file_in(folder, whole))
    if weights:
        return from_dcp_shards(folder, weights)
    if METADATA in names:
        return from_dcp(folder.resolve())
    fsdp = [name for name in names if name.startswith("pytorch_model_fsdp_") and (folder / name / METADATA).exists()]
    if (of_accelerate := _only(folder, fsdp)) and not (folder / of_accelerate).is_symlink():
        return from_dcp(folder.resolve() / of_accelerate)
    if pickles := [name for name in names if Path(name).suffix in PICKLES]:
        raise CheckpointError(f"{folder} holds {pickles[0]}{_NO_PICKLES}")
    raise CheckpointError(f"{folder} holds nothing to import; expected {_WHAT_IS_READ}")


def _only(folder: Path, names: list[str]) -> str | None:
    if len(names) > 1:
        raise CheckpointError(f"{folder} holds several models: {', '.join(names)}; name one of them")
    return names[0] if names else None
