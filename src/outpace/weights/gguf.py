"""Read a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian).

The header is parsed here and not by `gguf.GGUFReader`, because that one needs seconds for a 150k-token vocabulary and
trusts the lengths it reads. Block formats are decoded by the gguf package.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from outpace.errors import ModelError

Kind = GGMLQuantizationType
SUPPORTED_KINDS = frozenset(
    {Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_0, Kind.Q5_1, Kind.Q4_0, Kind.Q4_1}
    | {Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K}
)
# Metadata value types of the format: 0-7 and 10-12 are numbers (7 is bool), 8 is a string, 9 an array.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GGUFTensor:
    """shape is in row-major order, rows first (the file stores it reversed); offset is from the start of the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A checked header: every tensor lies inside the file, and its kind is known."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def rows(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        """The raw bytes [rows, bytes per row], mapped. A vector is one row."""
        lines = math.prod(tensor.shape[:-1])
        return np.memmap(self.path, np.uint8, "r", tensor.offset, (lines, tensor.nbytes // lines))


class _Cursor:
    """Walks the header and never reads past the end of the file, whatever the lengths in it claim."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self.path, self.data, self.at = path, data.data, 0

    def fail(self, what: str) -> ModelError:
        return ModelError(
            f"{self.path} is not a usable GGUF file: {what} at byte {self.at} of {len(self.data)}. The file is damaged"
            " or was not downloaded completely; fetch it again."
        )

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise self.fail(f"the header claims {count} more bytes than there are")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        raw = self.take(self.number("Q"))
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self.fail("a text is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        raise self.fail(f"unknown metadata type {kind}")

    def array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind in _NUMBERS:
            size = struct.calcsize("<" + _NUMBERS[kind])
            numbers: list[Any] = np.frombuffer(self.take(count * size), "<" + _NUMBERS[kind]).tolist()
            return numbers
        if kind != _STRING:
            raise self.fail(f"an array of metadata type {kind} is not supported")
        if count * 8 > len(self.data) - self.at:  # a string is at least its own length field
            raise self.fail(f"the header claims {count} more texts than fit")
        return [self.string() for _ in range(count)]


def read_gguf(path: Path) -> GGUFFile:
    """Parse and check the header. ModelError: not GGUF, version 1, big-endian, truncated, or a header that lies."""
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"Cannot read {path}: {error}. Check the path and its permissions.") from None
    cursor = _Cursor(path, data)
    if bytes(data[:4]) != b"GGUF":
        raise cursor.fail("it does not start with 'GGUF'")
    cursor.take(4)
    version = cursor.number("I")
    if version not in (2, 3):
        raise ModelError(
            f"{path} has GGUF version {version}; little-endian versions 2 and 3 are supported. Re-export it."
        )
    tensor_count, entry_count = cursor.number("Q"), cursor.number("Q")
    metadata = _read_metadata(cursor, entry_count)
    return GGUFFile(path, metadata, _read_tensors(cursor, tensor_count, metadata))


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.number("I"))
    return metadata


def _read_tensors(cursor: _Cursor, count: int, metadata: dict[str, Any]) -> dict[str, GGUFTensor]:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise cursor.fail(f"general.alignment {alignment!r} is not a positive multiple of 8")
    entries = [_read_entry(cursor) for _ in range(count)]
    base = math.ceil(cursor.at / alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, kind, shape, offset in entries:
        if name in tensors:
            raise cursor.fail(f"tensor {name!r} appears twice")
        tensors[name] = _place(cursor, GGUFTensor(name, kind, shape, base + offset, 0))
    return tensors


def _read_entry(cursor: _Cursor) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    name = cursor.string()
    dimensions = cursor.number("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise cursor.fail(f"tensor {name!r} claims {dimensions} dimensions")
    shape = tuple(reversed([cursor.number("Q") for _ in range(dimensions)]))
    number = cursor.number("I")
    if number not in [kind.value for kind in SUPPORTED_KINDS]:
        known = [kind.name for kind in Kind if kind.value == number]
        raise ModelError(
            f"{cursor.path}: tensor {name!r} is stored as {known[0] if known else f'type {number}'}, which is not"
            f" supported. Supported formats: {', '.join(sorted(kind.name for kind in SUPPORTED_KINDS))}. Take a file in"
            " one of these, or run this one with llama.cpp."
        )
    return name, Kind(number), shape, cursor.number("Q")


def _place(cursor: _Cursor, tensor: GGUFTensor) -> GGUFTensor:
    """Fill in nbytes, after checking that shape and offset fit the file."""
    block, size = GGML_QUANT_SIZES[tensor.kind]
    elements = math.prod(tensor.shape)
    if elements == 0 or tensor.shape[-1] % block:
        raise cursor.fail(f"tensor {tensor.name!r} has shape {list(tensor.shape)}, impossible for {tensor.kind.name}")
    nbytes = elements // block * size
    if tensor.offset + nbytes > len(cursor.data):
        raise cursor.fail(f"tensor {tensor.name!r} ends at byte {tensor.offset + nbytes}, beyond the file")
    return GGUFTensor(tensor.name, tensor.kind, tensor.shape, tensor.offset, nbytes)


def decode_rows(rows: NDArray[np.uint8], kind: GGMLQuantizationType, chunk: int) -> Iterator[NDArray[np.float32]]:
    """Raw rows [R, bytes] -> float32 pieces [<= chunk, columns], in order, each the caller's own."""
    for first in range(0, len(rows), chunk):
        yield dequantize(np.array(rows[first : first + chunk]), kind).astype(np.float32, copy=False)
