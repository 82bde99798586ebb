"""``GET /``, ``/health``, ``/stats`` and ``/metrics``: what operators and probes read.

None of them touches the engine, so they answer while a model loads or a long prompt runs.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST
from quart import Blueprint, Response

from .answering import json_response

if TYPE_CHECKING:
    from .seams import Edge

VERSION = version("mlx-troupe")


def service_routes(edge: Edge) -> Blueprint:
    """The service endpoints."""
    routes = Blueprint("service", __name__)

    @routes.get("/")
    async def root() -> Response:
        return json_response(
            {
                "name": "mlx-troupe",
                "version": VERSION,
                "model": edge.model_name,
                "endpoints": [
                    "/v1/chat/completions",
                    "/v1/completions",
                    "/v1/models",
                    "/v1/adapters",
                    "/admin/cache/flush",
                    "/admin/cache/session/close",
                    "/health",
                    "/stats",
                    "/metrics",
                ],
            }
        )

    @routes.get("/health")
    async def health() -> Response:
        if edge.draining:
            return _unhealthy("stopping", "the server is shutting down")
        report = edge.runtime.health()
        if report.status != "ok":
            return _unhealthy(report.status, report.reason)
        return json_response({"status": "ok"})

    @routes.get("/stats")
    async def stats() -> Response:
        return json_response({**edge.runtime.stats(), "server": _server_block(edge)})

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(edge.metrics.render(), content_type=CONTENT_TYPE_LATEST)

    return routes


def _unhealthy(status: str, reason: str) -> Response:
    return json_response({"status": status, "reason": reason}, 503)


def _server_block(edge: Edge) -> dict[str, object]:
    return {
        "version": VERSION,
        "model": edge.model_name,
        "started_at": int(edge.started_at),
        "uptime_seconds": round(time.time() - edge.started_at, 3),
        "draining": edge.draining,
    }
