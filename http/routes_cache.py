"""``POST /admin/cache/flush``: make every kept prompt durable, and say whether that worked.

Runs in the request's own task, which waits; nothing that is being computed does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import Blueprint, Response, request

from .answering import json_response
from .guards import check_json_headers

if TYPE_CHECKING:
    from mlx_troupe.actors.spill_messages import FlushReport

    from .seams import Edge

FLUSH_SECONDS = 120.0


def cache_routes(edge: Edge) -> Blueprint:
    """The endpoints of the prompt cache."""
    routes = Blueprint("cache", __name__)

    @routes.post("/admin/cache/flush")
    async def flush() -> Response:
        """200 only when everything is on the disk, 503 with the same figures otherwise."""
        check_json_headers(request)
        report = await edge.runtime.flush_cache(FLUSH_SECONDS)
        return json_response(_figures(report), 200 if report.durable else 503)

    return routes


def _figures(report: FlushReport) -> dict[str, object]:
    return {
        "durable": report.durable,
        "flushedSnapshots": report.flushed,
        "missingSnapshots": report.missing,
        "pendingSnapshots": report.on_device,
        "pendingSpills": report.pending,
        "pendingSpillBytes": report.pending_bytes,
        "droppedSpills": report.dropped,
        "failedSpills": report.failed,
        "crowdedOutSnapshots": report.crowded,
        "elapsedMs": round(report.seconds * 1000, 3),
        "entries": report.entries,
        "longest_durable_prefix_tokens": report.longest_tokens,
    }
