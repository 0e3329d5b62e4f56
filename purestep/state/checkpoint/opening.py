"""A checkpoint opened by all ranks at once: what one finds wrong, all raise."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

from purestep.state.collective import gather_objects, on_every_rank
from purestep.state.files.dcp_files import DcpError
from purestep.state.files.integrity import Contents, damage, open_checkpoint, refuse_damage
from purestep.state.files.manifest import CheckpointError
from purestep.state.placement import default_rank, default_world_size

T = TypeVar("T")


def open_together(path: str | os.PathLike, *, verify: bool = True) -> Contents:
    """The tables of a checkpoint, and every file checked, each by one of the ranks. All ranks agree or all raise.

    Raises:
        CheckpointError: it is missing, incomplete or damaged; names the files.
    """

    def check() -> Contents:
        contents = open_checkpoint(path)
        if verify:
            files = contents.manifest.files
            by_size = sorted(files, key=lambda name: (-files[name], name))
            problems.extend(damage(contents, by_size[default_rank() :: default_world_size()]))
        return contents

    problems: list[str] = []
    contents = together(path, check)
    refuse_damage(contents, [line for lines in gather_objects(problems) for line in lines])
    if len({fingerprint(sums) for sums in gather_objects(contents.sums)}) > 1:
        raise CheckpointError(f"checkpoint {path}: the ranks see different files; use a file system they share")
    return contents


def together(path: str | os.PathLike, function: Callable[[], T]) -> T:
    """This rank's `function()`; if it fails on any rank, all raise. What it returns is not sent anywhere."""
    results: list[T] = []
    on_every_rank(lambda: naming(path, lambda: results.append(function())))
    return results[0]


def naming(path: str | os.PathLike, function: Callable[[], T]) -> T:
    """`function()`, an error of the system becoming a `CheckpointError` that says where and on which rank."""
    try:
        return function()
    except DcpError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from None
    except OSError as error:
        rank = f"rank {default_rank()}: " if default_world_size() > 1 else ""
        raise CheckpointError(f"checkpoint {path}: {rank}{error}") from error


def fingerprint(value: Any) -> str:
    """A digest of a JSON value, equal for equal values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
