"""Reads the header, metadata and tensor table of a GGUF file, without MLX.

Owns the byte layout of GGUF versions 2 and 3 and nothing above it: what a key or a tensor *means*
is for the converter. Every count and offset is checked against the file's size first, so that a
truncated or hostile file ends in a :class:`ModelError`, not in a huge allocation.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import ModelError

Value: TypeAlias = "int | float | bool | str | tuple[str, ...] | npt.NDArray[np.generic]"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, str] = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4",
    7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip

TYPE_NAMES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20),
    "Q8_0": (32, 34),
}  # fmt: skip
"""Elements and bytes of one block of each readable type."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table. ``shape`` is row-major: the last axis is contiguous."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in the file; raises ModelError if the type is not readable."""
        if self.type not in BLOCKS:
            readable = ", ".join(BLOCKS)
            raise ModelError(
                f"tensor {self.name} is of type {self.type}, which cannot be read "
                f"(readable: {readable})"
            )
        elements, size = BLOCKS[self.type]
        if not self.shape or self.shape[-1] % elements:
            raise ModelError(f"tensor {self.name}: {self.shape} is not a whole number of blocks")
        return math.prod(self.shape) // elements * size


class GgufFile:
    """An open GGUF file: ``metadata`` and ``tensors`` are parsed, data is mapped on request.

    Use as a context manager. Raises ModelError for anything that is not a whole GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffer = _map(path)
        try:
            cursor = _Cursor(self._buffer, path)
            tensor_count, pair_count = cursor.header()
            self.metadata: Mapping[str, Value] = cursor.metadata(pair_count)
            infos = cursor.tensor_table(tensor_count)
            self._data_start = self._align(cursor.position)
        except BaseException:
            self._buffer.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = infos

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._buffer.close()

    def blocks(self, name: str) -> npt.NDArray[np.uint8]:
        """A copy of the raw bytes of a tensor as uint8[rows, bytes of one row]."""
        info = self.tensors[name]
        start = self._data_start + info.offset
        self._check_inside(info, start)
        raw = np.frombuffer(self._buffer, np.uint8, info.nbytes, start).copy()
        return raw.reshape(math.prod(info.shape[:-1]), -1)

    def check(self) -> None:
        """Raise ModelError if a tensor is of an unreadable type or reaches past the file's end."""
        for info in self.tensors.values():
            self._check_inside(info, self._data_start + info.offset)

    def _check_inside(self, info: TensorInfo, start: int) -> None:
        if start + info.nbytes > len(self._buffer):
            raise ModelError(f"{self.path.name} is truncated: tensor {info.name} is cut off")

    def _align(self, position: int) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ModelError(f"{self.path.name}: general.alignment is {alignment!r}")
        return -(-position // alignment) * alignment


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error


class _Cursor:
    """Walks through the file; every read is bounds-checked."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self._buffer = buffer
        self._name = path.name
        self.position = 0

    def header(self) -> tuple[int, int]:
        if self._take(4) != _MAGIC:
            raise ModelError(f"{self._name} is not a GGUF file")
        version = self._unpack("<I")
        if version not in _VERSIONS:
            raise ModelError(f"{self._name}: GGUF version {version} is not readable (2 and 3 are)")
        return self._unpack("<Q"), self._unpack("<Q")

    def metadata(self, count: int) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for _ in range(count):
            key = self._string()
            found[key] = self._value(self._unpack("<I"))
        return found

    def tensor_table(self, count: int) -> dict[str, TensorInfo]:
        infos: dict[str, TensorInfo] = {}
        for _ in range(count):
            info = self._tensor_info()
            if info.name in infos:
                raise ModelError(f"{self._name}: tensor {info.name} is listed twice")
            infos[info.name] = info
        return infos

    def _tensor_info(self) -> TensorInfo:
        name = self._string()
        rank = self._unpack("<I")
        if not 1 <= rank <= 4:
            raise ModelError(f"{self._name}: tensor {name} has {rank} dimensions")
        shape = tuple(self._unpack("<Q") for _ in range(rank))[::-1]
        kind = self._unpack("<I")
        return TensorInfo(name, shape, TYPE_NAMES.get(kind, f"#{kind}"), self._unpack("<Q"))

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        scalar = self._numbers(kind, 1)[0]
        return bool(scalar) if kind == _BOOL else scalar.item()

    def _array(self) -> Value:
        kind, count = self._unpack("<I"), self._unpack("<Q")
        if kind == _STRING:
            return tuple(self._string() for _ in range(self._plausible(count, 8)))
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> npt.NDArray[np.generic]:
        if kind not in _SCALARS:
            raise ModelError(f"{self._name}: metadata of unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        raw = self._take(self._plausible(count, dtype.itemsize) * dtype.itemsize)
        return np.frombuffer(raw, dtype)

    def _string(self) -> str:
        # Vocabularies hold tokens that are not valid UTF-8 on their own.
        return self._take(self._unpack("<Q")).decode("utf-8", errors="replace")

    def _unpack(self, layout: str) -> int:
        value: int = struct.unpack(layout, self._take(struct.calcsize(layout)))[0]
        return value

    def _plausible(self, count: int, size: int) -> int:
        if count * size > len(self._buffer) - self.position:
            raise ModelError(f"{self._name} is truncated or corrupt at byte {self.position}")
        return count

    def _take(self, count: int) -> bytes:
        self._plausible(count, 1)
        start = self.position
        self.position = start + count
        return self._buffer[start : self.position]
