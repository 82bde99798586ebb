"""``POST /v1/completions``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import Blueprint, Response

from .answering import answer_call
from .wire.completions import CompletionShape, completion_call

if TYPE_CHECKING:
    from .seams import Edge


def completion_routes(edge: Edge) -> Blueprint:
    """The text completion endpoint."""
    routes = Blueprint("completions", __name__)

    @routes.post("/v1/completions")
    async def completions() -> Response:
        return await answer_call(edge, "completions", "cmpl", completion_call, CompletionShape)

    return routes
