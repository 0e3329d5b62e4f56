"""Turning what others can keep, or we, into model folders that anything in the field opens."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from purestep.state.exchange.importing import import_params, is_checkpoint
from purestep.state.exchange.tensor_source import StoredTensor, TensorSource, file_in
from purestep.state.files.commit import Replacement
from purestep.state.files.dcp_files import METADATA
from purestep.state.files.integrity import write_file
from purestep.state.files.manifest import CheckpointError
from purestep.state.files.safetensors_files import DTYPES, SafetensorsWriter
from purestep.state.workers import Progress

CASTS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EMA = "ema"  # folder of the averaged params, beside the others
_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_MODEL_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Conversion:
    """What `convert` did. `print` it for a summary."""

    source: Path
    kind: str
    """What the source was, in words."""
    target: Path
    num_tensors: int
    """Tensors written, those of `ema/` not counted."""
    files: Mapping[str, int]
    """Path in the target -> bytes."""
    casts: Mapping[str, int]
    """`"float32 -> bfloat16"` -> how many tensors, those of `ema/` included."""
    left_out: tuple[str, ...] = ()
    """What the source held that is no tensor of the model."""
    notes: tuple[str, ...] = ()
    """What else to know."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {
            "source": str(self.source),
            "kind": self.kind,
            "target": str(self.target),
            "num_tensors": self.num_tensors,
            "files": dict(self.files),
            "casts": dict(self.casts),
            "left_out": list(self.left_out),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [
            f"converted {self.kind} {self.source}",
            f"  to        {self.target}: {self.num_tensors} tensors, {sum(self.files.values()):,} bytes",
            *(f"            {name}  {size:,} bytes" for name, size in self.files.items()),
            *(f"  cast      {cast}: {count} tensors" for cast, count in self.casts.items()),
        ]
        if self.left_out:
            more = f" and {len(self.left_out) - 5} more" if len(self.left_out) > 5 else ""
            lines.append(f"  left out  {', '.join(self.left_out[:5])}{more}")
        return "\n".join([*lines, *(f"  note      {note}" for note in self.notes)])


def convert(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    max_shard_size: int | str = "5GB",
    dtype: str | torch.dtype | None = None,
    include_ema: bool = False,
    ema_only: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write the params and buffers of a checkpoint to a folder in Hugging Face's layout: all of it, or nothing.

    That is one `model.safetensors`, or several files with their index, and the `config.json` that lies beside the
    source. A checkpoint is verified first. One tensor at a time is in memory. Not collective: call it on one process.

    Args:
        source: what `ps.import_params` takes: a checkpoint in any format, or what other libraries write.
        target: the folder to make. Missing parents are made.
        max_shard_size: largest file, unless one tensor alone is larger: bytes, or text like `500MB` (decimal units).
        dtype: cast floating point tensors to `float64`, `float32`, `bfloat16` or `float16`; others stay. A value that
            would become infinite is refused.
        include_ema: also write the averaged params, to the folder `ema` in the target, in the same layout.
        ema_only: write each param's average in its place, where it has one.
        overwrite: replace the target if it is a model folder; it is exchanged for the new one in one step.
        progress: called with what is being done, bytes done and bytes in all.

    Returns:
        What was written, cast and left out.

    Raises:
        ValueError: options that cannot be, or EMA asked of a source without.
        FileExistsError: the target exists and `overwrite` is off, or it holds something else than a model.
        CheckpointError: the source is damaged or not to be trusted, or the target could not be written; names the file.

    >>> import tempfile, torch, purestep as ps
    >>> from safetensors.torch import load_file
    >>> state = ps.TrainState(step=3, params={"w": torch.ones(2)}, buffers={}, opt_state={}, key=ps.key(0))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = ps.save(f"{directory}/demo", state, format="dcp")
    ...     report = ps.convert(path, f"{directory}/model", dtype="bfloat16")
    ...     load_file(f"{directory}/model/model.safetensors"), dict(report.casts)
    ({'w': tensor([1., 1.], dtype=torch.bfloat16)}, {'float32 -> bfloat16': 1})
    """
    if include_ema and ema_only:
        raise ValueError("include_ema writes the averages beside the params and ema_only in their place: choose one")
    job = _Job(parse_size(max_shard_size), _cast_dtype(dtype), progress)
    source, target = Path(source), Path(target)
    _refuse_target(source, target, overwrite)
    with ExitStack() as stack:
        # Opened, and so verified, before anything is written.
        params = stack.enter_context(import_params(source, ema=ema_only, progress=progress))
        folders = {"": params}
        if include_ema:
            folders[EMA] = stack.enter_context(import_params(source, ema=True, progress=progress))
        config = _find_config(source)
        root = stack.enter_context(_replacing(target, overwrite, config is not None))
        for folder, tensors in folders.items():
            (root / folder).mkdir(exist_ok=True)
            job.write(root, folder, tensors)
            if config is not None:
                job.copy_config(root, folder, config)
    return Conversion(
        params.path, params.kind, target, len(params), job.files, dict(job.casts), params.left_out, tuple(job.notes)
    )


def parse_size(size: int | str) -> int:
    """Bytes of a size as text, in the decimal units of the hub.

    >>> parse_size("1.5GB"), parse_size("200kb"), parse_size(4096)
    (1500000000, 200000, 4096)

    Raises:
        ValueError: it is no size, or not above zero.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Z]*)", str(size).strip().upper())
    if isinstance(size, bool) or not match or match[2] not in _UNITS or float(match[1]) * _UNITS[match[2]] < 1:
        raise ValueError(f"max_shard_size is {size!r}, expected bytes or a size like 500MB or 5GB")
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def _find_config(source: Path) -> Path | None:
    """The model's `config.json`: beside what is converted; of a checkpoint or a DCP folder also in the run above it."""
    folder = source.resolve() if source.is_dir() else source.resolve().parent
    above = 2 if is_checkpoint(folder) else 1 if (folder / METADATA).exists() else 0
    for place in (folder, *list(folder.parents)[:above]):
        if (place / _CONFIG).exists():
            return file_in(place, _CONFIG)
    return None


@dataclass
class _Job:
    """One conversion, and what has been done of it."""

    max_file_bytes: int
    dtype: torch.dtype | None
    progress: Progress | None
    files: dict[str, int] = field(default_factory=dict)
    casts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def write(self, root: Path, folder: str, tensors: TensorSource) -> None:
        """Write all tensors to `root / folder`."""
        parts = self._split(tensors)
        names = [f"model{_part_suffix(i, len(parts))}.safetensors" for i in range(len(parts))]
        total, done = sum(self._nbytes(tensor) for tensor in tensors.values()), 0
        self._tell(folder, done, total)
        for name, part in zip(names, parts, strict=True):
            writer = SafetensorsWriter(root / folder / name, {tensor.name: self._header(tensor) for tensor in part})
            try:
                for tensor in part:
                    writer.write([self._cast(tensor)])
                    done += self._nbytes(tensor)
                    self._tell(folder, done, total)
            finally:
                _, self.files[str(Path(folder, name))] = writer.close()
        if len(parts) > 1:
            where = {tensor.name: name for name, part in zip(names, parts, strict=True) for tensor in part}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            self._write_file(root, folder, _INDEX, (json.dumps(index, indent=2) + "\n").encode())

    def copy_config(self, root: Path, folder: str, config: Path) -> None:
        """Copy `config.json`, its dtype being what was cast to."""
        text, changed = config.read_bytes(), ""
        if self.casts and self.dtype is not None:
            text, changed = _with_dtype(text, _name(self.dtype))
        self._write_file(root, folder, _CONFIG, text)
        if not folder:
            self.notes.append(
                f"{_CONFIG} is that of {config.parent}" + (f", with the new {changed}" if changed else "")
            )

    def _write_file(self, root: Path, folder: str, name: str, data: bytes) -> None:
        _, self.files[str(Path(folder, name))] = write_file(root / folder / name, data)

    def _tell(self, folder: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(f"writing {folder}".rstrip(), done, total)

    def _split(self, tensors: TensorSource) -> list[list[StoredTensor]]:
        """The tensors file by file: a file ends before the tensor that would take it over the limit."""
        parts: list[list[StoredTensor]] = [[]]
        room = self.max_file_bytes
        for name, tensor in sorted(tensors.items()):
            if name == "__metadata__":
                raise ValueError(f"a tensor is called {name!r}, a name that safetensors keeps for itself")
            if self._nbytes(tensor) > room and parts[-1]:
                parts.append([])
                room = self.max_file_bytes
            parts[-1].append(tensor)
            room -= self._nbytes(tensor)
        # Wider elements first, so that every tensor is aligned to its elements.
        return [sorted(part, key=lambda tensor: (-self._dtype(tensor).itemsize, tensor.name)) for part in parts]

    def _dtype(self, tensor: StoredTensor) -> torch.dtype:
        return self.dtype if self.dtype is not None and tensor.dtype.is_floating_point else tensor.dtype

    def _nbytes(self, tensor: StoredTensor) -> int:
        return tensor.nbytes // tensor.dtype.itemsize * self._dtype(tensor).itemsize

    def _header(self, tensor: StoredTensor) -> Tensor:
        if self._dtype(tensor) not in DTYPES:
            raise ValueError(f"{tensor.name!r} is {_name(tensor.dtype)}, which safetensors cannot hold")
        return torch.empty(tensor.shape, dtype=self._dtype(tensor), device="meta")

    def _cast(self, tensor: StoredTensor) -> Tensor:
        values, dtype = tensor.read(), self._dtype(tensor)
        if values.dtype == dtype:
            return values
        cast = values.to(dtype)
        smaller = torch.finfo(dtype).max < torch.finfo(values.dtype).max
        wide = values.float() if values.dtype.itemsize == 1 else values  # not every float8 has isfinite
        if smaller and cast.isfinite().sum() != wide.isfinite().sum():
            raise ValueError(f"{tensor.name!r} has values that are too large for {_name(dtype)}; choose another dtype")
        self.casts[f"{_name(values.dtype)} -> {_name(dtype)}"] += 1
        return cast


@contextmanager
def _replacing(target: Path, overwrite: bool, with_config: bool) -> Iterator[Path]:
    """A new directory that takes the place of `target` if the body succeeds."""
    try:
        replacement = Replacement(target, _replaceable(target, with_config) if overwrite else ())
        try:
            yield replacement.temporary
            replacement.commit()
        except BaseException:
            replacement.abort()
            raise
    except FileExistsError:
        raise
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error


def _refuse_target(source: Path, target: Path, overwrite: bool) -> None:
    if target.suffix in (".safetensors", ".bin", ".pt"):
        raise ValueError(f"the target {target} looks like a file: name a folder, model.safetensors is made in it")
    here, there = target.resolve(), source.resolve()
    if here == there or here in there.parents:
        raise ValueError(f"the target {target} holds the source {source}: choose another")
    if any(is_checkpoint(folder) for folder in (here, *here.parents)):
        raise ValueError(f"the target {target} is a checkpoint, or in one, which stays as it was saved: choose another")
    empty = target.is_dir() and not any(target.iterdir())
    if target.exists() and not empty and not overwrite:
        raise FileExistsError(f"the target {target} exists: choose another, or overwrite it")


def _replaceable(target: Path, with_config: bool) -> list[str]:
    """What an existing target holds, if that is a model folder and nothing else.

    Raises:
        FileExistsError: names what is not to be lost.
    """
    names = sorted(os.listdir(target)) if target.is_dir() else []
    for name in names:
        if name == EMA and (target / EMA).is_dir():
            _replaceable(target / EMA, with_config)
        elif not _MODEL_FILE.fullmatch(name) and not (name == _CONFIG and with_config):
            raise FileExistsError(f"the target {target} holds {name}, which would be lost: choose another")
    return names


def _part_suffix(index: int, num: int) -> str:
    return f"-{index + 1:05d}-of-{num:05d}" if num > 1 else ""


def _cast_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None:
        return None
    name = _name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name not in CASTS:
        raise ValueError(f"dtype must be one of {', '.join(CASTS)}, got {dtype!r}")
    return CASTS[name]


def _with_dtype(config: bytes, dtype: str) -> tuple[bytes, str]:
    """The text of a `config.json` whose dtype is `dtype`, and the field that was changed ('' if none was)."""
    try:
        table: Any = json.loads(config)
    except (ValueError, RecursionError):
        return config, ""
    changed = [key for key in ("dtype", "torch_dtype") if isinstance(table, dict) and table.get(key, dtype) != dtype]
    if not changed:
        return config, ""
    text = json.dumps(table | dict.fromkeys(changed, dtype), indent=2, ensure_ascii=False) + "\n"
    return text.encode(), " and ".join(changed)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
