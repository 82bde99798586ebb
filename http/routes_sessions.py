"""``POST /admin/cache/session/close``: a chat is over, what is kept for it may go first.

It deletes nothing and waits for no flush; the order in which states leave memory is all it changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from quart import Blueprint, Response, request

from .answering import json_response
from .guards import check_json_headers
from .wire.parsing import fit, parse_json
from .wire.session import CloseReply, CloseRequest, session_of

if TYPE_CHECKING:
    from .seams import Edge


def session_routes(edge: Edge) -> Blueprint:
    """The endpoint that closes sessions."""
    routes = Blueprint("sessions", __name__)

    @routes.post("/admin/cache/session/close")
    async def close() -> Response:
        check_json_headers(request)
        body = cast("bytes", await request.get_data(cache=False))
        session = session_of(fit(parse_json(body), CloseRequest).session_id)
        closed = False
        if session is not None and edge.settings.sessions:
            closed = await edge.runtime.close_session(session)
        return json_response(CloseReply(closed))

    return routes
