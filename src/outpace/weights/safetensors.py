"""A Hugging Face folder -> (name, tensor) pairs that are mapped from disk, not copied.

The safetensors package checks each header (lengths, offsets, dtype times shape) against the file's size before it hands
out a tensor; here its errors become ModelError, and pickles are never opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from outpace.errors import ModelError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# In the metadata of a converted model.safetensors: JSON, tensor name -> ggml kind of the blocks in it.
BLOCK_KINDS = "outpace.block_kinds"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# One mapping per so many bytes: a caller who converts tensors and drops the originals must not hold the whole file.
_MAPPED_BYTES = 1 << 28


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint, by its name in the file. ModelError: none there, only pickles, a damaged or lying
    header, a shard or tensor that the index promises and nobody has, a tensor that two shards have."""
    files, promised = _files(folder)
    seen: set[str] = set()
    for path in files:
        for name, tensor in _read_file(path):
            if name in seen:
                raise ModelError(f"{folder}: tensor {name!r} is in more than one shard. Download the checkpoint again.")
            seen.add(name)
            yield name, tensor
    if lost := sorted(promised - seen):
        raise ModelError(
            f"{folder / _INDEX} lists {len(lost)} tensors that no shard holds: {', '.join(lost[:5])}"
            f"{', ...' if len(lost) > 5 else ''}. The download is incomplete; fetch it again."
        )


def block_kinds(folder: Path) -> dict[str, str]:
    """Tensor name -> ggml kind, for the tensors that are kept as GGUF blocks; empty for any other checkpoint."""
    if not (folder / _SINGLE).is_file():
        return {}
    try:
        with safe_open(folder / _SINGLE, framework="pt") as file:
            return dict(json.loads((file.metadata() or {}).get(BLOCK_KINDS, "{}")))
    except (SafetensorError, OSError, ValueError):
        return {}  # a file that is damaged says so when its tensors are read


def _files(folder: Path) -> tuple[list[Path], set[str]]:
    """The safetensors files, and the tensor names that the index promises (none without an index)."""
    if (folder / _INDEX).is_file():
        weight_map = _weight_map(folder / _INDEX)
        shards = sorted(set(weight_map.values()))
        if absent := [name for name in shards if not (folder / name).is_file()]:
            raise ModelError(
                f"{folder} lacks {len(absent)} of the {len(shards)} files in {_INDEX}: {', '.join(absent[:5])}"
                f"{', ...' if len(absent) > 5 else ''}. The download is incomplete; fetch it again."
            )
        return [folder / name for name in shards], set(weight_map)
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE], set()
    pickles = sorted(path.name for path in folder.glob("*") if path.suffix in _PICKLES)
    if pickles:
        raise ModelError(
            f"{folder} holds its weights only as pickles ({', '.join(pickles[:3])}), which can run code when opened, so"
            " Outpace never opens them. Take a revision with .safetensors files, or convert it on a machine you trust"
            " with transformers' save_pretrained."
        )
    raise ModelError(
        f"{folder} holds neither {_SINGLE} nor {_INDEX}. Give the folder of a complete checkpoint; a model that its"
        " authors publish only as pickles (.bin, .pt) must be converted to safetensors first."
    )


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = dict(weight_map)
        # A file name with a folder in it could point anywhere on the disk.
        sound = bool(names) and all(isinstance(n, str) and Path(n).name == n != ".." for n in names.values())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is not a readable weight index ({error!r}). Download the checkpoint again.") from None
    if not sound:
        raise ModelError(f"{path} names files outside its own folder, or none. Download the checkpoint again.")
    return names


def _read_file(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
        while names:
            with safe_open(path, framework="pt") as file:
                mapped = 0
                while names and mapped < _MAPPED_BYTES:
                    tensor = file.get_tensor(names[0])
                    mapped += tensor.nbytes
                    yield names.pop(0), tensor
                    del tensor
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is not a usable safetensors file: {error}. It is damaged or was not downloaded completely;"
            " fetch it again."
        ) from None
