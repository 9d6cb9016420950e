"""What a decoder asks of its arithmetic, and what an implementation says about itself.

Symbols: T rows of a forward pass, t rows of one sequence, L key rows, H heads, G key-value heads, D head dimension.
Activations are in the model's dtype; norms, softmax and the rotary angles are computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Capability:
    """What an implementation can do; the registry and the performance pages read it.

    devices        torch device types, empty = all
    formats        weight formats it multiplies without conversion
    max_rows       rows up to which it is the fast path, None = any number
    bit_invariant  a row's result does not depend on how many rows share the call
    """

    name: str
    devices: frozenset[str]
    formats: tuple[str, ...]
    max_rows: int | None
    bit_invariant: bool


@dataclass(frozen=True)
class Matrix:
    """A weight [outputs, inputs] in the layout its kernels like. `data` is theirs alone."""

    data: Any
    outputs: int
    inputs: int
    nbytes: int


class Kernels(Protocol):
    """Exactly what the decoder calls. Functions of their arguments: no state, no phase, no device switch inside."""

    @property
    def capability(self) -> Capability: ...

    def prepare(self, parts: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> Matrix:
        """Pack matrices [n_i, inputs] into one weight whose outputs are theirs in order; biases [n_i] likewise."""
        ...

    def embed(self, table: Matrix, tokens: Tensor) -> Tensor:
        """Rows of a prepared table: tokens [T] int64 -> [T, inputs]."""
        ...

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        """x [T, inputs] -> [T, outputs], bias included."""
        ...

    def logits(self, x: Tensor, weight: Matrix) -> Tensor:
        """The output projection: x [R, inputs] -> [R, outputs] float32."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) over the last dimension, rounded to weight's dtype, times weight, in x's dtype (Zhang 2019)."""
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [T, heads, D] (Su 2021, half-split pairs). cos, sin [T, 1, D]; sin's first half is negated."""
        ...

    def mask(self, visible: Tensor, heads_per_kv: int, dtype: torch.dtype) -> Tensor:
        """visible [t, L] bool -> the form `attention` wants, made once per pass and used by every layer."""
        ...

    def attention(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Softmax attention of one sequence: q [t, H, D], keys and values [G, L, D] -> [t, H * D].
        Head h reads key-value head h // (H / G). mask None: every row sees every key."""
        ...

    def gated_mlp(self, x: Tensor, gate_up: Matrix, down: Matrix, activation: str) -> Tensor:
        """down(act(gate x) * up x); gate and up are one prepared weight. activation: silu or gelu_pytorch_tanh."""
        ...
