"""A Hugging Face folder -> the spec of its decoder and its weights by canonical name, every name and shape checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.config import stored_dtype
from outpace.errors import ConfigError, ModelError
from outpace.kernels.native import Blocks, Weight
from outpace.models.base import LanguageModel
from outpace.models.loading import Placement, make_decoder
from outpace.models.spec import DecoderSpec
from outpace.weights.names import canonical_name, ignored
from outpace.weights.safetensors import block_kinds, read_tensors

# What tensors are converted to; None leaves them as they are stored.
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "native": None}


def load_checkpoint(folder: Path, dtype: str, device: str) -> tuple[DecoderSpec, dict[str, Weight]]:
    """The decoder's spec and tensors, `DecoderSpec.expected_tensors()` exactly.

    dtype "auto" is bfloat16; "native" leaves every tensor as it is stored, GGUF blocks included (`Blocks`).
    On the CPU a tensor that already has the dtype stays mapped from the file: no copy, and no reading until it is used;
    never write to it in place. ModelError: config.json or weights missing, damaged, unsupported, or not the tensors the
    config describes. ConfigError: no such dtype or device.
    """
    target_dtype, target_device = DTYPES[stored_dtype(dtype)], _device(device)
    spec = DecoderSpec.from_hf(read_config(folder))
    expected = spec.expected_tensors()
    weights: dict[str, Weight] = {}
    kinds = block_kinds(folder)
    unexpected: list[str] = []
    for hf_name, tensor in read_tensors(folder):
        if ignored(hf_name, spec.tied):
            continue
        name = canonical_name(hf_name, spec.model_type)
        if name is None or name not in expected or name in weights:
            unexpected.append(hf_name)
            continue
        weight = Blocks(tensor, kinds[hf_name], expected[name][-1]) if hf_name in kinds else tensor
        _check(folder, hf_name, weight, expected[name])
        weights[name] = weight if isinstance(weight, Blocks) else weight.to(target_device, target_dtype)
    _check_complete(folder, [name for name in expected if name not in weights], unexpected)
    return spec, weights


def load_decoder(folder: Path, dtype: str, place: Placement, output_ids: Tensor | None = None) -> LanguageModel:
    """The decoder of a checkpoint folder. Raises what `load_checkpoint` and `make_decoder` raise."""
    spec, weights = load_checkpoint(folder, dtype, place.device)
    return make_decoder(spec, weights, place, output_ids)


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint folder. ModelError: it is missing or not a JSON object."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{folder} has no config.json, so it is not a checkpoint folder. Give a folder in the Hugging Face layout"
            " (config.json, tokenizer.json, *.safetensors) or a .gguf file."
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Download the checkpoint again.") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} does not hold a JSON object. Download the checkpoint again.")
    return config


def _device(device: str) -> torch.device:
    try:
        wanted, own = torch.device(device), torch.accelerator.current_accelerator()
        if wanted.type != "cpu" and (own is None or own.type != wanted.type):
            raise RuntimeError(f"this build of torch has no {wanted.type}")
        return torch.empty(0, device=wanted).device
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"device {device!r} cannot be used here: {reason}. Use 'cpu', or a device torch lists."
        ) from None


def _check(folder: Path, name: str, tensor: Weight, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"{folder}: tensor {name!r} has shape {list(tensor.shape)}, but config.json asks for {list(shape)}. Config"
            " and weights do not belong together; download both again."
        )
    if not isinstance(tensor, Blocks) and tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ModelError(
            f"{folder}: tensor {name!r} is stored as {str(tensor.dtype).removeprefix('torch.')}. Outpace reads float32,"
            " float16 and bfloat16; take the unquantised checkpoint, or run this one with vLLM."
        )


def _check_complete(folder: Path, missing: list[str], unexpected: list[str]) -> None:
    problems = [f"{what} {_first(names)}" for what, names in (("lacks", missing), ("also holds", unexpected)) if names]
    if problems:
        raise ModelError(
            f"The weights in {folder} are not those of the model in its config.json: it {' and '.join(problems)}."
            " Running it would give wrong text; download the checkpoint again, or check that it is a plain causal"
            " language model."
        )


def _first(names: list[str]) -> str:
    return f"{len(names)} tensors ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
