"""Sockets, signals and the life of a server around one app.

``serve`` runs in the caller's task; each connection is a task of its nursery, run by hypercorn's
trio protocol code. The accept loop is ours rather than ``hypercorn.trio.serve`` for three reasons:
connections run over :class:`~.transport.BoundedStream`, a fault in one connection never ends the
others, and a second stop signal ends everything at once.

The life of a server: bound and accepting (also while the model loads) → *draining*: no new
connections, new requests get 503, running answers go on for up to ``drain_timeout`` → closed.
"""

from __future__ import annotations

import errno
import logging
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState, LifespanState

from mlx_troupe.runtime.errors import TroupeError

from .guards import WILDCARD_BINDS
from .transport import BoundedStream

if TYPE_CHECKING:
    from .app import EdgeApp
    from .seams import HttpSettings

log = logging.getLogger(__name__)

PROBE_SECONDS = 0.5
MAX_HEADER_BYTES = 64 << 10


class AddressUnavailable(TroupeError):
    """The address cannot be bound: taken, not ours, or not permitted."""

    code = "address_unavailable"


@dataclass(slots=True)
class Stop:
    """Asks a server to stop: ``drain`` lets running answers finish, ``now`` does not."""

    drain: trio.Event = field(default_factory=trio.Event)
    now: trio.Event = field(default_factory=trio.Event)

    def request(self) -> None:
        """Drain; asked a second time, stop at once."""
        if self.drain.is_set():
            self.now.set()
        self.drain.set()


async def open_listeners(host: str, port: int) -> list[trio.SocketListener]:
    """Bind and listen on every address of ``host``. Raises AddressUnavailable in plain words.

    A connection is tried first: some systems let two servers share a port when one of them is
    bound to all interfaces, and the newcomer would then be silently unreachable.
    """
    if port != 0 and await _is_answered("127.0.0.1" if host in WILDCARD_BINDS else host, port):
        raise AddressUnavailable(
            f"something is already serving on {host}:{port}; stop it or choose another port"
        )
    try:
        return await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise AddressUnavailable(_why(error, host, port)) from error


async def serve(
    app: EdgeApp,
    *,
    listeners: list[trio.SocketListener] | None = None,
    stop: Stop | None = None,
    handle_signals: bool = True,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve ``app`` until stopped, by ``stop`` or (in the main thread) by SIGINT or SIGTERM.

    ``listeners`` are those of :func:`open_listeners`, for callers who want the address before they
    load anything; left out, the address of the app's settings is bound here. Starts with the URLs
    that it is reachable under. Raises AddressUnavailable.
    """
    settings = app.edge.settings
    stop = stop or Stop()
    if listeners is None:
        listeners = await open_listeners(settings.host, settings.port)
    server = _Server(app, stop)
    async with trio.open_nursery() as nursery:
        if handle_signals:
            await nursery.start(_watch_signals, stop)
        task_status.started([_url(listener) for listener in listeners])
        await server.run(listeners)
        nursery.cancel_scope.cancel()


class _Server:
    """One running server: its connections and its way down."""

    def __init__(self, app: EdgeApp, stop: Stop) -> None:
        self._app = app
        self._stop = stop
        self._config = _hypercorn_config(app.edge.settings)
        self._context = WorkerContext(None)
        self._wrapped = ASGIWrapper(app)
        self._streams: set[BoundedStream] = set()

    async def run(self, listeners: list[trio.SocketListener]) -> None:
        """Accept until asked to drain, then wait for what runs."""
        async with trio.open_nursery() as outer:
            outer.start_soon(self._stop_at_once)
            async with trio.open_nursery() as connections:
                await self._accept(listeners, connections)
                self._app.edge.draining = True
                # Idle connections close, busy ones do so after their reply.
                await self._context.terminated.set()
                outer.start_soon(self._stop_after, self._app.edge.settings.drain_timeout)
            outer.cancel_scope.cancel()

    async def _accept(
        self, listeners: list[trio.SocketListener], connections: trio.Nursery
    ) -> None:
        async with trio.open_nursery() as accepting:

            async def accept() -> None:
                await trio.serve_listeners(
                    self._serve_connection, listeners, handler_nursery=connections
                )

            accepting.start_soon(accept)
            await self._stop.drain.wait()
            accepting.cancel_scope.cancel()

    async def _serve_connection(self, accepted: trio.SocketStream) -> None:
        stall_seconds = self._app.edge.runtime.settings.read_timeout
        stream = BoundedStream(accepted, stall_seconds)
        self._streams.add(stream)
        try:
            await _Connection(
                self._wrapped,
                self._config,
                self._context,
                ConnectionState(LifespanState({})),
                stream,  # type: ignore[arg-type]
            )
        except Exception:
            log.exception("a connection failed")
        finally:
            self._streams.discard(stream)
            stream.abort()

    async def _stop_at_once(self) -> None:
        """Cut everything when told to, and also when the whole server is cancelled.

        hypercorn shields its writes, so cancellation alone would wait for stalled clients.
        """
        try:
            await self._stop.now.wait()
        finally:
            self._cut_all()

    async def _stop_after(self, seconds: float) -> None:
        await trio.sleep(seconds)
        log.warning("cutting the answers that still run after %g s", seconds)
        self._cut_all()

    def _cut_all(self) -> None:
        """Close every connection; its request sees a disconnect."""
        for stream in tuple(self._streams):
            stream.abort()


class _Connection(TCPServer):
    """hypercorn's connection, gone as soon as its client is.

    Left alone, its idle timer would keep it for another ``idle_timeout`` after the client hung up.
    """

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()


async def _watch_signals(
    stop: Stop, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        task_status.started()
        async for _ in received:
            stop.request()


async def _is_answered(host: str, port: int) -> bool:
    with trio.move_on_after(PROBE_SECONDS):
        try:
            stream = await trio.open_tcp_stream(host, port)
        except OSError:
            return False
        await stream.aclose()
        return True
    return False


def _why(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken; stop its owner or choose another port"
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has; choose one above 1023"
    return f"cannot listen on {host}:{port}: {error.strerror or error}"


def _hypercorn_config(settings: HttpSettings) -> Config:
    config = Config()
    config.accesslog = None
    config.errorlog = logging.getLogger("mlx_troupe.http.hypercorn")
    config.keep_alive_timeout = settings.idle_timeout
    config.keep_alive_max_requests = 1_000_000
    config.h11_max_incomplete_size = MAX_HEADER_BYTES
    config.include_server_header = False
    return config


def _url(listener: trio.SocketListener) -> str:
    host, port = listener.socket.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
