"""Reading single leaves of a checkpoint, whatever its format."""

from __future__ import annotations

from contextlib import ExitStack

from purestep.state.blocks import Target
from purestep.state.files.dcp_files import DcpReader
from purestep.state.files.integrity import Contents
from purestep.state.files.manifest import LeafInfo
from purestep.state.files.safetensors_reading import SafetensorsReader


class LeafReader:
    """Reads blocks of the leaves of one checkpoint; a context manager that keeps its files open."""

    def __init__(self, contents: Contents) -> None:
        self._root = contents.root
        self._stack = ExitStack()
        self._safetensors = self._stack.enter_context(SafetensorsReader(contents.root))
        self._dcp: DcpReader | None = None

    def __enter__(self) -> LeafReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, leaf: LeafInfo, target: Target) -> None:
        """Fill `target` with its block of `leaf`.

        Raises:
            DamagedCheckpointError: the files do not hold what the leaf table says; names file and leaf.
        """
        if leaf.blocks is not None:
            self._safetensors.read(leaf, target)
            return
        if self._dcp is None:
            self._dcp = self._stack.enter_context(DcpReader(self._root))
        self._dcp.read(leaf, target)
