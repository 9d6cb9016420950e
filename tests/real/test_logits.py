"""Real checkpoints against transformers: same folder, same text, float32 logits within 1e-4 relative."""

from __future__ import annotations

import gc
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
LENGTH, KEPT = 640, 48  # longer than Gemma's window of 512; the last rows are compared
CHUNKS = [400, 192, 32, 5, *[1] * 11]  # the kept rows come from a chunk, a narrow pass and single rows
MODELS = [
    "smollm2-135m-instruct",
    "qwen2.5-coder-0.5b-instruct",
    "gemma-3-270m",
    # 6 GB in float32, twice in turn
    pytest.param("qwen2.5-coder-1.5b-instruct", marks=pytest.mark.slow),
]


def real_text(folder: Path) -> tuple[int, ...]:
    source = Path(outpace.__file__).parent
    text = "".join((source / name).read_text() for name in ("errors.py", "types.py", "config.py"))
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert len(tokens) >= LENGTH
    return tuple(tokens[:LENGTH])


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
    for size in CHUNKS:
        assert kv.reserve(0, size)
        wanted = [i for i in range(size) if done + i >= LENGTH - KEPT]
        batch = ForwardBatch([SeqRows(0, tokens[done : done + size], done)], wanted)
        logits.append(decoder.forward(batch, kv).logits)
        kv.commit(0, range(size))
        done += size
    assert done == LENGTH
    return torch.cat(logits)


@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_equal_transformers(name: str) -> None:
    folder = resolve(name, "bfloat16")
    tokens = real_text(folder)
    expected = theirs(folder, tokens, torch.float32)
    got = ours(folder, tokens, "float32")
    assert got.shape == expected.shape
    assert float((got - expected).abs().max() / expected.abs().max()) < TOLERANCE
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    # The comparison can fail: one wrong token a window away changes the logits by far more.
    wrong = (*tokens[:-60], (tokens[-60] + 1) % 1000, *tokens[-59:])
    other = ours(folder, wrong, "float32")
    assert float((other - expected).abs().max() / expected.abs().max()) > 10 * TOLERANCE


def test_bfloat16_logits_are_as_close_as_transformers() -> None:
    folder = resolve("smollm2-135m-instruct", "bfloat16")
    tokens = real_text(folder)
    exact, rounded = theirs(folder, tokens, torch.float32), theirs(folder, tokens, torch.bfloat16)
    got = ours(folder, tokens, "bfloat16")
    noise = (rounded - exact).abs().mean()
    assert (got - exact).abs().mean() < 1.2 * noise
    assert (got - rounded).abs().mean() < 1.5 * noise
