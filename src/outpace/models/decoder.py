"""The one decoder: rows of many sequences in, logits out, keys and values in a KVStore. A family is a DecoderSpec."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.cache.base import KVStore
from outpace.cache.slots import SlotStore
from outpace.kernels.base import Kernels
from outpace.models.base import ForwardBatch, ForwardOutput, OutputIds, SeqRows
from outpace.models.layers import LayerWeights, RopeTable, Span, norm_weight, prepare_layer, visible_rows
from outpace.models.spec import DecoderSpec, RopeSpec

# Layers of one kind share rotary settings and window, hence everything that is computed once per pass.
Kind = tuple[RopeSpec, int | None]


@dataclass(frozen=True)
class _KindPlan:
    """What the layers of one kind need in one pass: cos, sin [T, 1, head_dim] and a span per sequence."""

    cos: Tensor
    sin: Tensor
    spans: list[Span]


class Decoder:
    """LanguageModel (models/base.py) over prepared weights.

    weights are taken over: the dict is empty afterwards, so that packed copies do not double the memory.
    outputs  the ids of the rows of lm_head, None for the whole vocabulary
    """

    def __init__(
        self, spec: DecoderSpec, weights: dict[str, Tensor], kernels: Kernels, outputs: OutputIds | None = None
    ) -> None:
        self._spec, self._kernels, self._outputs = spec, kernels, outputs
        embed = weights.pop("embed")
        self._dtype, self._device = embed.dtype, embed.device
        self._embed = kernels.prepare([embed])
        self._head = self._embed if spec.tied else kernels.prepare([weights.pop("lm_head")])
        self._final_norm = norm_weight(spec, weights.pop("final_norm"))
        self._layers = [self._take_layer(weights, i) for i in range(spec.layers)]
        self._kinds: list[Kind] = [(spec.rope_of(i), spec.windows[i]) for i in range(spec.layers)]
        self._tables = {
            rope: RopeTable(rope, spec.head_dim, self._dtype, self._device) for rope, _ in dict.fromkeys(self._kinds)
        }
        # Rounded to the weights' dtype, as transformers rounds it.
        self._embed_scale = float(torch.tensor(spec.embed_scale).to(self._dtype))

    def _take_layer(self, weights: dict[str, Tensor], i: int) -> LayerWeights:
        prefix = f"layers.{i}."
        own = {name[len(prefix) :]: weights.pop(name) for name in list(weights) if name.startswith(prefix)}
        return prepare_layer(self._spec, own, self._kernels)

    @property
    def spec(self) -> DecoderSpec:
        """Sizes and flags of the model."""
        return self._spec

    @property
    def device(self) -> torch.device:
        """Where weights and stores live."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and stored keys."""
        return self._dtype

    @property
    def kernels_name(self) -> str:
        """For banners and reports."""
        return self._kernels.capability.name

    @property
    def bit_invariant(self) -> bool:
        """True if a row's logits have the same bits in every pass."""
        return self._kernels.capability.bit_invariant

    def weight_bytes(self) -> int:
        """Bytes of all prepared weights; a tied output projection counts once."""
        head = 0 if self._head is self._embed else self._head.nbytes
        return self._embed.nbytes + head + self._final_norm.nbytes + sum(w.nbytes() for w in self._layers)

    def pass_bytes(self) -> int:
        """Bytes of weights that a narrow pass reads: not an embedding table beside another output matrix."""
        return self.weight_bytes() - (0 if self._head is self._embed else self._embed.nbytes)

    def new_store(self, max_bytes: int | None = None, kept: int = 0) -> KVStore:
        """See LanguageModel."""
        spec = self._spec
        return SlotStore(spec.layers, spec.kv_heads, spec.head_dim, self._dtype, self._device, max_bytes, kept)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVStore) -> ForwardOutput:
        """Run the rows, write their keys and values, return logits [R, V] float32 of the rows asked for.

        Feature layer i is the output of layer i, before the final norm; i = spec.layers is the output of that norm.
        The tensors are inference tensors: clone them before training on them. ValueError for rows not reserved.
        """
        sequences = [rows for rows in batch.rows if rows.tokens]
        if not sequences:
            raise ValueError("a forward pass needs at least one row")
        plans = self._plan(sequences)
        tokens = torch.tensor([t for rows in sequences for t in rows.tokens], dtype=torch.int64, device=self._device)
        x = self._kernels.embed(self._embed, tokens)
        if self._spec.embed_scale != 1.0:
            x = x * self._embed_scale
        kept: dict[int, Tensor] = {}
        for i, layer in enumerate(self._layers):
            x = x + self._attention(i, x, sequences, plans[self._kinds[i]], kv)
            x = x + self._mlp(layer, x)
            if i in batch.feature_layers:
                kept[i] = x
        if self._spec.layers in batch.feature_layers:
            kept[self._spec.layers] = self._norm(x, self._final_norm)
        features = torch.cat([kept[i] for i in batch.feature_layers], dim=-1) if batch.feature_layers else None
        return ForwardOutput.of(self._logits(x, batch), batch, features)

    def _logits(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        wanted = list(batch.logit_rows)
        if wanted != list(range(len(x))):
            x = x[torch.tensor(wanted, dtype=torch.int64, device=self._device)]
        logits = self._kernels.logits(self._norm(x, self._final_norm), self._head)
        return logits if self._outputs is None else self._outputs.spread(logits)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, weight, self._spec.norm_eps)

    def _plan(self, sequences: list[SeqRows]) -> dict[Kind, _KindPlan]:
        positions = [rows.kv_first + depth for rows in sequences for depth in rows.depths()]
        index = torch.tensor(positions, dtype=torch.int64, device=self._device)
        plans = {}
        for kind in dict.fromkeys(self._kinds):
            rope, window = kind
            cos, sin = self._tables[rope].rows(index, max(positions))
            plans[kind] = _KindPlan(cos, sin, [self._span(rows, window) for rows in sequences])
        return plans

    def _span(self, rows: SeqRows, window: int | None) -> Span:
        first, visible = visible_rows(rows, window, self._device)
        stop = rows.kv_first + len(rows.tokens)
        if visible is None:
            return Span(first, stop, None)
        heads_per_kv = self._spec.heads // self._spec.kv_heads
        return Span(first, stop, self._kernels.mask(visible, heads_per_kv, self._dtype))

    def _attention(self, i: int, x: Tensor, sequences: list[SeqRows], plan: _KindPlan, kv: KVStore) -> Tensor:
        """x [T, hidden] -> what attention adds to it."""
        spec, layer, kernels = self._spec, self._layers[i], self._kernels
        qkv = kernels.linear(self._norm(x, layer.attn_norm), layer.qkv).view(len(x), -1, spec.head_dim)
        rotated = spec.heads + spec.kv_heads
        qk, v = qkv[:, :rotated], qkv[:, rotated:]
        if layer.qk_norm is not None:
            qk = self._norm(qk, layer.qk_norm)
        qk = kernels.rope(qk, plan.cos, plan.sin)
        q, k = qk[:, : spec.heads], qk[:, spec.heads :]
        outputs, start = [], 0
        for rows, span in zip(sequences, plan.spans, strict=True):
            stop = start + len(rows.tokens)
            kv.write(i, rows.seq, rows.kv_first, k[start:stop], v[start:stop])
            keys, values = kv.view(i, rows.seq)
            keys, values = keys[:, span.first : span.stop], values[:, span.first : span.stop]
            outputs.append(kernels.attention(q[start:stop], keys, values, span.mask, spec.attn_scale))
            start = stop
        out = kernels.linear(outputs[0] if len(outputs) == 1 else torch.cat(outputs), layer.o)
        return out if layer.post_attn_norm is None else self._norm(out, layer.post_attn_norm)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        """x [T, hidden] -> what the gated MLP adds to it."""
        normed = self._norm(x, layer.mlp_norm)
        out = self._kernels.gated_mlp(normed, layer.gate_up, layer.down, self._spec.activation)
        return out if layer.post_mlp_norm is None else self._norm(out, layer.post_mlp_norm)
