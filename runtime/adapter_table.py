"""Which adapters are mounted under which ids, and which revisions a request's ids stand for.

The core of the ``Adapters`` actor, which alone calls what changes it; anybody on its thread may
read. Knows ids, revisions and folders; neither weights nor rows. A device that was loaded (again)
mounts what :meth:`AdapterTable.wanted` says: the table then shows what that load really mounted,
from the moment it is known, whether or not the actor has run since.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .adapters import AdapterInfo
from .errors import AdapterError

MAX_MOUNTED = 64
"""Ids that may be mounted at once; each costs memory, and the network may mount."""
MAX_SELECTED = 8
"""Adapters of one request."""
MAX_ID_LENGTH = 128
NO_ADAPTER = "none"
"""What a request says to get the base model, whatever the default; never an adapter's id."""
UNKNOWN = "adapter_not_found"
_ID = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Mounting:
    """An adapter folder to be mounted under an id."""

    id: str
    path: Path


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the device mounted when it was loaded for the ``load``-th time; 0 = not yet."""

    load: int = 0
    mounted: tuple[AdapterInfo, ...] = ()


def check_id(adapter_id: str) -> None:
    """Raise AdapterError for what cannot be an adapter's id."""
    fits = len(adapter_id) <= MAX_ID_LENGTH and _ID.fullmatch(adapter_id)
    if not fits or not adapter_id.strip(".") or adapter_id == NO_ADAPTER:
        raise AdapterError(
            f"{adapter_id[:MAX_ID_LENGTH]!r} cannot be an adapter's id: it takes up to "
            f"{MAX_ID_LENGTH} letters, digits, dots, dashes and underscores, and is neither dots "
            f"alone nor {NO_ADAPTER!r}",
            param="id",
        )


def mountings(folders: Sequence[Path]) -> tuple[Mounting, ...]:
    """Folders with their names as ids. Raises AdapterError for a bad name, or one used twice."""
    found: dict[str, Mounting] = {}
    for folder in folders:
        path = folder.expanduser().absolute()
        name = path.name or path.resolve().name
        check_id(name)
        if name in found:
            raise AdapterError(f"two adapters are called {name}: {found[name].path} and {path}")
        found[name] = Mounting(name, path)
    return tuple(found.values())


class AdapterTable:
    """Ids and what is mounted under them, in the order of mounting.

    Args:
        at_start: what the first load mounts. Requests that name no adapter get these, in this
            order, as far as they are mounted.
        loaded: what the device's latest load mounted.
    """

    def __init__(self, at_start: tuple[Mounting, ...], loaded: Callable[[], Loaded]) -> None:
        self._at_start = at_start
        self._loaded = loaded
        self._load = 0
        self._table: dict[str, AdapterInfo] = {}
        self._retired: dict[str, None] = {}
        self._mounts = 0
        self._unmounts = 0

    # ---- for everybody -------------------------------------------------------------------

    @property
    def mounted(self) -> Mapping[str, AdapterInfo]:
        """What is mounted now, by id."""
        loaded = self._loaded()
        return self._table if loaded.load == self._load else _by_id(loaded)

    @property
    def default(self) -> tuple[str, ...]:
        """Ids that a request gets which names none."""
        mounted = self.mounted
        return tuple(start.id for start in self._at_start if start.id in mounted)

    def wanted(self) -> tuple[Mounting, ...]:
        """What a device must mount when it is loaded."""
        if not self._loaded().load:
            return self._at_start
        return tuple(Mounting(info.id, Path(info.path)) for info in self.mounted.values())

    def resolve(self, adapter_ids: tuple[str, ...] | None) -> tuple[str, ...]:
        """The revisions that ids (None: the default) stand for now, in order.

        Raises:
            AdapterError: an id that is not mounted, one that is named twice, or too many.
        """
        mounted = self.mounted
        wanted = self.default if adapter_ids is None else adapter_ids
        if len(wanted) > MAX_SELECTED and adapter_ids is not None:
            raise AdapterError(f"at most {MAX_SELECTED} adapters can be combined", param="adapter")
        for place, adapter_id in enumerate(wanted):
            if adapter_id not in mounted:
                raise _unknown(adapter_id)
            if adapter_id in wanted[:place]:
                raise AdapterError(f"adapter {adapter_id} is named twice", param="adapter")
        return tuple(mounted[adapter_id].revision for adapter_id in wanted)

    def stats(self) -> dict[str, object]:
        """Figures in plain JSON types, without the folders."""
        infos = self.mounted.values()
        return {
            "mounted": [figures_of(info) for info in infos],
            "default": list(self.default),
            "ram_bytes": sum(info.ram_bytes for info in infos),
            "mounts": self._mounts,
            "unmounts": self._unmounts,
        }

    # ---- for the actor -------------------------------------------------------------------

    def check_room(self, adapter_id: str) -> None:
        """Raise AdapterError if nothing can be mounted under this id."""
        check_id(adapter_id)
        mounted = self.mounted
        if adapter_id not in mounted and len(mounted) >= MAX_MOUNTED:
            raise AdapterError(f"{MAX_MOUNTED} adapters are mounted; unmount one first")

    def put(self, info: AdapterInfo) -> None:
        """The device has mounted an adapter; what had its id before is retired."""
        self._catch_up()
        before = self._table.pop(info.id, None)
        self._table[info.id] = info
        self._retired.pop(info.revision, None)
        self._mounts += 1
        if before is not None:
            self.retire(before.revision)

    def remove(self, adapter_id: str) -> AdapterInfo:
        """Take an id out; what was mounted under it is retired.

        Raises:
            AdapterError: it is not mounted (code ``adapter_not_found``).
        """
        self._catch_up()
        info = self._table.pop(adapter_id, None)
        if info is None:
            raise _unknown(adapter_id)
        self._unmounts += 1
        self.retire(info.revision)
        return info

    def retire(self, revision: str) -> None:
        """Nobody can ask for this revision any more, unless it is mounted under some id."""
        self._catch_up()
        if all(info.revision != revision for info in self._table.values()):
            self._retired[revision] = None

    @property
    def retired(self) -> tuple[str, ...]:
        """Revisions that the device still has to unmount."""
        self._catch_up()
        return tuple(self._retired)

    def freed(self, revision: str) -> None:
        """The device has unmounted a retired revision."""
        self._retired.pop(revision, None)

    def _catch_up(self) -> None:
        loaded = self._loaded()
        if loaded.load != self._load:
            self._load = loaded.load
            self._table = _by_id(loaded)
            self._retired = {}


def figures_of(info: AdapterInfo) -> dict[str, object]:
    """What may be told of a mounted adapter to whoever asks: all but where it lies."""
    return {
        "id": info.id,
        "revision": info.revision,
        "rank": info.rank,
        "scale": info.scale,
        "mounted_layers": info.mounted_layers,
        "size_bytes": info.size_bytes,
        "ram_bytes": info.ram_bytes,
    }


def base_only(adapter_ids: tuple[str, ...] | None) -> tuple[str, ...]:
    """What ids stand for where nothing is ever mounted. Raises AdapterError for any."""
    if adapter_ids:
        raise _unknown(adapter_ids[0])
    return ()


def _by_id(loaded: Loaded) -> dict[str, AdapterInfo]:
    return {info.id: info for info in loaded.mounted}


def _unknown(adapter_id: str) -> AdapterError:
    return AdapterError(
        f"adapter {adapter_id[:MAX_ID_LENGTH]!r} is not mounted", param="adapter", code=UNKNOWN
    )
