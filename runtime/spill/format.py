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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import BinaryIO

from ..heap import own_pages
from .faults import Corrupt, ForeignVersion
from .header import (
    DIGEST,
    FORMAT,
    NO_DIGEST,
    OPENING,
    VERSION,
    ArrayForm,
    Header,
    LayerForm,
    parse_header,
    write_header,
)
from .state import HostArray, HostLayer, HostState

_MAX_HEADER = 64 << 20  # a million token ids are 6 MiB


@dataclass(frozen=True, slots=True)
class Draft:
    """A file about to be written: all its bytes, in order, none of them copied."""

    header: Header
    parts: tuple[memoryview, ...]


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
    text = bytearray(write_header(header))
    digest = sha256(text).hexdigest()
    text[DIGEST] = digest.encode()
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
    if not len(OPENING) < length <= min(_MAX_HEADER, size - 8):
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
    claimed = bytes(text[DIGEST])
    text[DIGEST] = NO_DIGEST
    if claimed != sha256(text).hexdigest().encode() or metadata["digest"] != claimed.decode():
        raise Corrupt("the header is not what was written")
    header = replace(parse_header(metadata, fields), digest=claimed.decode(), size=size)
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
