"""The measuring loops of the native kernels do what they are timed for: their results say so."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import torch

from outpace.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason=native.missing())
ISAS = pytest.mark.parametrize("isa", native.isas())
TASK_ROUNDS = 1 << 16
NARROW = 24 if platform.machine() == "aarch64" else 12
# Multiply-adds of one round: lanes times chains; a dot product of bfloat16 is two for each lane, a tile product 2^13.
FLOAT32 = {"generic": 4 * NARROW, "avx2": 8 * 12, "avx512": 16 * 24, "avx512_bf16": 16 * 24, "amx_bf16": 16 * 24}
BFLOAT16 = {"avx512_bf16": 2 * 16 * 24, "amx_bf16": 4 * 16 * 16 * 32}


def words(count: int) -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(count))


@ISAS
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 31, 33, 32768, 5 * 32768 + 77])
def test_reading_sums_every_word_once(isa: str, threads: int, count: int) -> None:
    data = words(count)
    kernels = native.open_native(threads, isa)
    assert kernels.measure_read(data) == int(data.numpy().view(np.uint64).sum(dtype=np.uint64))
    if count:
        data[count // 2] += 1
        assert kernels.measure_read(data) == int(data.numpy().view(np.uint64).sum(dtype=np.uint64))


@ISAS
def test_copying_copies_everything(isa: str) -> None:
    data = words(3 * 32768 + 5)
    to = torch.zeros(len(data) + 1, dtype=torch.int64)
    native.open_native(2, isa).measure_copy(to[:-1], data)
    assert torch.equal(to[:-1], data) and to[-1] == 0
    with pytest.raises(ValueError, match="cannot copy"):
        native.open_native(2, isa).measure_copy(to, data)


@ISAS
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tasks", [1, 5])
def test_multiplying_counts_itself(isa: str, threads: int, tasks: int) -> None:
    kernels = native.open_native(threads, isa)
    assert kernels.measure_multiply(torch.float32, tasks) == tasks * TASK_ROUNDS * FLOAT32[isa]
    assert kernels.measure_multiply(torch.bfloat16, tasks) == tasks * TASK_ROUNDS * BFLOAT16.get(isa, 0)
