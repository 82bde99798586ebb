"""``/v1/adapters``: what is mounted, what may be, and mounting and unmounting while rows run.

Runs in the request's own task; disks are read on worker threads. A client names folders only
relative to the directories that the operator offers (``HttpSettings.adapter_dirs``), and is told
nothing of where these lie.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import trio
from quart import Blueprint, Response, request

from mlx_troupe.runtime.adapter_table import UNKNOWN, mountings
from mlx_troupe.runtime.errors import AdapterError
from mlx_troupe.runtime.store.adapters import describe, offered_adapters, offered_folder

from .answering import json_response
from .errors import HttpRefusal
from .guards import check_json_headers
from .wire.adapters import (
    AdapterList,
    AvailableCard,
    AvailableList,
    MountRequest,
    UnmountReply,
    adapter_card,
    mount_reply,
)
from .wire.parsing import fit, parse_json

if TYPE_CHECKING:
    from mlx_troupe.runtime.store.adapters import OfferedAdapter

    from .seams import Edge


def adapter_routes(edge: Edge) -> Blueprint:
    """The adapter endpoints."""
    routes = Blueprint("adapters", __name__)
    runtime, directories = edge.runtime, edge.settings.adapter_dirs
    defaults = {start.id for start in mountings(runtime.settings.adapters)}

    @routes.get("/v1/adapters")
    async def mounted() -> Response:
        cards = (adapter_card(info, default=info.id in defaults) for info in runtime.adapters)
        return json_response(AdapterList("list", tuple(cards)))

    @routes.post("/v1/adapters")
    async def mount() -> Response:
        check_json_headers(request)
        body = cast("bytes", await request.get_data(cache=False))
        wanted = fit(parse_json(body), MountRequest)
        folder = await trio.to_thread.run_sync(offered_folder, wanted.path, directories)
        # By the name that the client used, which may be a link's.
        adapter_id = wanted.id or Path(wanted.path).name or folder.name
        try:
            # What cannot be mounted is refused before the device has to look at it.
            await trio.to_thread.run_sync(_look_at, edge, folder)
            info = await runtime.mount_adapter(adapter_id, folder)
        except AdapterError as error:
            message = error.message.replace(str(folder), wanted.path)
            raise AdapterError(message, param=error.param or "path", code=error.code) from error
        return json_response(mount_reply(info))

    @routes.get("/v1/adapters/available")
    async def available() -> Response:
        revisions = {info.revision for info in runtime.adapters}

        def cards() -> tuple[AvailableCard, ...]:
            return tuple(_card(edge, one, revisions) for one in offered_adapters(directories))

        return json_response(AvailableList("list", await trio.to_thread.run_sync(cards)))

    @routes.delete("/v1/adapters/<adapter_id>")
    async def unmount(adapter_id: str) -> Response:
        try:
            layers = await runtime.unmount_adapter(adapter_id)
        except AdapterError as error:
            if error.code == UNKNOWN:
                raise HttpRefusal(404, error.message, code=UNKNOWN) from error
            raise
        return json_response(UnmountReply(adapter_id, layers))

    return routes


def _card(edge: Edge, offered: OfferedAdapter, mounted: set[str]) -> AvailableCard:
    card = AvailableCard(offered.folder.name, offered.name, mounted=False, compatible=None)
    try:
        found = describe(offered.folder)
        card.mounted = found.revision in mounted
        card.rank, card.scale = found.rank, found.scale
        card.size_bytes, card.base_model = found.size_bytes, found.base_model
        card.compatible = _look_at(edge, offered.folder)
    except AdapterError as error:
        card.compatible = False
        card.reason = error.message.replace(str(offered.folder), offered.name)
    return card


def _look_at(edge: Edge, folder: Path) -> bool | None:
    """Whether a folder's adapter can be mounted; None while the model loads.

    Raises AdapterError with the reason why not.
    """
    found = describe(folder)
    if edge.runtime.model is None:
        return None
    edge.runtime.check_adapter(found)
    return True
