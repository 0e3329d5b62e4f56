"""The deterministic switch: it sets what docs/determinism.md says, and puts everything back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config

import purestep as ps
from purestep.sharding.determinism import deterministic_algorithms

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
ON = {"algorithms": True, "warn_only": False, "cudnn": True, "benchmark": False, "inductor": True}


def switches() -> dict[str, bool]:
    return {
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": torch.backends.cudnn.deterministic,
        "benchmark": torch.backends.cudnn.benchmark,
        "inductor": getattr(torch._inductor.config, "deterministic", True),
    }


@pytest.fixture(params=["off", "as somebody set it"])
def before(request, monkeypatch) -> Iterator[dict[str, bool]]:
    monkeypatch.delenv(CUBLAS, raising=False)
    if request.param != "off":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = True
    yield switches()
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


def test_everything_is_set_for_the_length_of_a_runtime_only(before):
    with ps.start(accelerator=ps.AcceleratorConfig(device="cpu", deterministic=True)) as runtime:
        assert switches() == ON
        assert CUBLAS not in os.environ
    assert runtime.config.deterministic  # it is still there: being collected would undo it too
    assert switches() == before
    with ps.start(accelerator=ps.AcceleratorConfig(device="cpu")):
        assert switches() == before


def test_what_has_no_deterministic_kernel_is_an_error():
    index, values = torch.tensor([0, 0]), torch.tensor([1.0, 2.0])
    target = torch.zeros(1)
    target.put_(index, values)
    with (
        ps.start(accelerator=ps.AcceleratorConfig(device="cpu", deterministic=True)),
        pytest.raises(RuntimeError, match="does not have a deterministic implementation"),
    ):
        target.put_(index, values)


@pytest.mark.parametrize("value", [None, ":4096:8", ":16:8"])
def test_cublas_is_told_before_cuda_is_used(value, monkeypatch):
    monkeypatch.delenv(CUBLAS, raising=False)
    if value is not None:
        monkeypatch.setenv(CUBLAS, value)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: value is not None)
    with deterministic_algorithms("cuda"):
        assert os.environ[CUBLAS] == (value or ":4096:8")
    assert os.environ.get(CUBLAS) == value


def test_cublas_that_may_do_otherwise_is_refused(monkeypatch):
    before = switches()
    monkeypatch.setenv(CUBLAS, ":0:0")
    with pytest.raises(ps.ConfigError, match=rf"{CUBLAS}=:0:0 lets cuBLAS.*set it to :4096:8 or :16:8"):
        deterministic_algorithms("cuda").__enter__()
    monkeypatch.delenv(CUBLAS)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ps.ConfigError, match=rf"set {CUBLAS}=:4096:8 when you start the program"):
        deterministic_algorithms("cuda").__enter__()
    assert switches() == before


def test_initial_values_do_not_depend_on_it():
    digests = []
    for deterministic in (False, True):
        with ps.start(accelerator=ps.AcceleratorConfig(device="cpu", deterministic=deterministic)) as runtime:
            module = ps.shard(torch.nn.Linear(5, 3), runtime=runtime)
            digests.append(ps.init(module, ps.adamw(0.1), ps.key(0)).digest())
    assert digests[0] == digests[1]
