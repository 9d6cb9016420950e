"""Real checkpoints against transformers: same folder, same text, float32 logits within 1e-4 relative.

What is not in the cache is fetched through the catalogue.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

import outpace
from outpace.kernels import select
from outpace.models.base import ForwardBatch, SeqRows
from outpace.models.decoder import Decoder
from outpace.weights.load import load_checkpoint
from outpace.weights.resolve import resolve

pytestmark = pytest.mark.real

TOLERANCE = 1e-4
KEPT = 48  # the last rows are compared
TAIL = [192, 32, 5, *[1] * 11]  # after one wide chunk: the kept rows come from a chunk, a narrow pass and single rows
LENGTHS = {  # Gemma's text is longer than its window of 512
    "smollm2-135m-instruct": 320,
    "qwen2.5-coder-0.5b-instruct": 320,
    "gemma-3-270m": 640,
    "qwen2.5-coder-1.5b-instruct": 256,
}
LARGE = "qwen2.5-coder-1.5b-instruct"
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
too_large = pytest.mark.skipif(
    MEMORY < 12e9, reason="needs 12 GB of memory: 7 GB in float32, and the file it comes from"
)
MODELS = [pytest.param(name, marks=[too_large, pytest.mark.slow] if name == LARGE else []) for name in LENGTHS]


def real_text(folder: Path, length: int) -> tuple[int, ...]:
    source = Path(outpace.__file__).parent
    text = "".join((source / name).read_text() for name in ("errors.py", "types.py", "config.py"))
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert len(tokens) >= length
    return tuple(tokens[:length])


@torch.no_grad()
def theirs(folder: Path, tokens: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    logits = model(torch.tensor([tokens]), logits_to_keep=KEPT).logits[0].float()
    del model
    gc.collect()
    return logits


def ours(folder: Path, tokens: tuple[int, ...], dtype: str) -> Tensor:
    decoder = Decoder(*load_checkpoint(folder, dtype, "cpu"), select("cpu"))
    kv, done, logits = decoder.new_store(), 0, []
    for size in [len(tokens) - sum(TAIL), *TAIL]:
        assert kv.reserve(0, size)
        wanted = [i for i in range(size) if done + i >= len(tokens) - KEPT]
        batch = ForwardBatch([SeqRows(0, tokens[done : done + size], done)], wanted)
        logits.append(decoder.forward(batch, kv).logits)
        kv.commit(0, range(size))
        done += size
    assert done == len(tokens)
    return torch.cat(logits)


@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_equal_transformers(name: str) -> None:
    folder = resolve(name, "bfloat16")
    tokens = real_text(folder, LENGTHS[name])
    expected = theirs(folder, tokens, torch.float32)
    got = ours(folder, tokens, "float32")
    assert got.shape == expected.shape
    assert float((got - expected).abs().max() / expected.abs().max()) < TOLERANCE
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    # The comparison can fail: one wrong token far from the compared rows changes the logits by far more.
    wrong = (*tokens[:-60], (tokens[-60] + 1) % 1000, *tokens[-59:])
    other = ours(folder, wrong, "float32")
    assert float((other - expected).abs().max() / expected.abs().max()) > 10 * TOLERANCE


def test_bfloat16_logits_are_as_close_as_transformers() -> None:
    folder = resolve("smollm2-135m-instruct", "bfloat16")
    tokens = real_text(folder, 320)
    exact, rounded = theirs(folder, tokens, torch.float32), theirs(folder, tokens, torch.bfloat16)
    got = ours(folder, tokens, "bfloat16")
    noise = (rounded - exact).abs().mean()
    assert (got - exact).abs().mean() < 1.2 * noise
    assert (got - rounded).abs().mean() < 1.5 * noise
