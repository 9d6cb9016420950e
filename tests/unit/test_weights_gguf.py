"""The GGUF reader: what gguf's own writer wrote comes back, and a damaged or lying file is an error, never a crash."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from outpace.errors import ModelError
from outpace.weights.gguf import SUPPORTED_KINDS, decode_rows, read_gguf

Kind = GGMLQuantizationType
ROWS, COLUMNS = 7, 512
# Largest error of a weight, as a share of the largest weight of its block, for values drawn from a normal law.
PRECISION = {Kind.F32: 0.0, Kind.F16: 1e-3, Kind.BF16: 5e-3, Kind.Q8_0: 0.01, Kind.Q5_0: 0.07, Kind.Q5_1: 0.07}
PRECISION |= {Kind.Q4_0: 0.14, Kind.Q4_1: 0.14}


def blocks(kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """Valid raw rows of a format that gguf cannot quantise to: random bytes with ordinary scales."""
    block, size = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (ROWS, COLUMNS // block, size), np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    at = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}[kind]
    for first in at:
        raw[..., first : first + 2] = scale
    return raw.reshape(ROWS, -1)


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Kind]], **metadata: object) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kind = gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=None if kind in (Kind.F32, Kind.F16) else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", sorted(SUPPORTED_KINDS), ids=lambda kind: kind.name)
def test_block_formats(kind: Kind, tmp_path: Path) -> None:
    rng = np.random.default_rng(kind.value)
    values = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    raw = quantize(values, kind) if kind in PRECISION else blocks(kind, rng)
    file = read_gguf(write(tmp_path / "a.gguf", {"w": (raw, kind), "v": (values[0], Kind.F32)}))
    tensor = file.tensors["w"]
    assert (tensor.kind, tensor.shape) == (kind, (ROWS, COLUMNS))
    found = np.concatenate(list(decode_rows(file.rows(tensor), kind, 3)))  # 3, 3 and 1 rows
    np.testing.assert_array_equal(found, dequantize(raw, kind))
    assert found.dtype == np.float32 and np.isfinite(found).all() and found.std() > 0
    if kind in PRECISION:
        assert np.abs(found - values).max() <= PRECISION[kind] * np.abs(values).max()
        assert PRECISION[kind] == 0 or not np.array_equal(found, values)  # a lossless format here would be a mix-up
    [vector] = decode_rows(file.rows(file.tensors["v"]), Kind.F32, 3)
    np.testing.assert_array_equal(vector[0], values[0])
    vector += 1  # the caller's own: writing to it must not reach the mapping
    np.testing.assert_array_equal(next(decode_rows(file.rows(file.tensors["v"]), Kind.F32, 3))[0], values[0])


METADATA = {
    "a.text": "naïve 北京 🎉",
    "a.yes": True,
    "a.count": 12,
    "a.less": -3,
    "a.base": 1e6,
    "a.texts": ["", "a", "ü"],
    "a.numbers": [1, -2, 3],
    "a.scores": [0.5, -1.5],
    "a.flags": [True, False],
}


def test_metadata(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", {"w": (np.ones((2, 32), np.float32), Kind.F32)}, **METADATA)
    found = read_gguf(path).metadata
    assert {key: found[key] for key in METADATA} == METADATA
    theirs = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items() if "GGUF." not in key}
    assert found == theirs


def sample(tmp_path: Path) -> tuple[Path, bytes]:
    weights = {"first": (np.ones((4, 32), np.float32), Kind.F32), "other": (np.ones((2, 32), np.float32), Kind.F32)}
    path = write(tmp_path / "good.gguf", weights, **METADATA)
    read_gguf(path)  # the control: unharmed, it is read
    return path, path.read_bytes()


def test_truncated_anywhere(tmp_path: Path) -> None:
    _, data = sample(tmp_path)
    bad = tmp_path / "bad.gguf"
    for length in (*range(0, len(data) - 300, 11), len(data) - 256, len(data) - 1):
        bad.write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"bad\.gguf"):
            read_gguf(bad)


HUGE = struct.pack("<Q", 2**61)
LIES = {
    "no magic": (b"GGUF", b"GGML", "does not start with"),
    "version 1": (b"GGUF" + struct.pack("<I", 3), b"GGUF" + struct.pack("<I", 1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack("<I", 3), b"GGUF" + struct.pack(">I", 3), "version"),
    "tensor count": (struct.pack("<IQ", 3, 2), struct.pack("<I", 3) + HUGE, "claims"),
    "name length": (struct.pack("<Q", 5) + b"first", HUGE + b"first", "claims"),
    "text count": (struct.pack("<IQQ", 8, 3, 0), struct.pack("<I", 8) + HUGE + bytes(8), "more texts than fit"),
    "number count": (struct.pack("<IQi", 5, 3, 1), struct.pack("<I", 5) + HUGE + struct.pack("<i", 1), "claims"),
    "value type": (b"a.yes" + struct.pack("<I", 7), b"a.yes" + struct.pack("<I", 77), "unknown metadata type 77"),
    "not UTF-8": ("naïve".encode(), b"na\xff\xfeve", "not UTF-8"),
    "same key": (b"a.less", b"a.text", "appears twice"),
    "same tensor": (b"other", b"first", "appears twice"),
    "dimensions": (b"first" + struct.pack("<I", 2), b"first" + struct.pack("<I", 9), "9 dimensions"),
    "no rows": (struct.pack("<QQ", 32, 4), struct.pack("<QQ", 32, 0), "impossible"),
    "too many rows": (struct.pack("<QQ", 32, 4), struct.pack("<QQ", 32, 2**40), "beyond the file"),
    "offset": (struct.pack("<QQIQ", 32, 2, 0, 512), struct.pack("<QQIQ", 32, 2, 0, 1 << 62), "beyond the file"),
    "odd block": (struct.pack("<QQI", 32, 4, 0), struct.pack("<QQI", 32, 4, 12), "impossible for Q4_K"),
    "kind": (struct.pack("<QQI", 32, 4, 0), struct.pack("<QQI", 32, 4, 20), "stored as IQ4_NL.*llama.cpp"),
    "unknown kind": (struct.pack("<QQI", 32, 4, 0), struct.pack("<QQI", 32, 4, 999), "stored as type 999"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lying_header(lie: str, tmp_path: Path) -> None:
    path, data = sample(tmp_path)
    old, new, message = LIES[lie]
    assert data.count(old) >= 1 and len(old) == len(new), "the lie must be told"
    path.write_bytes(data.replace(old, new, 1))
    with pytest.raises(ModelError, match=message):
        read_gguf(path)


def test_flipped_bytes_never_crash(tmp_path: Path) -> None:
    path, data = sample(tmp_path)
    source, refused = random.Random(5), 0
    for _ in range(400):
        bad = bytearray(data)
        for _ in range(source.randint(1, 4)):
            bad[source.randrange(len(data) - 768)] = source.randrange(256)
        path.write_bytes(bytes(bad))
        try:
            file = read_gguf(path)
        except ModelError:
            refused += 1
            continue
        for tensor in file.tensors.values():
            assert file.rows(tensor).size == tensor.nbytes
    assert 50 < refused < 400


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Cannot read .*none\.gguf"):
        read_gguf(tmp_path / "none.gguf")
