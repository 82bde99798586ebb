"""Downloads from a hub on the loopback address: what is fetched, in which order, what is told."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from model_folders import make_model

from mlx_troupe.runtime.errors import ModelError
from mlx_troupe.runtime.store.hub import download
from mlx_troupe.runtime.store.local import list_models
from mlx_troupe.runtime.store.resolve import resolve

REVISION = "d" * 40


class Hub(ThreadingHTTPServer):
    """A hub with one model; ``broken`` names files that it fails to serve."""

    daemon_threads = True
    files: dict[str, bytes]
    broken: set[str]
    served: list[str]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client may hang up."""


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._route(body=False)

    def do_GET(self) -> None:
        self._route(body=True)

    def _route(self, *, body: bool) -> None:
        path = self.path.split("?")[0]
        files = self.server.files
        if path.startswith("/api/models/org/tiny/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                for name, data in files.items()
            ]
            self._json(200, entries)
        elif path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name} for name in files]
            self._json(200, {"id": "org/tiny", "sha": REVISION, "siblings": siblings})
        elif path.startswith(f"/org/tiny/resolve/{REVISION}/"):
            self._file(path.rsplit("/", 1)[1], body=body)
        else:
            self._json(404, {"error": "Repository not found"}, code="RepoNotFound")

    def _file(self, name: str, *, body: bool) -> None:
        if name in self.server.broken and body:
            self._json(403, {"error": "broken"})
            return
        data = self.server.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{_oid(data)}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if body:
            self.server.served.append(name)
            self.wfile.write(data)

    def _json(self, status: int, value: object, code: str = "") -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _oid(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running hub with a whole model and some files that nobody needs."""
    monkeypatch.setenv("MLX_TROUPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("HF_HUB_OFFLINE", "MLX_TROUPE_MODEL", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    source = make_model(tmp_path / "source", shards=2)
    with Hub(("127.0.0.1", 0), _Handler) as server:
        server.files = {path.name: path.read_bytes() for path in sorted(source.iterdir())}
        server.files |= {"modeling_tiny.py": b"raise SystemExit", "pytorch_model.bin": b"old"}
        server.broken, server.served = set(), []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        yield server
        server.shutdown()
        thread.join()


def test_a_model_is_downloaded_once_and_without_its_code(hub: Hub) -> None:
    """Weights, settings and tokenizer; no Python, no pickles; then no network."""
    told: list[int] = []
    found = resolve("org/tiny", progress=lambda done, total, what: told.append(done))
    assert found.source == "downloaded from the hub"
    names = {path.name for path in found.path.iterdir()}
    assert names == set(hub.files) - {"modeling_tiny.py", "pytorch_model.bin"}
    for name in names:
        assert (found.path / name).read_bytes() == hub.files[name]
    weights = sum(len(data) for name, data in hub.files.items() if name.endswith(".safetensors"))
    assert max(told) >= weights
    served = len(hub.served)
    assert resolve("org/tiny").path == found.path
    assert len(hub.served) == served


def test_small_files_come_before_weights(hub: Hub) -> None:
    """Whatever stops a download, a model with all its weights has its tokenizer too."""
    resolve("org/tiny")
    first = min(i for i, name in enumerate(hub.served) if name.endswith(".safetensors"))
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= set(hub.served[:first])


def test_a_failed_download_is_partial_and_can_be_finished(hub: Hub) -> None:
    """Listed with the missing shard, not run, completed by the next try."""
    shard = "model-00002-of-00002.safetensors"
    hub.broken = {shard}
    with pytest.raises(ModelError, match="org/tiny"):
        resolve("org/tiny")
    [model] = list_models()
    assert shard in model.missing
    hub.broken = set()
    assert resolve("org/tiny").path == model.path
    assert list_models()[0].complete


def test_a_model_that_does_not_exist_is_told_as_such(hub: Hub) -> None:
    """Not as a network failure."""
    with pytest.raises(ModelError, match="org/none is not on the hub"):
        resolve("org/none")


def test_a_repository_that_is_no_model_is_refused(hub: Hub) -> None:
    """Fetched as asked, but its lack of a tokenizer is told before anything loads it."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        del hub.files[name]
    with pytest.raises(ModelError, match=r"lacks: tokenizer\.json"):
        resolve("org/tiny")


def test_no_network_names_the_model_and_the_flag(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused connection ends at once in words."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"org/tiny.*--offline"):
        download("org/tiny", None)
