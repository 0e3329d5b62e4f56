"""Why a run ended: each rank says it, and hears it from the others."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from purestep.sharding import failures
from purestep.sharding.failures import is_of_the_network, report

CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:51403"


@pytest.fixture
def store(monkeypatch) -> Any:
    monkeypatch.setattr(failures, "_PATIENCE_S", 0.4)
    monkeypatch.setattr(failures, "_LIMIT_S", 1.0)
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def notes_of(error: BaseException, store: Any, rank: int = 0, world_size: int = 3) -> str:
    report(error, store, rank, world_size)
    return "".join(getattr(error, "__notes__", []))


def test_a_cause_is_told_to_those_that_only_lost_the_connection(store):
    assert notes_of(ValueError("bad\ndata"), store, 1) == ""
    assert notes_of(RuntimeError(CLOSED), store, 2).endswith("rank 2 of 3 ended because rank 1 failed: ValueError: bad")


def test_those_that_say_nothing_are_named(store):
    assert notes_of(RuntimeError(CLOSED), store, 2).count("ranks 0, 1 left no error and did not answer") == 1
    assert "rank 1 left no error" in notes_of(RuntimeError(CLOSED), store, 0)
    assert "failed on every rank: look at the network" in notes_of(RuntimeError(CLOSED), store, 1)


def test_a_store_that_is_gone_or_never_answers_holds_nobody_up():
    class Gone:
        def append(self, key: str, value: str) -> None:
            raise RuntimeError("Connection reset by peer")

    class Silent:
        def append(self, key: str, value: str) -> None:
            time.sleep(60)

    for store in (Gone(), Silent()):
        began = time.monotonic()
        assert "rank 0, which keeps the store, does not answer" in notes_of(RuntimeError(CLOSED), store, 1)
        assert time.monotonic() - began < failures._LIMIT_S + 5


def wrapped() -> Exception:
    try:
        try:
            raise RuntimeError(CLOSED)
        except RuntimeError as error:
            raise KeyError("x") from error
    except KeyError as error:
        return error


ERRORS = [
    (RuntimeError(CLOSED), True),
    (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation"), True),
    (torch.distributed.DistBackendError("NCCL error"), True),
    (wrapped(), True),
    (RuntimeError("shapes do not fit"), False),
    (OSError("Connection reset by peer"), False),  # of a user's own
    (TimeoutError("Timed out waiting for a file"), False),
]


@pytest.mark.parametrize(("error", "expected"), ERRORS, ids=str)
def test_errors_of_the_network(error, expected):
    assert is_of_the_network(error) == expected
