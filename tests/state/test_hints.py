"""Hints change no values, and a disk that is too small is an error before anything is written."""

from __future__ import annotations

import errno
import os
import resource
import sys

import pytest
import torch

import purestep.state.files.hints as hints

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems take no such hints")


def test_hints_about_memory_leave_values_alone():
    for tensor in (torch.arange(3.0), torch.arange(3_000_000.0)[1:], torch.empty(1 << 22, device="meta")):
        before = tensor.clone()
        hints.expect_to_be_filled(tensor)
        assert tensor.is_meta or torch.equal(tensor, before)


@linux
def test_space_is_reserved_and_bytes_are_sent_to_the_disk(tmp_path):
    with open(tmp_path / "x", "xb", buffering=0) as file:
        hints.reserve(file, 3 << 20)
        file.write(b"x" * 5000)
        hints.start_writing(file, 0, 5000)
    assert os.stat(tmp_path / "x").st_size == 3 << 20
    assert (tmp_path / "x").read_bytes()[:5001] == b"x" * 5000 + b"\0"


@linux
def test_what_cannot_be_reserved_is_an_error_only_if_there_is_no_room(tmp_path, monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open(tmp_path / "x", "xb", buffering=0) as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                hints.reserve(file, 3 << 20)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        monkeypatch.setattr(hints, "_NOT_OFFERED", (*hints._NOT_OFFERED, errno.EBADF))
    with open(tmp_path / "x", "rb") as file:
        hints.reserve(file, 3 << 20)  # not open for writing: stands for a file system that cannot
