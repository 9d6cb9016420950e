"""Folders of safetensors: mapped and not copied, every name and shape checked, damage and pickles refused."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outpace.errors import ConfigError, ModelError
from outpace.weights import safetensors as safetensors_module
from outpace.weights.load import load_checkpoint
from outpace.weights.names import canonical_name, hf_name_of_gguf, ignored
from outpace.weights.safetensors import read_tensors

Tensors = dict[str, torch.Tensor]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A private copy of the tiny llama: float32, tied."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def change(folder: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / SINGLE).items()}
    edit(tensors)
    save_file(tensors, folder / SINGLE)


def configure(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_names_and_values(folder: Path) -> None:
    spec, weights = load_checkpoint(folder, "float32", "cpu")
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == spec.expected_tensors()
    raw = load_file(folder / SINGLE)
    pairs = {"embed": "model.embed_tokens", "layers.1.o": "model.layers.1.self_attn.o_proj", "final_norm": "model.norm"}
    pairs |= {"layers.0.mlp_norm": "model.layers.0.post_attention_layernorm"}
    for ours, theirs in pairs.items():
        assert torch.equal(weights[ours], raw[f"{theirs}.weight"])


def mapped_from(tensor: torch.Tensor, path: Path) -> bool:
    """Whether the tensor's memory is the file itself, by the system's list of mappings."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= tensor.data_ptr() < last:
            return name == str(path)
    return False


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux to list memory mappings")
def test_used_in_place(folder: Path) -> None:
    _, weights = load_checkpoint(folder, "float32", "cpu")
    assert all(mapped_from(tensor, folder / SINGLE) for tensor in weights.values())
    for dtype in ("bfloat16", "auto"):  # the control: another dtype cannot be the file
        _, copied = load_checkpoint(folder, dtype, "cpu")
        assert {tensor.dtype for tensor in copied.values()} == {torch.bfloat16}
        assert not any(mapped_from(tensor, folder / SINGLE) for tensor in copied.values())
        assert all(torch.equal(copied[name], weights[name].to(torch.bfloat16)) for name in weights)


def resident(path: Path) -> int:
    """Bytes of the file that this process has in memory, over all its mappings."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux to measure memory mappings")
@pytest.mark.parametrize("in_pieces", [True, False])
def test_dropped_tensors_leave_memory(in_pieces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 checkpoint that is read as bfloat16 must not be held as well. The control maps the file as one."""
    megabyte = 1 << 20
    save_file({f"t{i:02}": torch.ones(megabyte // 4) for i in range(16)}, tmp_path / SINGLE)
    monkeypatch.setattr(safetensors_module, "_MAPPED_BYTES", megabyte if in_pieces else 1 << 40)
    most = 0
    for _, tensor in read_tensors(tmp_path):
        assert tensor.sum() == megabyte // 4
        most = max(most, resident(tmp_path / SINGLE))
    assert most < 6 * megabyte if in_pieces else most > 12 * megabyte


FAULTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop("model.norm.weight"), r"lacks 1 tensors \(final_norm\)"),
    "many missing": (
        lambda t: [t.pop(name) for name in list(t) if ".1." in name],
        r"lacks 9 tensors \((layers\.1\.\w+, ){5}\.\.\.\)",
    ),
    "extra layer": (
        lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t["model.layers.1.mlp.up_proj.weight"].clone()}),
        r"also holds 1 tensors \(model\.layers\.2\.mlp\.up_proj\.weight\)",
    ),
    "bias": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
        r"also holds 1 tensors \(.*q_proj\.bias\)",
    ),
    "unknown": (lambda t: t.update({"score.weight": torch.ones(2)}), r"also holds 1 tensors \(score\.weight\)"),
    "both": (
        lambda t: t.update({"model.final_layernorm.weight": t.pop("model.norm.weight")}),
        r"lacks 1 tensors \(final_norm\) and also holds 1 tensors",
    ),
    "twice": (
        lambda t: t.update({"language_model.model.norm.weight": torch.ones(32)}),
        r"also holds 1 tensors",
    ),
    "shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(31)}),
        r"shape \[31\], but config.json asks for \[32\]",
    ),
    "transposed": (
        lambda t: t.update({k: v.T.contiguous() for k, v in t.items() if "gate" in k}),
        r"shape \[32, 64\].*asks for \[64, 32\]",
    ),
    "integers": (
        lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
        "stored as int8.*unquantised",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_tensors(fault: str, folder: Path) -> None:
    load_checkpoint(folder, "auto", "cpu")  # the control
    edit, message = FAULTS[fault]
    change(folder, edit)
    with pytest.raises(ModelError, match=message) as caught:
        load_checkpoint(folder, "auto", "cpu")
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_ignored_tensors(folder: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.ones(3, 32)}
    change(folder, lambda tensors: tensors.update(extra))
    _, weights = load_checkpoint(folder, "float32", "cpu")
    assert "lm_head" not in weights
    configure(folder, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"'lm_head\.weight' has shape \[3, 32\]"):  # not tied: now it counts
        load_checkpoint(folder, "float32", "cpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "has no config.json"), ("{", "cannot be read"), ("[]", "JSON object"), (b"\xff", "cannot be read")],
)
def test_bad_config(text: str | bytes | None, message: str, folder: Path) -> None:
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelError, match=message):
        load_checkpoint(folder, "auto", "cpu")


def test_bad_dtype_and_device(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype must be one of auto, bfloat16, float32, native, got 'int4'"):
        load_checkpoint(folder, "int4", "cpu")
    for device in ("gpu", "cuda:99"):
        with pytest.raises(ConfigError, match=f"device '{device}' cannot be used here") as caught:
            load_checkpoint(folder, "auto", device)
        assert "\n" not in str(caught.value)


def shard(folder: Path) -> dict[str, str]:
    """Split the checkpoint into two files with an index; the map of it is returned."""
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    weight_map = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: tensors[n].clone() for n in names if weight_map[n] == file}, folder / file)
    (folder / SINGLE).unlink()
    return index(folder, weight_map)


def index(folder: Path, weight_map: object) -> dict[str, str]:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map  # type: ignore[return-value]


def test_shards(folder: Path) -> None:
    _, single = load_checkpoint(folder, "float32", "cpu")
    weight_map = shard(folder)
    _, sharded = load_checkpoint(folder, "float32", "cpu")
    assert single.keys() == sharded.keys() and all(torch.equal(single[n], sharded[n]) for n in single)
    first, second = sorted(set(weight_map.values()))

    index(folder, weight_map | {"model.norm.bias": first})
    with pytest.raises(ModelError, match=r"lists 1 tensors that no shard holds: model\.norm\.bias"):
        list(read_tensors(folder))
    for bad in ({}, [], weight_map | {"x": "../other.safetensors"}, weight_map | {"x": ".."}, weight_map | {"x": 3}):
        index(folder, bad)
        with pytest.raises(ModelError, match=r"outside its own folder|not a readable weight index"):
            list(read_tensors(folder))
    index(folder, weight_map)
    save_file(load_file(folder / first), folder / "other.safetensors")
    index(folder, weight_map | {"x": "other.safetensors"})
    with pytest.raises(ModelError, match="more than one shard"):
        list(read_tensors(folder))
    index(folder, weight_map)
    (folder / second).unlink()
    with pytest.raises(ModelError, match=rf"lacks 1 of the 2 files in {INDEX}: {second}\. .*incomplete") as caught:
        load_checkpoint(folder, "auto", "cpu")
    assert caught.value.exit_code == 2
    (folder / first).unlink()
    with pytest.raises(ModelError, match=f"lacks 2 of the 2 files in {INDEX}: {first}, {second}"):
        load_checkpoint(folder, "auto", "cpu")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "last.ckpt"])
def test_pickles_are_never_opened(name: str, folder: Path) -> None:
    marker = folder / "opened"

    class Trap:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
            return open, (str(marker), "w")

    torch.save(Trap(), folder / name)
    list(read_tensors(folder))  # beside safetensors they do no harm
    (folder / SINGLE).unlink()
    with pytest.raises(ModelError, match=rf"only as pickles \({re.escape(name)}\)") as caught:
        load_checkpoint(folder, "auto", "cpu")
    assert not marker.exists() and caught.value.exit_code == 2
    (folder / name).rename(folder / SINGLE)
    with pytest.raises(ModelError, match="not a usable safetensors file"):
        load_checkpoint(folder, "auto", "cpu")
    assert not marker.exists()
    (folder / SINGLE).unlink()
    with pytest.raises(ModelError, match=r"holds neither .* pickles"):
        load_checkpoint(folder, "auto", "cpu")


def rewrite(folder: Path, header: object, length: int | None = None) -> None:
    """Replace the header, keep the data."""
    data = (folder / SINGLE).read_bytes()
    (old,) = struct.unpack("<Q", data[:8])
    text = json.dumps(header).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data[8 + old :])


def header(folder: Path) -> dict[str, dict[str, object]]:
    data = (folder / SINGLE).read_bytes()
    parsed: dict[str, dict[str, object]] = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    parsed.pop("__metadata__", None)
    return parsed


LIES: dict[str, tuple[dict[str, object], int | None]] = {
    "length": ({}, 2**40),
    "short length": ({}, 3),
    "beyond the file": ({"data_offsets": [0, 2**50]}, None),
    "backwards": ({"data_offsets": [128, 0]}, None),
    "negative": ({"data_offsets": [-128, 0]}, None),
    "shape": ({"shape": [64]}, None),
    "huge shape": ({"shape": [2**62, 2**62]}, None),
    "dtype": ({"dtype": "F16"}, None),
    "unknown dtype": ({"dtype": "X7"}, None),
    "no offsets": ({"data_offsets": None}, None),
}


def test_tensors_must_tile_the_file(folder: Path) -> None:
    """Offsets that are in range and of the right length, but overlap, leave a hole, or are two tensors' own."""
    honest = header(folder)
    norms = [name for name in honest if name.endswith("norm.weight")]
    one, other = (honest[name]["data_offsets"] for name in norms[:2])
    lies = {"overlap": [one[0] + 4, one[1] + 4], "shared": other, "elsewhere": [0, one[1] - one[0]]}
    for offsets in lies.values():
        rewrite(folder, honest | {norms[0]: honest[norms[0]] | {"data_offsets": offsets}})
        with pytest.raises(ModelError, match=r"not a usable safetensors file: .*offset"):
            load_checkpoint(folder, "auto", "cpu")
    without = {name: entry for name, entry in honest.items() if name != norms[0]}
    rewrite(folder, without)
    with pytest.raises(ModelError, match="not a usable safetensors file"):  # a hole where it was
        load_checkpoint(folder, "auto", "cpu")
    rewrite(folder, honest)
    load_checkpoint(folder, "auto", "cpu")  # the control


@pytest.mark.parametrize("text", [b"[]", b"{", b"null", b"\xff\xfe", b'{"a": 1}', b""])
def test_a_header_that_is_no_table_of_tensors(text: bytes, folder: Path) -> None:
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ModelError, match="not a usable safetensors file") as caught:
        load_checkpoint(folder, "auto", "cpu")
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


@pytest.mark.parametrize("lie", LIES)
def test_lying_safetensors_header(lie: str, folder: Path) -> None:
    honest = header(folder)
    rewrite(folder, honest)
    load_checkpoint(folder, "auto", "cpu")  # the control: an honest rewrite is read
    fields, length = LIES[lie]
    rewrite(folder, honest | {"model.norm.weight": honest["model.norm.weight"] | fields}, length)
    with pytest.raises(ModelError, match=r"model\.safetensors is not a usable safetensors file"):
        load_checkpoint(folder, "auto", "cpu")


def test_truncated_safetensors(folder: Path) -> None:
    data = (folder / SINGLE).read_bytes()
    for length in (0, 4, 8, 100, len(data) // 2, len(data) - 1):
        (folder / SINGLE).write_bytes(data[:length])
        with pytest.raises(ModelError, match="not a usable safetensors file"):
            load_checkpoint(folder, "auto", "cpu")
    (folder / SINGLE).write_bytes(data + b"\0")
    with pytest.raises(ModelError, match="not a usable safetensors file"):
        load_checkpoint(folder, "auto", "cpu")


def test_canonical_names() -> None:
    table = {
        ("model.layers.12.post_attention_layernorm.weight", "qwen3"): "layers.12.mlp_norm",
        ("model.layers.12.post_attention_layernorm.weight", "gemma3_text"): "layers.12.post_attn_norm",
        ("model.layers.0.pre_feedforward_layernorm.weight", "gemma3_text"): "layers.0.mlp_norm",
        ("model.layers.0.post_feedforward_layernorm.weight", "gemma3_text"): "layers.0.post_mlp_norm",
        ("model.layers.0.pre_feedforward_layernorm.weight", "llama"): None,
        ("model.layers.3.self_attn.k_proj.bias", "qwen2"): "layers.3.k_bias",
        ("model.layers.3.self_attn.q_norm.weight", "qwen3"): "layers.3.q_norm",
        ("model.language_model.embed_tokens.weight", "gemma3_text"): "embed",
        ("language_model.model.layers.1.mlp.down_proj.weight", "gemma3_text"): "layers.1.down",
        ("language_model.lm_head.weight", "gemma3_text"): "lm_head",
        ("lm_head.weight", "llama"): "lm_head",
        ("model.layers.0.self_attn.q_proj.weight_scale", "llama"): None,
        ("model.layers.0.mlp.experts.0.up_proj.weight", "llama"): None,
        ("model.layers.x.mlp.up_proj.weight", "llama"): None,
    }
    assert {key: canonical_name(*key) for key in table} == table
    assert ignored("vision_tower.blocks.0.weight", False) and not ignored("lm_head.weight", False)
    assert hf_name_of_gguf("blk.0.ffn_gate_exps.weight", "llama") is None
    assert hf_name_of_gguf("blk.0.attn_q.scale", "llama") is None
