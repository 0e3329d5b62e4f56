"""Reading many leaves of a checkpoint at once: its files side by side, each front to back and hashed on the way."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock
from typing import Any, BinaryIO

from purestep.state.blocks import Target
from purestep.state.files.dcp_files import DIRECTORY, METADATA, DcpTable
from purestep.state.files.file_reading import Extent, cut_out_all, read_extents, unreadable
from purestep.state.files.hashing import StreamHash
from purestep.state.files.integrity import Contents, damage, inside, wrong_size, wrong_sum
from purestep.state.files.manifest import MANIFEST, DamagedCheckpointError, LeafInfo
from purestep.state.files.safetensors_reading import SafetensorsHeader, find_extent
from purestep.state.placement import default_rank, default_world_size
from purestep.state.workers import in_parallel, num_workers

Find = Callable[[Any], Extent]
"""Where in a file is what a leaf needs, given the file, or the header of a safetensors file."""


def read_leaves(
    contents: Contents,
    wanted: Mapping[str, tuple[LeafInfo, Target]],
    *,
    verify: bool,
    done: Callable[[str], None] = lambda name: None,
) -> list[str]:
    """Fill targets with their blocks of leaves. Not collective, but each rank of a group has its share to verify.

    Each byte is read once by each rank that needs it, and each file is compared with its sum by one of the ranks: on
    the way if that rank reads it anyway. Until every rank's answer is known to be empty, nothing read may be used.

    Args:
        contents: the checkpoint.
        wanted: by a name of the caller's, the leaf and what to fill.
        verify: compare this rank's share of the files with `SHA256SUMS`.
        done: called with a name when its target is full, possibly by another thread; it may remove it from `wanted`.

    Returns:
        A line for each file that is not what was saved, and for each leaf that cannot be read.
    """
    plan = _Plan(contents, done)
    in_dcp = any(row.blocks is None for row, _ in wanted.values())
    share = _share(contents) if verify else set()
    if verify and in_dcp:  # to be checked before it is believed
        lines = damage(contents, [f"{DIRECTORY}/{METADATA}"])
        if lines:
            return lines
    plan.make(wanted, DcpTable(contents.root) if in_dcp else None)
    names = sorted(plan.requests.keys() | share, key=lambda name: -contents.manifest.files.get(name, 0))
    plan.hash_in_thread = len(names) < num_workers()
    found: list[list[str]] = in_parallel(lambda name: plan.read(name, verify=name in share), names)
    return plan.problems + [line for of_file in found for line in of_file]


def is_copied(leaf: LeafInfo, target: Target) -> bool:
    """Whether `target` is filled with a stored block of `leaf` as it is."""
    if leaf.blocks is None:
        return False
    place = (target.offset, tuple(target.local.shape))
    return target.local.numel() == 0 or any((block.offset, block.shape) == place for block in leaf.blocks)


def _share(contents: Contents) -> set[str]:
    """The files that this rank compares with their sums.

    Each directory's are dealt out in the order of their names, so that after a save by as many ranks each rank reads
    and verifies the same files: those it wrote.
    """
    rank, world = default_rank(), default_world_size()
    mine = set()
    sizes = contents.manifest.files
    for directory in {name.partition("/")[0] for name in sizes}:
        names = sorted(name for name in sizes if name.partition("/")[0] == directory)
        total, before = sum(sizes[name] for name in names), 0
        for name in names:
            middle = before + sizes[name] / 2
            if min(world - 1, int(middle * world / max(1, total))) == rank:
                mine.add(name)
            before += sizes[name]
    return mine


class _Plan:
    """What is needed of each file."""

    def __init__(self, contents: Contents, done: Callable[[str], None]) -> None:
        self.requests: dict[str, list[tuple[str, Find]]] = defaultdict(list)
        """File -> (leaf, what to find there) of each part of a leaf."""
        self.problems: list[str] = []
        self.hash_in_thread = True
        self._contents, self._done = contents, done
        self._left: Counter[str] = Counter()
        self._lock = Lock()

    def make(self, wanted: Mapping[str, tuple[LeafInfo, Target]], table: DcpTable | None) -> None:
        """Find out which files are needed, from the tables alone."""
        for name, (row, target) in wanted.items():
            done = partial(self._part_done, name)
            try:
                if row.blocks is not None:
                    found = _in_safetensors(row, target, done)
                else:
                    assert table is not None
                    found = table.requests(row, target, done)
            except ValueError as error:
                self.problems.append(str(error))
                continue
            for file, find in found:
                self.requests[file].append((row.name, find))
            self._left[name] = len(found)
        for name in [name for name, left in self._left.items() if left == 0]:
            self._done(name)

    def read(self, name: str, *, verify: bool) -> list[str]:
        """Read one file: what is needed of it, or all of it if it is to be verified."""
        try:
            with open(inside(self._contents.root, name), "rb", buffering=0) as file:
                return self._read(name, file, verify)
        except OSError as error:
            return [f"{name} cannot be read: {error.strerror or error}"]
        except DamagedCheckpointError as error:
            return [str(error)]

    def _read(self, name: str, file: BinaryIO, verify: bool) -> list[str]:
        size = os.fstat(file.fileno()).st_size
        if verify and size != self._contents.manifest.files[name]:
            return [wrong_size(self._contents, name, size)]
        extents, lines = self._find(name, file)
        sha256 = StreamHash(in_thread=self.hash_in_thread) if verify else None
        try:
            file.seek(0)
            read_extents(file, extents, stop=size if verify else 0, sha256=sha256)
            if sha256 is not None and sha256.hexdigest() != self._contents.sums[name]:
                return [wrong_sum(self._contents, name)]
        except ValueError as error:
            lines.append(f"{name} cannot be read: {error}")
        finally:
            if sha256 is not None:
                sha256.close()
        return lines

    def _find(self, name: str, file: BinaryIO) -> tuple[list[Extent], list[str]]:
        """What to read of a file, and a line for each leaf that is not where it should be."""
        extents: list[Extent] = []
        lines: list[str] = []
        requests = self.requests.pop(name, [])  # what they hold on to may go when the file has been read
        try:
            where = SafetensorsHeader(file) if requests and name.endswith(".safetensors") else file
        except ValueError as error:
            return [], [f"{name} cannot be read: {error}"]
        for leaf, find in requests:
            try:
                extents.append(find(where))
            except ValueError as error:
                lines.append(unreadable(leaf, name, error))
        return extents, lines

    def _part_done(self, name: str) -> None:
        with self._lock:
            self._left[name] -= 1
            full = self._left[name] == 0
        if full:
            self._done(name)


def _in_safetensors(row: LeafInfo, target: Target, done: Callable[[], None]) -> list[tuple[str, Find]]:
    assert row.blocks is not None
    try:
        found = cut_out_all(((block, block.offset, block.shape) for block in row.blocks), target)
    except ValueError as error:
        raise ValueError(unreadable(row.name, MANIFEST, error)) from None
    return [
        (block.file, partial(find_extent, leaf=row, block=block, target=target, cut=cut, done=done))
        for block, cut in found
    ]
