"""``GET /v1``, ``/v1/models`` and ``/v1/models/<id>``.

One model is served. A request's own ``model`` field is an alias: any name is answered by the
served model and the reply carries its true id, which is the one that these routes list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import Blueprint, Response

from .answering import json_response
from .errors import HttpRefusal
from .wire.models import ModelCard, ModelList, model_card

if TYPE_CHECKING:
    from .seams import Edge


def model_routes(edge: Edge) -> Blueprint:
    """The model endpoints."""
    routes = Blueprint("models", __name__)

    def card() -> ModelCard:
        adapters = tuple(info.id for info in edge.runtime.adapters)
        return model_card(edge.model_name, edge.runtime.model, int(edge.started_at), adapters)

    @routes.get("/v1")
    @routes.get("/v1/models")
    async def models() -> Response:
        return json_response(ModelList("list", (card(),)))

    @routes.get("/v1/models/<path:model_id>")
    async def model(model_id: str) -> Response:
        served = card()
        if model_id != served.id:
            raise HttpRefusal(404, "no such model", code="model_not_found")
        return json_response(served)

    return routes
