"""The C++ kernels, described for ctypes: the structs of abi.h, and the library that the build made of them."""

from __future__ import annotations

import ctypes
import sysconfig
import threading
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from outpace.errors import Unsupported

LIBRARY = "_native"
FORMATS = {torch.float32: 0, torch.bfloat16: 1}
# GGUF block formats, by ggml's names and numbers (abi.h).
BLOCK_FORMATS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
# What `quantise` makes of dense weights: 8.5 and 4.5 bits each, GROUP columns to a scale.
QUANTISED = {"int8": "Q8_0", "int4": "Q4_0"}
GROUP = 32
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}


class Matrix(ctypes.Structure):
    """`struct Matrix`."""

    _fields_ = [
        ("data", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("cols", c_int64),
        ("format", c_int32),
        ("unused", c_int32),
    ]


class Layer(ctypes.Structure):
    """`struct Layer`."""

    _fields_ = [
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, c_void_p) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, c_void_p) for name in ("post_attn_norm", "post_mlp_norm", "cos", "sin")),
        ("window", c_int32),
        ("unused", c_int32),
    ]


class Model(ctypes.Structure):
    """`struct Model`."""

    _fields_ = [
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads")),
        *((name, c_int32) for name in ("head_dim", "ffn", "activation", "kv_format")),
        *((name, c_float) for name in ("norm_eps", "attn_scale", "embed_scale", "unused")),
        ("embed", Matrix),
        ("head", Matrix),
        ("final_norm", c_void_p),
        ("layer", POINTER(Layer)),
    ]


class SequenceRows(ctypes.Structure):
    """`struct SequenceRows`."""

    _fields_ = [
        ("kv", c_void_p),
        *((name, c_int64) for name in ("layer_stride", "value_stride", "head_stride")),
        ("visible", c_void_p),
        ("first", c_int32),
        ("count", c_int32),
    ]


class Pass(ctypes.Structure):
    """`struct Pass`."""

    _fields_ = [
        ("sequence", POINTER(SequenceRows)),
        *(
            (name, c_void_p)
            for name in ("token", "position", "logit_row", "feature_layer", "logits", "best", "features")
        ),
        *((name, c_int32) for name in ("sequences", "rows", "logit_rows", "feature_layers", "best_below", "unused")),
    ]


@dataclass(frozen=True)
class Blocks:
    """A matrix [rows, cols] in a GGUF block format, data [rows, bytes per row] uint8 as in the file."""

    data: Tensor
    kind: str
    cols: int

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, cols]."""
        return len(self.data), self.cols

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return self.data.nbytes


Weight = Tensor | Blocks


def describe(weight: Weight, bias: Tensor | None = None) -> Matrix:
    """A matrix [rows, cols], read in place: the tensors must outlive it. `bias` [rows] float32."""
    data = weight.data if isinstance(weight, Blocks) else weight
    if not data.is_contiguous() or (bias is not None and bias.dtype != torch.float32):
        raise ValueError("native kernels read contiguous weights and float32 biases")
    rows, cols = weight.shape
    number = BLOCK_FORMATS[weight.kind] if isinstance(weight, Blocks) else FORMATS[weight.dtype]
    return Matrix(data.data_ptr(), None if bias is None else bias.data_ptr(), rows, cols, number, 0)


class Native:
    """A pool of threads with one instruction set. Calls from several threads take turns: they share its buffers."""

    def __init__(self, library: ctypes.CDLL, threads: int, isa: str | None) -> None:
        self._library = library
        self._context = library.outpace_open(threads, isa.encode() if isa else None)
        if not self._context:
            raise Unsupported(f"This machine cannot run the {isa} kernels. It can run: {', '.join(isas())}.")
        self.threads = threads
        self._turn = threading.Lock()

    @property
    def isa(self) -> str:
        """Name of the instruction set in use."""
        name: bytes = self._library.outpace_isa(self._context)
        return name.decode()

    def forward(self, model: Model, work: Pass) -> None:
        """Run one pass. MemoryError if its buffers cannot be had."""
        with self._turn:
            failed = self._library.outpace_forward(self._context, ctypes.byref(model), ctypes.byref(work))
        if failed:
            raise MemoryError(f"no memory for a forward pass of {work.rows} rows")

    def quantise(self, weight: Tensor, kind: str) -> Blocks:
        """weight [rows, cols], cols a multiple of GROUP, rounded to nearest: "int8" gives Q8_0 blocks, "int4" Q4_0.
        For drafters, whose every token is verified."""
        rows, cols = weight.shape
        if cols % GROUP or kind not in QUANTISED:
            raise ValueError(f"cannot make {kind} groups of {cols} columns")
        made = QUANTISED[kind]
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[made]]
        data = torch.empty(rows, cols // block * size, dtype=torch.uint8)
        matrix = describe(weight.contiguous())
        number, out = BLOCK_FORMATS[made], data.data_ptr()
        with self._turn:
            failed = self._library.outpace_quantise(self._context, ctypes.byref(matrix), number, out)
        if failed:
            raise MemoryError("no memory to quantise")
        return Blocks(data, made, cols)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x [T, inputs] float32, weight [outputs, inputs] -> [T, outputs] float32."""
        x = x.contiguous()
        out = torch.empty(len(x), weight.shape[0])
        matrix = describe(weight, bias)
        pointers = x.data_ptr(), len(x), out.data_ptr()
        with self._turn:
            failed = self._library.outpace_linear(self._context, ctypes.byref(matrix), *pointers)
        if failed:
            raise MemoryError(f"no memory for a product of {len(x)} rows")
        return out

    def measure_read(self, data: Tensor) -> int:
        """Read contiguous data, whose bytes are a multiple of 8: the sum of its 64-bit words modulo 2^64."""
        with self._turn:
            return int(self._library.outpace_measure_read(self._context, data.data_ptr(), data.nbytes))

    def measure_copy(self, to: Tensor, data: Tensor) -> None:
        """Copy contiguous data to a tensor of its size."""
        if to.nbytes != data.nbytes:
            raise ValueError(f"cannot copy {data.nbytes} bytes to {to.nbytes}")
        with self._turn:
            self._library.outpace_measure_copy(self._context, to.data_ptr(), data.data_ptr(), data.nbytes)

    def measure_multiply(self, dtype: torch.dtype, tasks: int) -> int:
        """Run `tasks` tasks that only multiply and add, in registers: how many multiply-adds that was. 0 for bfloat16
        where the instruction set has no unit for its dot products."""
        with self._turn:
            return int(self._library.outpace_measure_multiply(self._context, FORMATS[dtype], tasks))

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._library.outpace_close(self._context)


@lru_cache(maxsize=8)
def open_native(threads: int, isa: str | None = None) -> Native:
    """The pool for this number of threads, shared by all models of the process. Unsupported without the library."""
    library = _library()
    if library is None:
        raise Unsupported(missing())
    return Native(library, threads, isa)


def available() -> bool:
    """True if the package was built with a C++ compiler."""
    return _library() is not None


def missing() -> str:
    """Why there are no native kernels, and how to get them."""
    return (
        "The native kernels are not built, so decoding runs on torch, several times slower. Install a C++ compiler"
        " (Debian: apt-get install g++; macOS: xcode-select --install) and install outpace again."
    )


def isas() -> Sequence[str]:
    """Instruction sets that this machine can run, best first; empty without the library."""
    library = _library()
    if library is None:
        return ()
    names: bytes = library.outpace_isas()
    return names.decode().split()


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    folder = Path(__file__).parent.parent
    path = folder / (LIBRARY + (sysconfig.get_config_var("EXT_SUFFIX") or ".so"))
    if not path.is_file():
        return None
    library = ctypes.CDLL(str(path))
    library.outpace_open.restype, library.outpace_open.argtypes = c_void_p, [c_int32, c_char_p]
    library.outpace_close.restype, library.outpace_close.argtypes = None, [c_void_p]
    library.outpace_isa.restype, library.outpace_isa.argtypes = c_char_p, [c_void_p]
    library.outpace_isas.restype, library.outpace_isas.argtypes = c_char_p, []
    library.outpace_forward.argtypes = [c_void_p, POINTER(Model), POINTER(Pass)]
    library.outpace_quantise.argtypes = [c_void_p, POINTER(Matrix), c_int32, c_void_p]
    library.outpace_linear.argtypes = [c_void_p, POINTER(Matrix), c_void_p, c_int64, c_void_p]
    library.outpace_measure_read.restype = c_uint64
    library.outpace_measure_read.argtypes = [c_void_p, c_void_p, c_int64]
    library.outpace_measure_copy.restype = None
    library.outpace_measure_copy.argtypes = [c_void_p, c_void_p, c_void_p, c_int64]
    library.outpace_measure_multiply.restype = c_int64
    library.outpace_measure_multiply.argtypes = [c_void_p, c_int32, c_int64]
    return library
