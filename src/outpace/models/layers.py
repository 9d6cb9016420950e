"""The parts of a decoder: rotary tables, which keys a row sees, and the prepared weights of one layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.kernels.base import Kernels, Matrix
from outpace.models.base import SeqRows
from outpace.models.spec import DecoderSpec, RopeSpec

FIRST_POSITIONS = 1024


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each rotated pair, [head_dim / 2] float32 (Su 2021; scaling as in `RopeSpec.kind`)."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, plain)
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, plain, head_dim)
    return plain


def _llama3_frequencies(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between blended."""
    turns = rope.original_context * plain / (2 * math.pi)  # of each pair over the original context
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn_frequencies(rope: RopeSpec, plain: Tensor, head_dim: int) -> Tensor:
    """YaRN (Peng 2023, section 3.2): a linear ramp over pair indices between beta_fast and beta_slow turns."""

    def pair_with(turns: float) -> float:
        ratio = rope.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    stretched = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return plain / rope.factor * stretched + plain * (1 - stretched)


def rotations(rope: RopeSpec, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every pair at positions 0..positions-1: [positions, head_dim / 2] float32 each."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_dim)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


class RopeTable:
    """Cosines and sines by position, computed in float32, kept in the model's dtype, grown when a position asks."""

    def __init__(self, rope: RopeSpec, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rope, self._head_dim = rope, head_dim
        self._dtype, self._device = dtype, device
        self._table = self._build(FIRST_POSITIONS)

    def _build(self, positions: int) -> Tensor:
        cos, sin = rotations(self._rope, self._head_dim, positions)
        # The first half of a head rotates against the second: its sine carries the sign.
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
        return table.unsqueeze(2).to(self._dtype).to(self._device)

    def rows(self, positions: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """positions [T] int64, the largest of them -> cos, sin [T, 1, head_dim] each."""
        if last >= len(self._table):
            self._table = self._build(max(last + 1, 2 * len(self._table)))
        both = self._table[positions]
        return both[:, 0], both[:, 1]


@dataclass(frozen=True)
class Span:
    """The key rows first..stop-1 that a sequence's new rows look at; mask None: all of them, for every row."""

    first: int
    stop: int
    mask: Tensor | None


def visible_rows(rows: SeqRows, window: int | None, device: torch.device) -> tuple[int, Tensor | None]:
    """The first key row that any of the rows sees, and [t, keys] bool, None when every row sees every key.

    A row sees everything before kv_first, its ancestors in the batch, and itself, at most `window` positions back.
    """
    t = len(rows.tokens)
    first = 0 if window is None else max(0, rows.kv_first - window + 1)
    if t == 1:
        return first, None
    past = torch.ones(t, rows.kv_first - first, dtype=torch.bool, device=device)
    visible = torch.cat((past, ancestors(rows, device)), dim=1)
    if window is not None:
        position = torch.tensor(rows.depths(), device=device) + rows.kv_first
        keys = torch.cat((torch.arange(first, rows.kv_first, device=device), position))
        visible &= position[:, None] - keys < window
    return first, visible


def ancestors(rows: SeqRows, device: torch.device) -> Tensor:
    """[t, t] bool: row i sees row j of its own sequence in this pass."""
    t = len(rows.tokens)
    if rows.parents is None:
        return torch.ones(t, t, dtype=torch.bool, device=device).tril()
    sees = torch.eye(t, dtype=torch.bool)
    for i, parent in enumerate(rows.parents):
        if parent >= 0:
            sees[i] |= sees[parent]
    return sees.to(device)


@dataclass(frozen=True)
class LayerWeights:
    """One layer, prepared. `qk_norm` [heads + kv_heads, head_dim] holds the query's and the key's norm per head."""

    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    attn_norm: Tensor
    mlp_norm: Tensor
    qk_norm: Tensor | None
    post_attn_norm: Tensor | None
    post_mlp_norm: Tensor | None

    def nbytes(self) -> int:
        """Bytes of the weights as prepared."""
        norms = (self.attn_norm, self.mlp_norm, self.qk_norm, self.post_attn_norm, self.post_mlp_norm)
        matrices = (self.qkv, self.o, self.gate_up, self.down)
        return sum(m.nbytes for m in matrices) + sum(n.nbytes for n in norms if n is not None)


def norm_weight(spec: DecoderSpec, weight: Tensor) -> Tensor:
    """A norm's factor; with an offset in float32, because transformers multiplies before it rounds there."""
    return weight.float() + spec.norm_offset if spec.norm_offset else weight


def prepare_layer(spec: DecoderSpec, weights: Mapping[str, Tensor], kernels: Kernels) -> LayerWeights:
    """weights: the tensors of one layer by canonical name without the `layers.{i}.` prefix."""

    def norm(name: str) -> Tensor:
        return norm_weight(spec, weights[name])

    def biases(*names: str) -> Sequence[Tensor]:
        return [weights[f"{name}_bias"] for name in names]

    qk_norm = None
    if spec.qk_norm:
        per_head = norm("q_norm").expand(spec.heads, -1), norm("k_norm").expand(spec.kv_heads, -1)
        qk_norm = torch.cat(per_head)
    return LayerWeights(
        qkv=kernels.prepare([weights[n] for n in "qkv"], biases(*"qkv") if spec.qkv_bias else ()),
        o=kernels.prepare([weights["o"]], biases("o") if spec.o_bias else ()),
        gate_up=kernels.prepare([weights["gate"], weights["up"]]),
        down=kernels.prepare([weights["down"]]),
        attn_norm=norm("attn_norm"),
        mlp_norm=norm("mlp_norm"),
        qk_norm=qk_norm,
        post_attn_norm=norm("post_attn_norm") if spec.sandwich else None,
        post_mlp_norm=norm("post_mlp_norm") if spec.sandwich else None,
    )
