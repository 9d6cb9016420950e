"""Spec and weights -> a decoder on the best kernels for its device."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from outpace.errors import Unsupported
from outpace.kernels import native
from outpace.kernels.registry import select
from outpace.models.base import LanguageModel, OutputIds
from outpace.models.decoder import Decoder
from outpace.models.native_decoder import NativeDecoder
from outpace.models.spec import DecoderSpec


@dataclass(frozen=True)
class Placement:
    """Where and how a model runs. threads None: one per core. kernels "auto": the native ones on a CPU where they are
    built, else torch. quantization "none", "int8" or "int4": round the matrices when loading (native kernels only)."""

    device: str = "cpu"
    threads: int | None = None
    kernels: str = "auto"
    quantization: str = "none"


def make_decoder(
    spec: DecoderSpec, weights: dict[str, native.Weight], place: Placement, output_ids: Tensor | None = None
) -> LanguageModel:
    """The weights are taken over. output_ids [N] int64, ascending: the output projection is cut down to these tokens.
    Unsupported if native kernels or a quantization were asked for and cannot be had."""
    outputs = None if output_ids is None else OutputIds(output_ids, spec.vocab_size)
    if outputs is not None:
        weights["lm_head"] = _rows(weights["embed" if spec.tied else "lm_head"], outputs.ids)
        spec = replace(spec, tied=False)
    device, kernels = place.device, place.kernels
    quantise = None if place.quantization == "none" else place.quantization
    on_cpu = torch.device(device).type == "cpu"
    if kernels == "native" and not on_cpu:
        raise Unsupported(f"The native kernels run on the CPU, not on {device!r}. Use --kernels torch or auto.")
    if kernels == "native" and not native.available():
        raise Unsupported(native.missing())
    if kernels != "torch" and on_cpu and native.available():
        pool = native.open_native(place.threads or physical_cores())
        return NativeDecoder(spec, weights, pool, quantise, outputs)
    if quantise:
        raise Unsupported(
            f"{place.quantization} weights need the native CPU kernels, which are not in use here. Leave"
            " --draft-quantization out."
        )
    tensors = {name: weight for name, weight in weights.items() if not isinstance(weight, native.Blocks)}
    if len(tensors) < len(weights):
        raise Unsupported(
            "The blocks of a .gguf file run on the native CPU kernels only, which are not in use here. Use --dtype"
            " bfloat16, which widens them."
        )
    return Decoder(spec, tensors, select(torch.device(device)), outputs)


def _rows(weight: native.Weight, ids: Tensor) -> native.Weight:
    if isinstance(weight, native.Blocks):
        return native.Blocks(weight.data[ids], weight.kind, weight.cols)
    return weight[ids.to(weight.device)]


def physical_cores() -> int:
    """Cores this process may use; two hardware threads of one core count once, for they share its arithmetic."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # macOS
        return os.cpu_count() or 1
    siblings = set()
    for cpu in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(path.read_text() if path.is_file() else str(cpu))
    return len(siblings)
