"""GGUF -> a Hugging Face folder in the cache, once. Later starts map that folder and never open the GGUF."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from outpace.errors import ModelError
from outpace.kernels.native import BLOCK_FORMATS
from outpace.weights.gguf import GGUFFile, GGUFTensor, decode_rows, read_gguf
from outpace.weights.gguf_config import hf_config
from outpace.weights.local import Progress, cache_root, locked, silent
from outpace.weights.names import hf_name_of_gguf
from outpace.weights.safetensors import BLOCK_KINDS

FORMAT_VERSION = 1  # raise it when a conversion would come out differently: it is part of the folder's name
_CHUNK_VALUES = 1 << 20  # values decoded at a time: small enough for the CPU's cache, large enough for numpy
_ALIGNMENT = 64  # of the first tensor, so that vector loads from the mapping do not straddle cache lines
_SAFETENSORS_DTYPE = {torch.bfloat16: "BF16", torch.float32: "F32"}


def convert(path: Path, dtype: str, progress: Progress | None = None) -> Path:
    """The folder (config.json, model.safetensors, tokenizer and generation files) of a .gguf, made if it is not there.

    dtype is "bfloat16" or "float32", rounded to nearest even, or "native": block formats that the native kernels
    multiply stay as they are (uint8, their kinds in the file's metadata), the rest becomes bfloat16. The folder's
    name holds the file's path, size and time, so a changed file is converted again. ModelError: a damaged file, or a
    model Outpace does not run. DownloadError: the cache cannot be written.
    """
    report = progress or silent
    target = _target(path, dtype)
    if target.is_dir():
        return target
    with locked(target, report):
        if not target.is_dir():
            scratch = target.with_name(f".{target.name}.partial")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            try:
                _write_folder(scratch, path, dtype, report)
                scratch.rename(target)
            except BaseException:
                shutil.rmtree(scratch, ignore_errors=True)
                raise
    return target


def _target(path: Path, dtype: str) -> Path:
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}. Check the path and its permissions.") from None
    identity = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}|{FORMAT_VERSION}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return cache_root() / "converted" / f"{path.stem}-{dtype}-{key}"


def _write_folder(folder: Path, path: Path, dtype: str, progress: Progress) -> None:
    from outpace.text.gguf_tokenizer import build_tokenizer_files  # not needed by later starts

    file = read_gguf(path)
    config = hf_config(file, "bfloat16" if dtype == "native" else dtype)
    texts = build_tokenizer_files(file.metadata)
    texts["config.json"] = json.dumps(config, indent=2) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    _write_safetensors(folder / "model.safetensors", file, config, dtype, progress)


def _write_safetensors(path: Path, file: GGUFFile, config: dict[str, Any], dtype: str, progress: Progress) -> None:
    """Header first, then the tensors one piece at a time: peak memory is one piece, not the model."""
    architecture = str(file.metadata["general.architecture"])
    named = _hf_names(file, architecture)
    with path.open("wb") as out:
        _write_header(out, named, dtype)
        for done, (name, tensor) in enumerate(named.items()):
            progress(f"converting {file.path.name}", done, len(named))
            if _stays(tensor, dtype):
                out.write(np.ascontiguousarray(_rows(file, tensor, name, config)).data)
                continue
            for piece in _pieces(file, tensor, name, config):
                out.write(torch.from_numpy(piece).to(_stored_dtype(tensor, dtype)).view(torch.uint8).numpy().data)
        out.flush()
        os.fsync(out.fileno())  # before the folder gets its final name, or a power cut could leave holes in it
    progress(f"converting {file.path.name}", len(named), len(named))


def _stays(tensor: GGUFTensor, dtype: str) -> bool:
    """True for a matrix whose blocks are kept."""
    return dtype == "native" and len(tensor.shape) == 2 and tensor.kind.name in BLOCK_FORMATS


def _stored_dtype(tensor: GGUFTensor, dtype: str) -> torch.dtype:
    """Of a tensor that is decoded. Beside kept blocks, vectors keep their full precision: they cost nothing."""
    if dtype == "native" and len(tensor.shape) == 1:
        return torch.float32
    return torch.float32 if dtype == "float32" else torch.bfloat16


def _hf_names(file: GGUFFile, architecture: str) -> dict[str, GGUFTensor]:
    named: dict[str, GGUFTensor] = {}
    unknown = []
    for name, tensor in file.tensors.items():
        hf_name = hf_name_of_gguf(name, architecture)
        if hf_name is not None:
            named[hf_name] = tensor
        elif name != "rope_freqs.weight":  # that one went into config.json
            unknown.append(name)
    if unknown:
        raise ModelError(
            f"{file.path} ({architecture}) holds {len(unknown)} tensors that Outpace does not know:"
            f" {', '.join(unknown[:5])}{', ...' if len(unknown) > 5 else ''}. Leaving them out would change the output;"
            " use llama.cpp for this file."
        )
    return named


def _write_header(out: BinaryIO, named: dict[str, GGUFTensor], dtype: str) -> None:
    """8 bytes of length, then JSON padded with spaces (https://github.com/huggingface/safetensors#format)."""
    kinds = {name: tensor.kind.name for name, tensor in named.items() if _stays(tensor, dtype)}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", BLOCK_KINDS: json.dumps(kinds)}}
    end = 0
    for name, tensor in named.items():
        shape, code, size = list(tensor.shape), "U8", tensor.nbytes
        if name in kinds:
            shape = [shape[0], tensor.nbytes // shape[0]]
        else:
            stored = _stored_dtype(tensor, dtype)
            code, size = _SAFETENSORS_DTYPE[stored], int(np.prod(tensor.shape)) * stored.itemsize
        start, end = end, end + size
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    out.write(struct.pack("<Q", len(text)) + text)


def _pieces(file: GGUFFile, tensor: GGUFTensor, name: str, config: dict[str, Any]) -> Iterator[NDArray[np.float32]]:
    """Values in Hugging Face's row order and meaning."""
    rows = _rows(file, tensor, name, config)
    # Gemma's norms multiply by 1 + w; GGUF stores the sum, Hugging Face stores w.
    shift = 1.0 if config["model_type"] == "gemma3_text" and name.endswith("norm.weight") else 0.0
    for piece in decode_rows(rows, tensor.kind, max(1, _CHUNK_VALUES // tensor.shape[-1])):
        yield piece - np.float32(shift) if shift else piece


def _rows(file: GGUFFile, tensor: GGUFTensor, name: str, config: dict[str, Any]) -> NDArray[np.uint8]:
    """Raw rows in Hugging Face's order."""
    rows = file.rows(tensor)
    stored_permuted = config["model_type"] in ("llama", "mistral")
    if stored_permuted and ".self_attn.q_proj." in name:
        return _unpermute(rows, tensor, config["num_attention_heads"])
    if stored_permuted and ".self_attn.k_proj." in name:
        return _unpermute(rows, tensor, config["num_key_value_heads"])
    return rows


def _unpermute(rows: NDArray[np.uint8], tensor: GGUFTensor, heads: int) -> NDArray[np.uint8]:
    """llama.cpp rotates neighbouring pairs (2i, 2i+1) of a head, Hugging Face rotates halves (i, i + d/2), so its
    converter interleaves the rows of q and k. Whole rows move, so this works on the quantised bytes."""
    count = tensor.shape[0]
    if count % (2 * heads):
        raise ModelError(
            f"Tensor {tensor.name!r} has {count} rows, which {heads} attention heads cannot share equally."
        )
    order = np.arange(count).reshape(heads, count // heads // 2, 2).swapaxes(1, 2).ravel()
    if len(tensor.shape) == 1:  # a bias is one row of numbers
        item = tensor.nbytes // count
        return rows.reshape(count, item)[order].reshape(1, -1)
    return rows[order]
