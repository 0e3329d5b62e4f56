"""Weights from the Hub, played by a server in this process: one download, and clear words when there is none."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from purestep.sharding.launching import LAUNCHER_VARIABLES
from purestep.state.exchange.hub import is_hub_id

_PROGRAM = str(Path(__file__).with_name("hub_program.py"))
_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_TOKEN = "hf_secretsecretsecret"
_WEIGHT = torch.arange(8.0).view(2, 4)
_BIAS = torch.tensor([5.0, 6.0])
_HALVES = {"a.safetensors": {"weight": _WEIGHT}, "b.safetensors": {"bias": _BIAS}}
_FILES = {
    "org/single": {
        "model.safetensors": save({"weight": _WEIGHT, "bias": _BIAS}),
        "config.json": b"{}",
        "pytorch_model.bin": b"never read",
        "consolidated.safetensors": b"never read",
        "onnx/model.safetensors": b"never read",
    },
    "org/sharded": {
        **{name: save(tensors) for name, tensors in _HALVES.items()},
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"weight": "a.safetensors", "bias": "b.safetensors"}}
        ),
        "unlisted.safetensors": b"never read",
    },
    "org/pickled": {"pytorch_model.bin": b"never read"},
    "org/several": {"a.safetensors": b"", "b.safetensors": b""},
    "org/private": {"model.safetensors": save({"weight": _WEIGHT, "bias": _BIAS})},
    "org/gated": {"model.safetensors": b""},
}


class _Hub(BaseHTTPRequestHandler):
    """The two calls of the Hub that a download makes."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        repo = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2])
        files = _FILES.get(repo)
        if files is None or (repo == "org/private" and self.headers.get("Authorization") != f"Bearer {_TOKEN}"):
            return self._send(401 if files else 404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        if repo == "org/gated" and "/resolve/" not in path:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"}, body)
        if path.startswith("/api/"):
            revision = path.partition("/revision/")[2]
            if revision not in ("", "main", _COMMIT):
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
            return self._send(200, json.dumps(self._info(repo, files, "/tree/" in path)).encode(), {}, body)
        name = path.partition("/resolve/")[2].partition("/")[2]
        data = _bytes(files[name])
        if body:
            self.asked.append(name)
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": _COMMIT}
        return self._send(200, data, headers, body)

    @staticmethod
    def _info(repo: str, files: dict[str, Any], tree: bool) -> Any:
        if tree:
            return [{"type": "file", "path": n, "size": len(_bytes(d)), "oid": "0" * 40} for n, d in files.items()]
        return {"id": repo, "modelId": repo, "sha": _COMMIT, "siblings": [{"rfilename": name} for name in files]}

    def _send(self, code: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


def _bytes(data: str | bytes) -> bytes:
    return data.encode() if isinstance(data, str) else data


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, Any]]:
    handler = type("Hub", (_Hub,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(("HF_", "HUGGING", "SLURM_", "ACCELERATE_"))
    }
    environment = {
        **kept,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    try:
        yield {"asked": handler.asked, "environment": environment}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _run(hub: dict[str, Any], *requests: Any, ranks: int = 1, **environment: str) -> list[list[dict[str, Any]]]:
    """What came of each request (a repo, or one with options), of each rank."""
    asked = json.dumps([[request, {}] if isinstance(request, str) else request for request in requests])
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks > 1 else ()
    done = subprocess.run(
        [sys.executable, *(("-m", *launcher) if launcher else ()), _PROGRAM, asked],
        env={**hub["environment"], **environment},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert _TOKEN not in done.stdout + done.stderr
    decoder, rest, said = json.JSONDecoder(), done.stdout.strip(), []
    while rest:
        value, end = decoder.raw_decode(rest)
        said.append(value)
        rest = rest[end:].strip()
    return said


_LOADED = {"weight": _WEIGHT.tolist(), "bias": _BIAS.tolist()}


def test_only_the_weights_are_downloaded_once_and_the_cache_serves_without_a_connection(hub):
    assert _run(hub, "org/single", "org/sharded", ranks=2) == [[_LOADED] * 2] * 2
    expected = ["config.json", "model.safetensors", "a.safetensors", "b.safetensors", "model.safetensors.index.json"]
    assert sorted(hub["asked"]) == sorted(expected)
    ((*loaded, missing),) = _run(hub, "org/single", "org/sharded", "org/other", HF_HUB_OFFLINE="1")
    assert loaded == [_LOADED] * 2
    for text in ("are not (all) in the cache of this machine", "HF_HUB_OFFLINE is set", "hf download org/other"):
        assert text in missing["error"]
    everyone = _run(hub, "org/sharded", "org/other", ranks=2, HF_ENDPOINT="http://127.0.0.1:9")
    assert [loaded for loaded, _ in everyone] == [_LOADED] * 2
    assert all("there is no connection to it" in missing["error"] for _, missing in everyone)
    assert sorted(hub["asked"]) == sorted(expected)


REFUSED = [
    ("org/pickled", {}, "has no safetensors files, only pytorch_model.bin: pickles are not opened"),
    ("org/several", {}, "has several safetensors files and no model.safetensors: a.safetensors, b.safetensors"),
    ("org/nowhere", {}, "there is nothing at org/nowhere here, and on the Hub no such model, or it is private and no"),
    ("org/private", {}, "or it is private and no token was given: log in with `hf auth login`, set HF_TOKEN, or pass"),
    ("org/private", {"token": "hf_wrong"}, "or it is private and the token that was used has no access to it"),
    ("org/gated", {}, "org/gated on the Hub is gated: accept its terms"),
    ("org/single", {"revision": "v9"}, "org/single on the Hub has no revision 'v9'"),
]


def test_what_the_hub_does_not_give_is_said_in_one_line_on_every_rank(hub):
    requests = [[repo, options] for repo, options, _ in REFUSED]
    everyone = _run(hub, *requests, ["org/private", {"token": _TOKEN}], ranks=2)
    for *refused, loaded in everyone:
        assert loaded == _LOADED
        for (repo, _, message), said in zip(REFUSED, refused, strict=True):
            assert message in said["error"], repo
            assert "hf_wrong" not in said["trace"]
            assert "direct cause" not in said["trace"]
            assert "\n" not in said["error"]


@pytest.mark.parametrize(
    ("source", "is_one"),
    [
        ("gpt2", True),
        ("org/name-1.5_x", True),
        ("org/name/more", False),
        ("./name", False),
        ("../name", False),
        ("/org/name", False),
        ("a b", False),
        ("", False),
        ("x.safetensors", False),
        ("org/pytorch_model.bin", False),
        ("model.safetensors.index.json", False),
        (Path("org/name"), False),
    ],
)
def test_names_of_models_and_paths(source, is_one):
    assert is_hub_id(source) == is_one
