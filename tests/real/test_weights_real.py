"""The catalogue's real files: converted, compared with transformers' own reading of the same GGUF, and loaded again.

What is not in the cache is fetched through the catalogue.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from outpace.weights import catalog
from outpace.weights.gguf import decode_rows, read_gguf
from outpace.weights.load import load_checkpoint
from outpace.weights.resolve import resolve
from outpace.weights.safetensors import read_tensors

pytestmark = pytest.mark.real
NAMES = [entry.name for entry in catalog.entries()]
SMALL = ["smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct"]
LARGEST = "qwen2.5-coder-1.5b-instruct"


@pytest.mark.parametrize("name", NAMES)
def test_loads_whole(name: str) -> None:
    spec, weights = load_checkpoint(resolve(name, "bfloat16"), "auto", "cpu")
    assert {key: tuple(tensor.shape) for key, tensor in weights.items()} == spec.expected_tensors()
    assert all(torch.isfinite(tensor.flatten()[:4096].float()).all() for tensor in weights.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SMALL)
def test_same_weights_as_transformers_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An independent reader of names, permutation and norms. float32, so exact up to the rounding of Gemma's -1."""
    folder = resolve(name, "float32")
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config)
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))  # asked for each tensor
    wanted = load_gguf_checkpoint(catalog.find(name).path, return_tensors=True, model_to_load=skeleton)["tensors"]
    found = dict(read_tensors(folder))
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not torch.allclose(found[key], wanted[key], rtol=0, atol=1e-6)] == []
    query = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.allclose(found[query].flip(0), wanted[query], rtol=0, atol=1e-6)  # the comparison can fail


@pytest.mark.parametrize("name", SMALL[:2])
def test_bfloat16_is_float32_rounded(name: str) -> None:
    _, exact = load_checkpoint(resolve(name, "float32"), "float32", "cpu")
    _, rounded = load_checkpoint(resolve(name, "bfloat16"), "bfloat16", "cpu")
    assert all(torch.equal(rounded[key], exact[key].to(torch.bfloat16)) for key in exact)


def test_an_embedding_row_against_the_file() -> None:
    """One row followed by hand from the blocks of the file to the tensor the decoder gets."""
    folder = resolve(SMALL[0], "float32")
    file = read_gguf(catalog.find(SMALL[0]).path)
    tensor = file.tensors["token_embd.weight"]
    row = next(decode_rows(file.rows(tensor)[1234:1235], tensor.kind, 1))[0]
    assert torch.equal(load_checkpoint(folder, "float32", "cpu")[1]["embed"][1234], torch.from_numpy(row))


_START = """
import json, re, sys
from pathlib import Path
import torch
from outpace.kernels import select
from outpace.models.base import ForwardBatch, SeqRows
from outpace.models.decoder import Decoder
from outpace.weights.load import load_checkpoint
torch.set_num_threads(2)
spec, weights = load_checkpoint(Path(sys.argv[1]), "bfloat16", "cpu")
if sys.argv[2] == "twice":
    copies = {name: tensor.clone() for name, tensor in weights.items()}
decoder = Decoder(spec, weights, select("cpu"))
kv = decoder.new_store()
for first, count in [(0, 200), *((200 + i, 1) for i in range(32))]:
    assert kv.reserve(0, count)
    decoder.forward(ForwardBatch([SeqRows(0, tuple(range(first, first + count)), first)], [count - 1]), kv)
    kv.commit(0, range(count))
peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(peak / decoder.weight_bytes())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux to tell the peak of one process")
@pytest.mark.parametrize(("name", "held"), [(LARGEST, "once"), ("qwen2.5-coder-0.5b-instruct", "twice")])
def test_generation_holds_the_weights_once(name: str, held: str) -> None:
    """Peak of a whole process, mapped pages, Python and torch included. The control holds a copy, and must show."""
    folder = resolve(name, "bfloat16")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
    command = [sys.executable, "-c", _START, str(folder), held]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    share = float(result.stdout)
    assert 0.7 < share < 1.3 if held == "once" else share > 1.5
