"""Copies of a state in host memory, made while training waits, and written while it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from purestep.state.placement import from_local, in_process_group, is_dtensor, local_tensor
from purestep.state.train_state import TrainState, map_leaves

_PINNED_BYTES = 1 << 20  # below this, page-locking a buffer costs more than it gains


class Staging:
    """Makes copies of states, each in the memory of the one before: one copy is valid at a time.

    Of a sharded leaf each rank copies its own shard. The copy lives on a mesh of the same shape whose process groups
    are gloo groups of its own, so that another thread can use them while training uses the original's.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._meshes: dict[Any, Any] = {}
        self._groups: list[Any] = []

    def prepare(self, state: TrainState) -> None:
        """Make what `copy` needs and only all ranks together can make. Collective when leaves are sharded."""
        for leaf in state.leaves().values():
            if is_dtensor(leaf):
                self._twin(leaf.device_mesh)  # type: ignore[attr-defined]

    def copy(self, state: TrainState) -> TrainState:
        """A copy of `state`, which was prepared for, on the host; complete when this returns."""
        devices = set()
        unused = set(self._buffers)

        def copied(name: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            unused.discard(name)
            local = local_tensor(leaf).detach()
            buffer = self._buffer(name, local)
            buffer.copy_(local, non_blocking=buffer.is_pinned())
            devices.add(local.device)
            return self._on_twin(leaf, buffer) if is_dtensor(leaf) else buffer

        with torch.no_grad():
            staged = map_leaves(copied, state)
        for name in unused:
            del self._buffers[name]
        for device in devices:
            if device.type not in ("cpu", "meta"):
                torch.get_device_module(device).current_stream(device).synchronize()
        return staged

    def close(self) -> None:
        """Give the memory and the process groups back."""
        self._buffers.clear()
        self._meshes.clear()
        destroy_groups(self._groups)
        self._groups = []

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            pin = like.device.type in ("cuda", "xpu") and like.nbytes >= _PINNED_BYTES
            buffer = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pin)
            self._buffers[name] = buffer
        return buffer

    def _on_twin(self, leaf: Any, local: Tensor) -> Tensor:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec

        spec = leaf._spec
        return from_local(local, DTensorSpec(self._twin(spec.mesh), spec.placements, tensor_meta=spec.tensor_meta))

    def _twin(self, mesh: Any) -> Any:
        names = mesh.mesh_dim_names
        key = (tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape), names)
        if key not in self._meshes:
            from torch.distributed.device_mesh import DeviceMesh

            groups = [self._group_along(mesh.mesh, axis) for axis in range(mesh.ndim)]
            self._meshes[key] = DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=names)
        return self._meshes[key]

    def _group_along(self, ranks: Tensor, axis: int) -> Any:
        """This rank's group along one axis of a mesh: its own on every call, made by all ranks together."""
        lines = ranks.swapdims(-1, axis).reshape(-1, ranks.shape[axis]).tolist()
        own, _ = torch.distributed.new_subgroups_by_enumeration(lines, backend="gloo")
        self._groups.append(own)
        return own


def destroy_groups(groups: Sequence[Any]) -> None:
    """End process groups, as far as they have not ended with the default one."""
    for group in groups:
        if in_process_group():
            with suppress(ValueError, AssertionError, KeyError):  # torch knows it no longer
                torch.distributed.destroy_process_group(group)
