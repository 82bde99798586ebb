"""``/v1/adapters`` on the wire, and how a request names the adapters that it wants. Pure data.

A request says ``adapter: "a"``, ``"a+b"`` or ``"a,b"`` (both applied, in this order) or ``"none"``
(the base model alone), or ``adapters: ["a", "b"]``. Without either it gets the server's default.
"""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta, Struct

from mlx_troupe.runtime.adapter_table import NO_ADAPTER
from mlx_troupe.runtime.adapters import AdapterInfo
from mlx_troupe.runtime.errors import InvalidRequest

_BETWEEN = re.compile(r"[+,]")


class MountRequest(Struct):
    """Body of ``POST /v1/adapters``. Without ``id`` the folder's name is the id."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    id: str | None = None


class MountReply(Struct):
    """An adapter that was just mounted."""

    id: str
    revision: str
    mounted_layers: int
    rank: int
    scale: float
    size_bytes: int
    ram_bytes: int


class AdapterCard(Struct):
    """A mounted adapter; ``default``: requests that name none get it."""

    id: str
    object: str
    revision: str
    rank: int
    scale: float
    mounted_layers: int
    size_bytes: int
    ram_bytes: int
    default: bool


class AdapterList(Struct):
    """All mounted adapters, in the order of mounting."""

    object: str
    data: tuple[AdapterCard, ...]


class AvailableCard(Struct):
    """An adapter folder that may be mounted by its ``path``.

    ``mounted``: exactly this content is, under some id. ``compatible`` is null while the model
    loads; ``reason`` says why it is false.
    """

    id: str
    path: str
    mounted: bool
    compatible: bool | None
    reason: str | None = None
    rank: int | None = None
    scale: float | None = None
    size_bytes: int | None = None
    base_model: str | None = None


class AvailableList(Struct):
    """All adapter folders that may be mounted."""

    object: str
    data: tuple[AvailableCard, ...]


class UnmountReply(Struct):
    """An adapter that was just unmounted, and how many modules it had changed."""

    id: str
    removed_layers: int


def mount_reply(info: AdapterInfo) -> MountReply:
    """The reply for a mounted adapter."""
    return MountReply(
        info.id,
        info.revision,
        info.mounted_layers,
        info.rank,
        info.scale,
        info.size_bytes,
        info.ram_bytes,
    )


def adapter_card(info: AdapterInfo, *, default: bool) -> AdapterCard:
    """The card of a mounted adapter."""
    return AdapterCard(
        info.id,
        "adapter",
        info.revision,
        info.rank,
        info.scale,
        info.mounted_layers,
        info.size_bytes,
        info.ram_bytes,
        default,
    )


def to_adapters(adapter: str | None, adapters: str | list[str] | None) -> tuple[str, ...] | None:
    """The ids that a request names, in order; None where it leaves them to the server.

    Raises:
        InvalidRequest: an empty name, ``none`` beside others, or two fields that disagree.
    """
    named = _ids("adapter", adapter)
    listed = _ids("adapters", adapters)
    if named is not None and listed is not None and named != listed:
        raise InvalidRequest("adapter and adapters name different adapters", param="adapter")
    return listed if named is None else named


def _ids(field: str, value: str | list[str] | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = _BETWEEN.split(value) if isinstance(value, str) else value
    ids = tuple(name.strip() for name in names)
    if ids == (NO_ADAPTER,):
        return ()
    if "" in ids or NO_ADAPTER in ids:
        raise InvalidRequest(
            f'{field}: must be an adapter\'s id, several joined by "+", or "{NO_ADAPTER}"',
            param=field,
        )
    return ids
