"""The decoder on native kernels: a forward pass is one call. Same weights and spec as `decoder.Decoder`, its reference;
here a row's bits do not depend on which other rows share the pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outpace.cache.base import KVStore
from outpace.cache.slots import SlotStore
from outpace.kernels import native
from outpace.models.base import ForwardBatch, ForwardOutput, OutputIds, SeqRows
from outpace.models.layers import ancestors, rotations
from outpace.models.spec import DecoderSpec, RopeSpec

FIRST_POSITIONS = 1024
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


class NativeDecoder:
    """LanguageModel (models/base.py) on the CPU. weights are taken over: the dict is empty afterwards. They are read
    where they lie, so a mapped checkpoint is neither copied nor packed.

    quantise  "int8" or "int4": matrices are rounded when loaded (for drafters: the target verifies)
    outputs   the ids of the rows of lm_head, None for the whole vocabulary
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: dict[str, native.Weight],
        kernels: native.Native,
        quantise: str | None = None,
        outputs: OutputIds | None = None,
    ) -> None:
        self._spec, self._kernels, self._quantise, self._outputs = spec, kernels, quantise, outputs
        self._held: list[native.Weight] = []  # everything the structs point to
        embed = weights.pop("embed")
        self._dtype = torch.bfloat16 if isinstance(embed, native.Blocks) else embed.dtype
        self._layers = (native.Layer * spec.layers)()
        self._model = native.Model(
            *(spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.ffn),
            *(native.ACTIVATIONS[spec.activation], native.FORMATS[self._dtype]),
            *(spec.norm_eps, spec.attn_scale, float(torch.tensor(spec.embed_scale).to(self._dtype)), 0.0),
        )
        self._model.embed = self._matrix(embed)
        self._model.head = self._model.embed if spec.tied else self._matrix(weights.pop("lm_head"))
        self._model.final_norm = self._floats(weights.pop("final_norm"), spec.norm_offset)
        self._model.layer = self._layers
        for i in range(spec.layers):
            prefix = f"layers.{i}."
            own = {name[len(prefix) :]: weights.pop(name) for name in list(weights) if name.startswith(prefix)}
            self._fill_layer(self._layers[i], own)
            self._layers[i].window = spec.windows[i] or 0
        self._weight_bytes = sum(tensor.nbytes for tensor in self._held)
        self._tables: list[Tensor] = []
        self._positions = 0
        self._grow_tables(FIRST_POSITIONS)

    def _matrix(self, weight: native.Weight, bias: native.Weight | None = None) -> native.Matrix:
        if not isinstance(weight, native.Blocks):
            fits = weight.shape[1] % native.GROUP == 0
            weight = self._kernels.quantise(weight, self._quantise) if self._quantise and fits else weight.contiguous()
        self._held.append(weight)
        return native.describe(weight, None if bias is None else self._float(bias))

    def _float(self, vector: native.Weight, offset: float = 0.0) -> Tensor:
        assert not isinstance(vector, native.Blocks), "vectors are stored whole"
        held = vector.float() + offset if offset else vector.float().contiguous()
        self._held.append(held)
        return held

    def _floats(self, vector: native.Weight, offset: float = 0.0) -> int:
        return self._float(vector, offset).data_ptr()

    def _fill_layer(self, layer: native.Layer, own: Mapping[str, native.Weight]) -> None:
        spec = self._spec
        biased = {"q": spec.qkv_bias, "k": spec.qkv_bias, "v": spec.qkv_bias, "o": spec.o_bias}
        for name in MATRICES:
            bias = own[f"{name}_bias"] if biased.get(name) else None
            setattr(layer, name, self._matrix(own[name], bias))
        norms = ["attn_norm", "mlp_norm"]
        norms += ["q_norm", "k_norm"] if spec.qk_norm else []
        norms += ["post_attn_norm", "post_mlp_norm"] if spec.sandwich else []
        for name in norms:
            setattr(layer, name, self._floats(own[name], spec.norm_offset))

    def _grow_tables(self, positions: int) -> None:
        """Cosines and sines [positions, head_dim / 2] float32 for every kind of rotation. The smaller tables stay:
        a pass of another engine may be reading them."""
        made: dict[RopeSpec, tuple[Tensor, Tensor]] = {}
        for i, layer in enumerate(self._layers):
            rope = self._spec.rope_of(i)
            if rope not in made:
                made[rope] = rotations(rope, self._spec.head_dim, positions)
                self._tables += made[rope]
            layer.cos, layer.sin = (table.data_ptr() for table in made[rope])
        self._positions = positions

    @property
    def spec(self) -> DecoderSpec:
        """Sizes and flags of the model."""
        return self._spec

    @property
    def device(self) -> torch.device:
        """Always the CPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and stored keys. Activations are float32, rounded to it when they enter a matrix."""
        return self._dtype

    @property
    def kernels_name(self) -> str:
        """For banners and reports."""
        return f"native {self._kernels.isa}" + (f", {self._quantise}" if self._quantise else "")

    @property
    def bit_invariant(self) -> bool:
        """A row's logits have the same bits in every pass."""
        return True

    def weight_bytes(self) -> int:
        """Bytes of all weights; a tied output projection counts once."""
        return self._weight_bytes

    def pass_bytes(self) -> int:
        """Bytes of weights that a narrow pass reads: not an embedding table beside another output matrix."""
        return self._weight_bytes - (0 if self._spec.tied else self._held[0].nbytes)

    def new_store(self, max_bytes: int | None = None, kept: int = 0) -> KVStore:
        """See LanguageModel."""
        spec = self._spec
        return SlotStore(spec.layers, spec.kv_heads, spec.head_dim, self._dtype, "cpu", max_bytes, kept)

    def forward(self, batch: ForwardBatch, kv: KVStore) -> ForwardOutput:
        """See `Decoder.forward`. ValueError for rows that are not reserved and tokens that do not exist: what follows
        reads and writes memory directly."""
        sequences = [rows for rows in batch.rows if rows.tokens]
        tokens = np.array([token for rows in sequences for token in rows.tokens], dtype=np.int32)
        wanted = np.array(batch.logit_rows, dtype=np.int32)
        layers = np.array(batch.feature_layers, dtype=np.int32)
        self._check(sequences, tokens, wanted, kv)
        positions = _positions(sequences)
        longest = int(positions.max()) + 1
        if longest > self._positions:
            self._grow_tables(max(longest, 2 * self._positions))
        parts, held = self._sequence_rows(sequences, kv)
        logits, best, below = self._answers(len(wanted), batch.best_below)
        features = torch.empty(len(tokens), len(layers) * self._spec.hidden)
        work = native.Pass(
            parts,
            *(array.ctypes.data for array in (tokens, positions, wanted, layers)),
            *(logits.data_ptr(), None if best is None else best.data_ptr(), features.data_ptr()),
            *(len(sequences), len(tokens), len(wanted), len(layers), below),
        )
        self._kernels.forward(self._model, work)
        del held
        if self._outputs is not None:
            logits, best = self._outputs.spread(logits), None if best is None else self._outputs.ids[best]
        return ForwardOutput(logits, features.to(self._dtype) if len(layers) else None, best)

    def _answers(self, rows: int, best_below: int | None) -> tuple[Tensor, Tensor | None, int]:
        """Where logits go, or the best rows of the output matrix, and the bound of these."""
        if best_below is None:
            return torch.empty(rows, self._model.head.rows), None, 0
        below = best_below if self._outputs is None else self._outputs.below(best_below)
        if not 1 <= below <= self._model.head.rows:
            raise ValueError(f"best_below {best_below} leaves no id, or more than there are ({self._spec.vocab_size})")
        return torch.empty(0, self._model.head.rows), torch.empty(rows, dtype=torch.int64), below

    def _check(
        self, sequences: Sequence[SeqRows], tokens: npt.NDArray[np.int32], wanted: npt.NDArray[np.int32], kv: KVStore
    ) -> None:
        if not len(tokens):
            raise ValueError("a forward pass needs at least one row")
        if tokens.min() < 0 or tokens.max() >= self._spec.vocab_size:
            raise ValueError(f"token ids must lie in 0..{self._spec.vocab_size - 1}")
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= len(tokens)):
            raise ValueError(f"logit rows must lie in 0..{len(tokens) - 1}")
        for rows in sequences:
            length, end = kv.length(rows.seq), rows.kv_first + len(rows.tokens)
            if rows.kv_first < length or end > length + kv.reserved(rows.seq):
                raise ValueError(f"rows {rows.kv_first}..{end - 1} of sequence {rows.seq} are not reserved")

    def _sequence_rows(self, sequences: Sequence[SeqRows], kv: KVStore) -> tuple[object, list[object]]:
        """The structs, and what they point to."""
        parts = (native.SequenceRows * len(sequences))()
        held: list[object] = []
        for part, rows in zip(parts, sequences, strict=True):
            buffer = kv.rows(rows.seq)
            strides = [stride * buffer.itemsize for stride in buffer.stride()[:3]]
            part.kv, part.layer_stride, part.value_stride, part.head_stride = buffer.data_ptr(), *strides
            part.first, part.count = rows.kv_first, len(rows.tokens)
            held.append(buffer)
            if rows.parents is not None:
                sees = ancestors(rows, torch.device("cpu")).to(torch.uint8)
                part.visible = sees.data_ptr()
                held.append(sees)
        return parts, held


def _positions(sequences: Sequence[SeqRows]) -> npt.NDArray[np.int32]:
    parts = [
        np.arange(rows.kv_first, rows.kv_first + len(rows.tokens), dtype=np.int32)
        if rows.parents is None
        else np.array(rows.depths(), dtype=np.int32) + np.int32(rows.kv_first)
        for rows in sequences
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
