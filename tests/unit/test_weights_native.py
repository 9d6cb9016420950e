"""dtype "native": the blocks of a GGUF file run as they are, and say what their float32 values say."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from outpace.errors import ConfigError, Unsupported
from outpace.kernels import native
from outpace.models.base import ForwardBatch, LanguageModel, SeqRows
from outpace.models.loading import Placement, make_decoder
from outpace.weights.convert import convert
from outpace.weights.load import load_checkpoint
from outpace.weights.resolve import resolve
from unit.test_weights_convert import FAMILIES, export, original, workplace

__all__ = ["workplace"]  # the fixture
KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0")
TOKENS = tuple(range(3, 60))


def logits(model: LanguageModel) -> torch.Tensor:
    kv = model.new_store()
    assert kv.reserve(0, len(TOKENS))
    return model.forward(ForwardBatch([SeqRows(0, TOKENS, 0)], range(len(TOKENS))), kv).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_say_what_their_values_say(family: str, tmp_path: Path) -> None:
    """Query and key rows are put in order as blocks. What differs is the precision of stored keys."""
    path = export(original(family), tmp_path / "m.gguf", gguf.GGMLQuantizationType[KINDS[len(family) % 4]])
    found = {}
    for dtype in ("float32", "native"):
        spec, weights = load_checkpoint(convert(path, dtype), dtype, "cpu")
        found[dtype] = logits(make_decoder(spec, weights, Placement()))
    error = (found["native"] - found["float32"]).abs().max() / found["float32"].abs().max()
    assert 0 < error < 0.03


@pytest.mark.parametrize("kind", KINDS)
def test_the_blocks_are_the_files_own(kind: str, tmp_path: Path) -> None:
    folder = convert(export(original("qwen2"), tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind]), "native")
    stored = load_file(folder / "model.safetensors")
    _, weights = load_checkpoint(folder, "native", "cpu")
    blocks = {name: w for name, w in weights.items() if isinstance(w, native.Blocks)}
    assert len(blocks) == 2 * 7 + 2 and {w.kind for w in blocks.values()} == {kind}
    assert {w.dtype for w in weights.values() if isinstance(w, torch.Tensor)} == {torch.float32}
    assert torch.equal(blocks["layers.1.down"].data, stored["model.layers.1.mlp.down_proj.weight"])
    assert blocks["layers.1.down"].shape == (64, 128)
    assert sum(w.nbytes for w in blocks.values()) < 0.4 * sum(w.shape[0] * w.shape[1] * 4 for w in blocks.values())


def test_stock_torch_cannot_run_blocks(tmp_path: Path) -> None:
    path = export(original("qwen2"), tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    spec, weights = load_checkpoint(convert(path, "native"), "native", "cpu")
    with pytest.raises(Unsupported, match=r"native CPU kernels only.*--dtype bfloat16"):
        make_decoder(spec, weights, Placement(kernels="torch"))


def test_a_folder_has_no_blocks_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="own blocks"):
        resolve(str(tmp_path), "native")
