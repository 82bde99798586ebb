"""What a file says about itself: the values, and their JSON in a safetensors header.

    "__metadata__": the digest of the header first, then the fields of :class:`Header`
    "layers.0.0": …  each tensor's type, shape and place, as the format has it

Stateless. Touches no file and no tensor's bytes: ``format.py`` puts both together.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np

from ..prefix.entries import Kind
from .faults import Corrupt
from .state import ITEM_BYTES, Meta

FORMAT = "mlx-troupe state"
VERSION = "1"

OPENING = b'{"__metadata__":{"digest":"'
NO_DIGEST = b"0" * 64
DIGEST = slice(len(OPENING), len(OPENING) + len(NO_DIGEST))
"""Where the digest stands in a header's text; zeros stand there while it is taken."""
_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """An array without its bytes: where they lie in the data, and their digest."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    digest: str


@dataclass(frozen=True, slots=True)
class LayerForm:
    """A layer without its bytes."""

    kind: str
    meta: Meta
    arrays: tuple[ArrayForm, ...]
    token_axis: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about itself.

    Attributes:
        namespace: digest of the namespace, which itself is not written down.
        setup: digest of what it is without adapters.
        ids: all tokens of the state, four bytes each, those of the parents included.
        first, length: the file holds the state of tokens [first, length).
        kind, cuttable: as of the prefix entry.
        parent: digest of the header of the file that holds the state of the first ``first``
            tokens; empty for a whole state.
        created: seconds since the epoch.
        session: the chat that the state belongs to; empty if it is nobody's.
        digest: of the header.
        size: bytes of the whole file.
    """

    namespace: str
    ids: bytes
    first: int
    length: int
    kind: Kind
    cuttable: bool
    parent: str
    created: float
    layers: tuple[LayerForm, ...]
    setup: str = ""
    session: str = ""
    digest: str = ""
    size: int = 0


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids, four bytes each."""
    return np.asarray(ids, "<u4").tobytes()


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """What :func:`pack_ids` packed."""
    return tuple(np.frombuffer(packed, "<u4").tolist())


def namespace_digest(namespace: str) -> str:
    """A namespace as files name it."""
    return sha256(namespace.encode()).hexdigest()


def write_header(header: Header) -> bytes:
    """The text of a header, padded with blanks, with zeros in the digest's place."""
    tensors = {
        f"layers.{i}.{j}": {
            "dtype": _NAMES[array.dtype],
            "shape": array.shape,
            "data_offsets": (array.start, array.stop),
        }
        for i, layer in enumerate(header.layers)
        for j, array in enumerate(layer.arrays)
    }
    layers = [
        (layer.kind, layer.meta, layer.token_axis, tuple(a.digest for a in layer.arrays))
        for layer in header.layers
    ]
    metadata = {
        "digest": NO_DIGEST.decode(),
        "format": FORMAT,
        "version": VERSION,
        "namespace": header.namespace,
        "ids": b64encode(header.ids).decode(),
        "first": str(header.first),
        "length": str(header.length),
        "kind": header.kind,
        "cuttable": str(int(header.cuttable)),
        "parent": header.parent,
        "created": repr(header.created),
        "layers": json.dumps(layers, separators=(",", ":")),
        "setup": header.setup,
    }
    if header.session:
        metadata["session"] = header.session
    text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def parse_header(metadata: dict[str, str], tensors: dict[str, Any]) -> Header:
    """A header from its metadata and its tensors, as they were read. Raises Corrupt.

    Its digest was found right, so what is not in order in it is our own fault.
    """
    try:
        layers = tuple(
            LayerForm(
                kind,
                tuple((name, value) for name, value in meta),
                tuple(
                    _array_form(tensors[f"layers.{i}.{j}"], digest)
                    for j, digest in enumerate(digests)
                ),
                tuple(axes),
            )
            for i, (kind, meta, axes, digests) in enumerate(json.loads(metadata["layers"]))
        )
        header = Header(
            namespace=metadata["namespace"],
            ids=b64decode(metadata["ids"], validate=True),
            first=int(metadata["first"]),
            length=int(metadata["length"]),
            kind=metadata["kind"],  # type: ignore[arg-type]
            cuttable=metadata["cuttable"] == "1",
            parent=metadata["parent"],
            created=float(metadata["created"]),
            layers=layers,
            setup=metadata.get("setup", ""),
            session=metadata.get("session", ""),
        )
    except (ValueError, LookupError, TypeError) as error:
        raise Corrupt(f"a header that says nothing: {error!r}") from None
    _check(header)
    return header


def _array_form(tensor: dict[str, Any], digest: str) -> ArrayForm:
    start, stop = tensor["data_offsets"]
    return ArrayForm(_DTYPES[tensor["dtype"]], tuple(tensor["shape"]), start, stop, digest)


def _check(header: Header) -> None:
    arrays = [array for layer in header.layers for array in layer.arrays]
    ends = [0, *(array.stop for array in arrays)]
    starts = [array.start for array in arrays]
    sizes = [int(np.prod(a.shape, dtype=np.int64)) * ITEM_BYTES[a.dtype] for a in arrays]
    if starts != ends[:-1] or sizes != [stop - start for start, stop in pairwise(ends)]:
        raise Corrupt("the tensors do not lie one behind the other")
    if len(header.ids) != 4 * header.length or not 0 <= header.first < header.length:
        raise Corrupt(f"{len(header.ids)} bytes of ids for [{header.first}, {header.length})")
    if bool(header.first) != bool(header.parent):
        raise Corrupt("a delta without a parent, or a whole state with one")
