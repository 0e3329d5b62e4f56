"""Whether a checkpoint is what was saved: `SHA256SUMS`, `describe` and `verify`. Needs no torch."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from purestep.state.files.manifest import (
    MANIFEST,
    CheckpointError,
    DamagedCheckpointError,
    Manifest,
    is_inside,
    parse,
)
from purestep.state.workers import in_parallel

SUMS = "SHA256SUMS"
_CHUNK = 1 << 20  # bytes hashed at a time
_WORTH_THREADS = 1 << 20  # bytes
_NAMED = 5  # damaged leaves of a file


@dataclass(frozen=True)
class Contents:
    """A checkpoint whose `state.json` is whole; its other files have not been looked into."""

    root: Path
    sums: Mapping[str, str]
    """Path -> SHA-256 of every file but `SHA256SUMS`."""
    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class Description(Manifest):
    """What `describe` and `verify` return: `state.json` with the path and the size. `print` it for a table."""

    path: Path
    bytes: int
    """Size of all files."""

    def __str__(self) -> str:
        mesh = self.topology.get("mesh")
        mesh_text = ", mesh " + " x ".join(f"{axis} {size}" for axis, size in mesh.items()) if mesh else ""
        lines = [
            f"checkpoint {self.path}",
            f"  step      {self.step}",
            f"  format    {self.format} (version {self.format_version}), {len(self.files)} files, {self.bytes:,} bytes",
            f"  digest    {self.digest}",
            f"  saved by  {self.topology.get('world_size')} process(es){mesh_text}",
            "  versions  " + ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            *(f"  {name}: {value}" for name, value in self.metadata.items()),
        ]
        rows = [(leaf.name, str(leaf.shape), leaf.dtype, f"{leaf.nbytes:,} B") for leaf in self.leaves.values()]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
        lines += ["  " + "  ".join(f"{cell:{widths[i]}}" for i, cell in enumerate(row)).rstrip() for row in rows]
        return "\n".join(lines)


def describe(path: str | os.PathLike) -> Description:
    """What a checkpoint holds, from its tables alone: cheap, and without importing torch.

    `state.json` itself is verified; the data files are not read (`verify` does that).

    Args:
        path: directory of the checkpoint.

    Raises:
        CheckpointError: no checkpoint, an unfinished one, or damaged tables.

    >>> import tempfile, torch, purestep as ps
    >>> state = ps.TrainState(step=3, params={"w": torch.ones(2)}, buffers={}, opt_state={}, key=ps.key(0))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = ps.save(f"{directory}/demo", state, metadata={"note": "first"})
    ...     description = ps.describe(path)
    >>> description.step, description.leaves["params/w"].shape, description.metadata
    (3, (2,), {'note': 'first'})
    """
    return _description(open_checkpoint(path))


def verify(path: str | os.PathLike, *, on_read: Callable[[int], None] | None = None) -> Description:
    """Read every byte of a checkpoint and compare it with `SHA256SUMS`. Needs no torch; not collective.

    Args:
        path: directory of the checkpoint.
        on_read: called with the number of bytes that were read since the last call.

    Raises:
        CheckpointError: names each file that is damaged, missing or not of the checkpoint.

    >>> import tempfile, torch, purestep as ps
    >>> state = ps.TrainState(step=3, params={"w": torch.ones(2)}, buffers={}, opt_state={}, key=ps.key(0))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = ps.save(f"{directory}/demo", state)
    ...     _ = (path / "model/model.safetensors").write_bytes(b"")
    ...     try:
    ...         ps.verify(path)
    ...     except ps.CheckpointError as error:
    ...         print(error)
    checkpoint ...demo is damaged: model/model.safetensors has 0 bytes instead of ...
    """
    contents = open_checkpoint(path)
    problems = damage(contents, contents.manifest.files, on_read) + _strangers(contents)
    refuse_damage(contents, problems)
    return _description(contents)


def open_checkpoint(path: str | os.PathLike) -> Contents:
    """Read the tables of a checkpoint: `SHA256SUMS`, and `state.json` verified against it."""
    root = Path(path)
    if not root.is_dir():
        raise DamagedCheckpointError(f"there is no checkpoint at {root}: no such directory")
    sums = _read_sums(root)
    try:
        data = _read(root, MANIFEST)
        if hashlib.sha256(data).hexdigest() != sums.get(MANIFEST):
            raise DamagedCheckpointError(f"{MANIFEST} does not match its sum in {SUMS}")
        manifest = parse(data)
        if sorted(sums) != sorted([*manifest.files, MANIFEST]):
            raise DamagedCheckpointError(f"{SUMS} and {MANIFEST} do not list the same files")
    except CheckpointError as error:
        raise type(error)(f"checkpoint {root}: {error}") from None
    return Contents(root, sums, manifest)


def damage(contents: Contents, names: Iterable[str], on_read: Callable[[int], None] | None = None) -> list[str]:
    """One line for each of the files `names` that is not what was saved; `on_read` hears of the bytes read."""
    lock = Lock()

    def hear(num: int) -> None:
        with lock:
            on_read(num)  # type: ignore[misc] # it is not None then

    def look(name: str) -> str | None:
        try:
            return _damage_of(contents, name, on_read and hear)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"

    names = sorted(names)
    small = sum(contents.manifest.files.get(name, 0) for name in names) < _WORTH_THREADS
    return [line for line in in_parallel(look, names, serial=small) if line]


def wrong_size(contents: Contents, name: str, size: int) -> str:
    """What to say of a file that has another size than it was saved with."""
    return f"{name} has {size} bytes instead of {contents.manifest.files[name]}{_leaves_in(contents, name)}"


def wrong_sum(contents: Contents, name: str) -> str:
    """What to say of a file that has other bytes than it was saved with."""
    return f"{name} does not match its sum in {SUMS}{_leaves_in(contents, name)}"


def refuse_damage(contents: Contents, problems: list[str]) -> None:
    """Raise if there is any."""
    if problems:
        raise DamagedCheckpointError(f"checkpoint {contents.root} is damaged: " + "; ".join(problems))


def write_sums(root: Path, sums: Mapping[str, str]) -> None:
    """Write `SHA256SUMS`: the last file of a checkpoint, without which it is none."""
    write_file(root / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())).encode())


def write_file(path: Path, data: bytes) -> tuple[str, int]:
    """Write a new file through to the disk: its SHA-256 and size."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest(), len(data)


def hash_file(path: Path, on_read: Callable[[int], None] | None = None) -> tuple[str, int]:
    """SHA-256 and size of a file; `on_read` hears of the bytes read."""
    sha, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while num := file.readinto(buffer):
            sha.update(buffer[:num])
            size += num
            if on_read is not None:
                on_read(num)
    return sha.hexdigest(), size


def _damage_of(contents: Contents, name: str, on_read: Callable[[int], None] | None) -> str | None:
    path = inside(contents.root, name)
    size = path.stat().st_size
    if size != contents.manifest.files[name]:
        return wrong_size(contents, name, size)
    if hash_file(path, on_read)[0] != contents.sums[name]:
        return wrong_sum(contents, name)
    return None


def _leaves_in(contents: Contents, name: str) -> str:
    """Which leaves a damaged file has wrong, in parentheses. Only here does verifying need torch."""
    from purestep.state.files.locating import damaged_leaves

    leaves = damaged_leaves(contents, name)
    more = f" and {len(leaves) - _NAMED} more" if len(leaves) > _NAMED else ""
    return f" (wrong: {', '.join(map(repr, leaves[:_NAMED]))}{more})" if leaves else ""


def _read_sums(root: Path) -> dict[str, str]:
    if not (root / SUMS).exists():
        raise DamagedCheckpointError(f"{root} has no {SUMS}: it is no checkpoint, or its save did not finish")
    try:
        text = _read(root, SUMS).decode("ascii")
    except ValueError:
        raise DamagedCheckpointError(f"checkpoint {root}: {SUMS} is damaged: not plain text") from None
    lines = [re.fullmatch(r"([0-9a-f]{64})  (\S+)", line) for line in text.split("\n")[:-1]]
    sums = {line[2]: line[1] for line in lines if line}
    sound = text.endswith("\n") and len(sums) == len(lines) and all(is_inside(name) for name in sums)
    if not sound or MANIFEST not in sums:
        raise DamagedCheckpointError(f"checkpoint {root}: {SUMS} is damaged: not a list of sums that has {MANIFEST}")
    return sums


def _read(root: Path, name: str) -> bytes:
    try:
        return inside(root, name).read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(f"{name} cannot be read: {error.strerror or error}") from None


def inside(root: Path, name: str) -> Path:
    """`root / name`, refusing to follow a link out of the checkpoint."""
    path = root
    for part in name.split("/"):
        path = path / part
        if path.is_symlink():
            raise DamagedCheckpointError(f"{name} is a link, which a checkpoint never holds")
    return path


def _strangers(contents: Contents) -> list[str]:
    listed = {*contents.sums, SUMS}
    found = [path.relative_to(contents.root).as_posix() for path in contents.root.rglob("*") if not path.is_dir()]
    return [f"{name} is not listed in {SUMS}" for name in sorted(found) if name not in listed]


def _description(contents: Contents) -> Description:
    manifest = contents.manifest
    tables = sum((contents.root / name).stat().st_size for name in (MANIFEST, SUMS))
    return Description(path=contents.root, bytes=sum(manifest.files.values()) + tables, **vars(manifest))
