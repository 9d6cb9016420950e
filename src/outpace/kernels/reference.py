"""The contract in stock torch, for every device. The other kernels are tested against this one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.kernels.base import Capability, Matrix

# Up to here a sequence's query heads are folded into rows, so that each key is read once per key-value head.
FOLDED_ROWS = 64


class ReferenceKernels:
    """Plain torch operations, rounding where transformers rounds."""

    capability = Capability(
        name="torch",
        devices=frozenset(),
        formats=("float32", "bfloat16"),
        max_rows=None,
        bit_invariant=False,
    )

    def prepare(self, parts: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> Matrix:
        """Parts are used in place and stay apart: a mapped checkpoint is not copied, and one call is not faster."""
        pairs = list(zip(parts, biases, strict=True)) if biases else [(part, None) for part in parts]
        held = sum(tensor.nbytes for pair in pairs for tensor in pair if tensor is not None)
        return Matrix(pairs, sum(part.shape[0] for part in parts), parts[0].shape[1], held)

    def embed(self, table: Matrix, tokens: Tensor) -> Tensor:
        """[T] -> [T, inputs]."""
        return F.embedding(tokens, table.data[0][0])

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        """[T, inputs] -> [T, outputs]."""
        outputs = [F.linear(x, part, bias) for part, bias in weight.data]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def logits(self, x: Tensor, weight: Matrix) -> Tensor:
        """[R, inputs] -> [R, outputs] float32; the product itself is rounded to x's dtype, as transformers does."""
        return self.linear(x, weight).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Last dimension, in float32."""
        normed = F.rms_norm(x.float(), x.shape[-1:], None, eps)
        return (normed.to(weight.dtype) * weight).to(x.dtype)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, heads, D] rotated."""
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    def mask(self, visible: Tensor, heads_per_kv: int, dtype: torch.dtype) -> Tensor:
        """Additive, 0 or -inf: [t * heads_per_kv, L] when rows are folded, else [t, L]."""
        bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
        return bias.repeat(heads_per_kv, 1) if len(visible) <= FOLDED_ROWS else bias

    def attention(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """[t, H, D] -> [t, H * D]."""
        t, heads, dim = q.shape
        k, v = keys.unsqueeze(0), values.unsqueeze(0)
        if t > FOLDED_ROWS:
            rows = q.transpose(0, 1).unsqueeze(0)
            out = F.scaled_dot_product_attention(rows, k, v, mask, scale=scale, enable_gqa=True)
            return out.squeeze(0).transpose(0, 1).reshape(t, heads * dim)
        kv_heads = keys.shape[0]
        folded = q.view(t, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)
        out = F.scaled_dot_product_attention(folded, k, v, mask, scale=scale)
        return out.view(kv_heads, -1, t, dim).permute(2, 0, 1, 3).reshape(t, heads * dim)

    def gated_mlp(self, x: Tensor, gate_up: Matrix, down: Matrix, activation: str) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        gate, up = (F.linear(x, part, bias) for part, bias in gate_up.data)
        act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        return self.linear(act.mul_(up), down)
