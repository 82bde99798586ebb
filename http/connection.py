"""One HTTP request from its first byte to its last, and what must be left when it ends.

Runs in the two tasks that quart-trio makes for a request: one reads, one handles; when the client
goes away the reader cancels the handler. Everything that a handler opens for longer than its own
call (a stream's generation) is entered on the stack kept here, in the handling task, so that it is
left on *every* way out: answered, failed, cut, or cancelled between the handler and its body.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, cast

import trio
from quart import request
from quart_trio.asgi import TrioASGIHTTPConnection

if TYPE_CHECKING:
    from hypercorn.typing import ASGISendCallable, ASGISendEvent
    from quart.wrappers import Request

    from .app import EdgeApp

log = logging.getLogger(__name__)

STACK_KEY = "mlx_troupe.exit_stack"
CLIENT_CLOSED = 499
"""Status under which a request is counted whose client left before any reply."""


class ClientStalledError(Exception):
    """The client read nothing for the whole of ``read_timeout`` while data waited."""


def request_stack() -> AsyncExitStack:
    """The stack that is unwound when the current request ends."""
    scope = cast("dict[str, Any]", request.scope)
    return cast("AsyncExitStack", scope[STACK_KEY])


def bounded_send(send: ASGISendCallable, seconds: float, *, multiplexed: bool) -> ASGISendCallable:
    """``send`` that raises ClientStalledError when a message takes longer than ``seconds``.

    This covers what HTTP/2 waits for above the socket (``multiplexed``: flow control) and the end
    of a body. A stalled TCP write is shielded by hypercorn and is ended by the transport itself
    (``http/transport.py``), so ordinary HTTP/1 messages need no deadline of their own.

    The last message is shielded: while it is sent, hypercorn reports the end of the request as a
    disconnect, and being cancelled there would leave an HTTP/1.0 connection open.
    """

    async def send_within(message: ASGISendEvent) -> None:
        is_last = message["type"] == "http.response.body" and not message.get("more_body")
        if not (is_last or multiplexed):
            await send(message)
            return
        with trio.move_on_after(seconds, shield=is_last) as scope:
            await send(message)
        if scope.cancelled_caught:
            raise ClientStalledError

    return cast("ASGISendCallable", send_within)


class EdgeConnection(TrioASGIHTTPConnection):
    """Quart's connection with an exit stack, a send deadline and a request count.

    Quart's own response timeout is not applied: it would cut long answers without a word.
    """

    app: EdgeApp

    async def handle_request(  # type: ignore[override]
        self, nursery: trio.Nursery, request: Request, send: ASGISendCallable
    ) -> None:
        """Handle, reply, unwind; ends the reading task at the end."""
        edge = self.app.edge
        status = CLIENT_CLOSED
        try:
            async with AsyncExitStack() as stack:
                cast("dict[str, Any]", request.scope)[STACK_KEY] = stack
                response = await self.app.handle_request(request)
                status = response.status_code
                bounded = bounded_send(
                    send,
                    edge.runtime.settings.read_timeout,
                    multiplexed=not request.http_version.startswith("1"),
                )
                await self._send_response(bounded, response)
        except ClientStalledError:
            log.info("cut a client that stopped reading")
        finally:
            edge.metrics.count_request(_route_of(request), status)
        nursery.cancel_scope.cancel()


def _route_of(incoming: Request) -> str:
    rule = incoming.url_rule
    return "unmatched" if rule is None else rule.rule
