"""One entry as one file: a safetensors file whose header says all about it and vouches for it.

    8 bytes   length of the header
    header    JSON: "__metadata__" (digest first), then the tensors by name, padded with blanks
    data      the tensors, one behind the other

The digest is of the header with zeros in the digest's place. The header holds the token ids and a
digest of each tensor, so it stands for the whole file: a delta names its parent by that digest.
Stateless; called on worker threads. Reads and writes no names of files, only their content.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np

from ..heap import own_pages
from ..prefix.entries import Kind
from .faults import Corrupt, ForeignVersion
from .state import ITEM_BYTES, HostArray, HostLayer, HostState, Meta

FORMAT = "mlx-troupe state"
VERSION = "1"

_OPENING = b'{"__metadata__":{"digest":"'
_NO_DIGEST = b"0" * 64
_AT = slice(len(_OPENING), len(_OPENING) + len(_NO_DIGEST))
_MAX_HEADER = 64 << 20  # a million token ids are 6 MiB
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


@dataclass(frozen=True, slots=True)
class Draft:
    """A file about to be written: all its bytes, in order, none of them copied."""

    header: Header
    parts: tuple[memoryview, ...]


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids, four bytes each."""
    return np.asarray(ids, "<u4").tobytes()


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """What :func:`pack_ids` packed."""
    return tuple(np.frombuffer(packed, "<u4").tolist())


def namespace_digest(namespace: str) -> str:
    """A namespace as files name it."""
    return sha256(namespace.encode()).hexdigest()


def draft(header: Header, state: HostState) -> Draft:
    """The file of ``state``; ``header`` without layers, digest and size. Hashes every byte."""
    forms, at = [], 0
    for layer in state.layers:
        arrays = []
        for array in layer.arrays:
            stop = at + len(array.data)
            digest = sha256(array.data).hexdigest()
            arrays.append(ArrayForm(array.dtype, array.shape, at, stop, digest))
            at = stop
        forms.append(LayerForm(layer.kind, layer.meta, tuple(arrays), layer.token_axis))
    header = replace(header, layers=tuple(forms))
    text = bytearray(_write_header(header))
    digest = sha256(text).hexdigest()
    text[_AT] = digest.encode()
    start = memoryview(len(text).to_bytes(8, "little") + text)
    data = (memoryview(array.data) for layer in state.layers for array in layer.arrays)
    return Draft(replace(header, digest=digest, size=len(start) + at), (start, *data))


def read_header(file: BinaryIO, size: int) -> Header:
    """The header of a file of ``size`` bytes, read from its start and checked against its digest.

    Raises:
        Corrupt: it is not what was written, or the file is not as long as it says.
        ForeignVersion: it was written by another version of this format.
        OSError: the file cannot be read.
    """
    length = int.from_bytes(_read(file, 8), "little")
    if not len(_OPENING) < length <= min(_MAX_HEADER, size - 8):
        raise Corrupt(f"a header of {length} bytes in a file of {size}")
    text = _read(file, length)
    try:
        fields = json.loads(text)
        metadata = fields.pop("__metadata__")
        form, version = metadata["format"], metadata["version"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(f"no header of ours: {error!r}") from None
    if (form, version) != (FORMAT, VERSION):
        raise ForeignVersion(f"written as {form!r}, version {version!r}")
    claimed = bytes(text[_AT])
    text[_AT] = _NO_DIGEST
    if claimed != sha256(text).hexdigest().encode() or metadata["digest"] != claimed.decode():
        raise Corrupt("the header is not what was written")
    header = replace(_parse(metadata, fields), digest=claimed.decode(), size=size)
    ends = [0, *(array.stop for layer in header.layers for array in layer.arrays)]
    if 8 + length + ends[-1] != size:
        raise Corrupt(f"{size} bytes instead of {8 + length + ends[-1]}")
    return header


def read_state(file: BinaryIO, header: Header, *, verify: bool) -> HostState:
    """The state behind ``header``, which was just read from ``file``; its arrays share one buffer.

    Raises:
        Corrupt: the file has become shorter or, with ``verify``, a tensor is not what was written.
        OSError: the file cannot be read.
    """
    total = max((array.stop for layer in header.layers for array in layer.arrays), default=0)
    buffer = own_pages(total)
    layers = []
    # A tensor is hashed while the next one is read.
    with ThreadPoolExecutor(1) as hasher:
        hashing: list[Future[bool]] = []
        for form in header.layers:
            arrays = []
            for array in form.arrays:
                data = buffer[array.start : array.stop].toreadonly()
                _fill(file, buffer[array.start : array.stop])
                if verify:
                    hashing.append(hasher.submit(_is_as_written, data, array))
                arrays.append(HostArray(array.dtype, array.shape, data))
            layers.append(HostLayer(form.kind, form.meta, tuple(arrays), form.token_axis))
        if not all(done.result() for done in hashing):
            raise Corrupt("a tensor is not what was written")
    return HostState(header.length, tuple(layers), header.first)


def _is_as_written(data: memoryview, array: ArrayForm) -> bool:
    return sha256(data).hexdigest() == array.digest


def _write_header(header: Header) -> bytes:
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
        "digest": _NO_DIGEST.decode(),
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


def _parse(metadata: dict[str, str], tensors: dict[str, Any]) -> Header:
    """A header whose digest is right, so that what is not in order in it is our own fault."""
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


def _read(file: BinaryIO, size: int) -> bytearray:
    data = bytearray(size)
    _fill(file, memoryview(data))
    return data


def _fill(file: BinaryIO, data: memoryview) -> None:
    while data:
        got: int = file.readinto(data)  # type: ignore[attr-defined]
        if not got:
            raise Corrupt("the file ends too early")
        data = data[got:]
