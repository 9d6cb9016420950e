"""Counter-based noise: every number is a function of (key, position, stream, index) and of nothing else.

No state means no order: a request draws the same noise alone, in a batch, after a preemption, and on any device,
because it is always computed on the CPU in 64-bit integers. The mixer is the SplitMix64 finaliser (Steele, Lea, Flood
2014), applied once per coordinate.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: consecutive counters land far apart
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Stream(IntEnum):
    """What a number is used for. Different streams never share a number.

    DRAFT    index i = the i-th draw of a drafter in the step that decides token `position` first. Not keyed by the
             drafted token's own position: the block rule's stop depends on tokens behind it, so drawing those again
             from the same number in the next step would bias the law.
    STOP     the stop row of a step
    EXTRA    the extra token of a step
    COUPLED  index = token id: the exponential noise shared by target and drafter
    """

    DRAFT = 1
    STOP = 2
    EXTRA = 3
    COUPLED = 4


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MULTIPLIERS[0]) & _MASK
    z = ((z ^ (z >> 27)) * _MULTIPLIERS[1]) & _MASK
    return z ^ (z >> 31)


def _base(key: int, position: int, stream: Stream) -> int:
    """The start of a SplitMix64 sequence: bijective in each coordinate, so no two positions of a key share it."""
    z = _mix((key + _GOLDEN) & _MASK)
    z = _mix((z ^ (position & _MASK)) + _GOLDEN & _MASK)
    return _mix((z ^ int(stream)) + _GOLDEN & _MASK)


def uniform(key: int, position: int, stream: Stream, index: int = 0) -> float:
    """One number in [0, 1) with 53 random bits. key and position are taken modulo 2**64."""
    bits = _mix(_base(key, position, stream) + (index + 1) * _GOLDEN & _MASK)
    return (bits >> 11) * 2.0**-53


def uniforms(keys: Sequence[int], positions: Sequence[int], stream: Stream, index: int = 0) -> Tensor:
    """`uniform` for S sequences: [S] float64 on the CPU."""
    values = [uniform(key, position, stream, index) for key, position in zip(keys, positions, strict=True)]
    return torch.tensor(values, dtype=torch.float64)


def exponential(key: int, position: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Unit-rate exponential noise of stream COUPLED for token ids [n]: float64 [n], strictly positive and finite.

    A token's noise does not depend on which other ids are asked for.
    """
    with np.errstate(over="ignore"):
        z = np.ascontiguousarray(tokens).astype(np.uint64)
        z += np.uint64(1)
        z *= np.uint64(_GOLDEN)
        z += np.uint64(_base(key, position, Stream.COUPLED))
        z ^= z >> np.uint64(30)
        z *= np.uint64(_MULTIPLIERS[0])
        z ^= z >> np.uint64(27)
        z *= np.uint64(_MULTIPLIERS[1])
        z ^= z >> np.uint64(31)
    # 52 bits plus one half: the largest value is 1 - 2**-53, exact in float64, so the logarithm is never 0.
    noise = (z >> np.uint64(12)).astype(np.float64)
    noise += 0.5
    noise *= 2.0**-52
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)
