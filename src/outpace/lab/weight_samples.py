"""Random matrices in every weight format that the native kernels know."""

from __future__ import annotations

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from outpace.kernels import native

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in native.FORMATS}
# Where a block holds its float16 scales. Any other bytes are valid blocks; these must be finite.
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_SCALE = 0.01


def weight_formats() -> list[str]:
    """Their names, as the kernels tell them: a new format is measured without a change here."""
    return [*DTYPES, *sorted(native.BLOCK_FORMATS, key=lambda name: (name.endswith("_K"), name))]


def dense(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Normal noise [outputs, inputs]."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def make_weight(name: str, shape: tuple[int, int]) -> native.Weight:
    """Noise [outputs, inputs] in this format; inputs are a multiple of 256. KeyError for a block format whose scales
    nobody told this file about."""
    if name in DTYPES:
        return dense(shape, DTYPES[name])
    return native.Blocks(torch.from_numpy(_blocks(name, shape)), name, shape[1])


def copies(weight: native.Weight, total: int) -> list[native.Weight]:
    """The weight and as many copies as make `total` bytes together, at least two in all."""
    more = max(1, -(-total // weight.nbytes) - 1)
    return [weight, *(_clone(weight) for _ in range(more))]


def _blocks(name: str, shape: tuple[int, int]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    columns, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    data = np.random.default_rng(0).integers(0, 256, (shape[0], shape[1] // columns, size), dtype=np.uint8)
    for offset in SCALES[name]:
        data[:, :, offset : offset + 2] = np.frombuffer(np.float16(_SCALE).tobytes(), np.uint8)
    return data.reshape(shape[0], -1)


def _clone(weight: native.Weight) -> native.Weight:
    if isinstance(weight, native.Blocks):
        return native.Blocks(weight.data.clone(), weight.kind, weight.cols)
    return weight.clone()
