"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import Blueprint, Response

from .answering import answer_call
from .wire.chat import ChatShape, chat_call

if TYPE_CHECKING:
    from .seams import Edge


def chat_routes(edge: Edge) -> Blueprint:
    """The chat endpoint."""
    routes = Blueprint("chat", __name__)

    @routes.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        return await answer_call(edge, "chat", "chatcmpl", chat_call, ChatShape)

    return routes
