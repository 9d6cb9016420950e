"""The noise: uniform, independent along every coordinate, and never an illegal value."""

import numpy as np
import pytest
from scipy.stats import chi2, kstest

from outpace.sampling import rng
from outpace.sampling.rng import Stream, exponential, uniform, uniforms

N, BINS = 20_000, 50


def flat(values) -> float:
    """p value of a chi-square for uniformity."""
    counts = np.bincount((np.asarray(values) * BINS).astype(int), minlength=BINS)
    mean = len(values) / BINS
    return float(chi2.sf(((counts - mean) ** 2 / mean).sum(), BINS - 1))


def pairs_flat(a, b, bins: int = 12) -> float:
    """p value of a chi-square for a uniform square: uniform and independent."""
    cell = (np.asarray(a) * bins).astype(int) * bins + (np.asarray(b) * bins).astype(int)
    counts = np.bincount(cell, minlength=bins * bins)
    mean = len(cell) / bins**2
    return float(chi2.sf(((counts - mean) ** 2 / mean).sum(), bins**2 - 1))


ALONG = {
    "positions": lambda i: uniform(7, i, Stream.STOP),
    "keys": lambda i: uniform(i, 3, Stream.STOP),
    "indices": lambda i: uniform(7, 3, Stream.DRAFT, i),
    "high key bits": lambda i: uniform(i << 44, 3, Stream.EXTRA),
    "diagonal": lambda i: uniform(i, i, Stream.STOP),
    "antidiagonal": lambda i: uniform(i, 10**6 - i, Stream.STOP),
}


@pytest.mark.parametrize("number", ALONG.values(), ids=ALONG)
def test_uniform_and_serially_independent(number) -> None:
    values = [number(i) for i in range(N + 1)]
    assert all(0 <= u < 1 for u in values)
    assert flat(values) > 0.001
    assert kstest(values, "uniform").pvalue > 0.001
    for lag in (1, 2, 64):
        assert pairs_flat(values[:-lag], values[lag:]) > 0.001


def test_streams_keys_and_positions_are_independent_of_each_other() -> None:
    stop = [uniform(7, i, Stream.STOP) for i in range(N)]
    others = {
        "stream": [uniform(7, i, Stream.EXTRA) for i in range(N)],
        "key": [uniform(8, i, Stream.STOP) for i in range(N)],
        "index": [uniform(7, i, Stream.STOP, 1) for i in range(N)],
        "noise": np.exp([-exponential(7, i, np.array([0]))[0] for i in range(N)]),
    }
    assert {name for name, values in others.items() if pairs_flat(stop, values) < 0.001} == set()


def test_the_tests_have_power() -> None:
    """A weak mixer (one multiplication) fails them."""
    weak = [((i + 1) * 0x9E3779B97F4A7C15 % 2**64) / 2**64 for i in range(N + 1)]
    assert pairs_flat(weak[:-1], weak[1:]) < 1e-6


def test_exponential_noise_over_tokens_and_positions() -> None:
    tokens = exponential(1, 2, np.arange(N))
    positions = np.array([exponential(1, i, np.array([5]))[0] for i in range(N)])
    for noise in (tokens, positions):
        assert noise.dtype == np.float64 and (noise > 0).all() and np.isfinite(noise).all()
        assert kstest(noise, "expon").pvalue > 0.001
        assert pairs_flat(np.exp(-noise[:-1]), np.exp(-noise[1:])) > 0.001


def test_noise_of_a_token_does_not_depend_on_the_company() -> None:
    everyone = exponential(3, 4, np.arange(1000))
    some = np.array([999, 0, 417, 31])
    assert np.array_equal(exponential(3, 4, some), everyone[some])
    assert np.array_equal(exponential(3, 4, np.arange(1000)[::-7]), everyone[::-7])
    assert exponential(3, 4, np.array([], dtype=np.int64)).shape == (0,)


def test_extreme_bits_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ones and all zeros out of the mixer: below 1, and noise strictly positive and finite."""
    for bits, low, high in ((0, 0.0, 0.0), (2**64 - 1, 1 - 2**-53, 1 - 2**-53)):
        monkeypatch.setattr(rng, "_mix", lambda _, bits=bits: bits)
        assert low <= uniform(0, 0, Stream.STOP) <= high
    ends = (np.array([0, 2**52 - 1], dtype=np.float64) + 0.5) * 2.0**-52
    assert (-np.log(ends) > 0).all() and np.isfinite(-np.log(ends)).all()


def test_keys_and_positions_wrap_at_64_bits() -> None:
    assert uniform(-1, 5, Stream.STOP) == uniform(2**64 - 1, 5, Stream.STOP)
    assert uniform(2**64 + 3, 5, Stream.STOP) == uniform(3, 5, Stream.STOP)
    assert np.array_equal(exponential(-1, 5, np.arange(4)), exponential(2**64 - 1, 5, np.arange(4)))


def test_uniforms_are_the_single_numbers() -> None:
    assert uniforms([1, 2], [3, 4], Stream.EXTRA).tolist() == [uniform(1, 3, Stream.EXTRA), uniform(2, 4, Stream.EXTRA)]
    with pytest.raises(ValueError, match="zip"):
        uniforms([1, 2], [3], Stream.STOP)


def test_noise_is_a_fixed_function() -> None:
    """Texts of a seed must not change between releases. The reference values follow from the definition alone."""
    m = 2**64 - 1

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & m
        z = (z ^ z >> 27) * 0x94D049BB133111EB & m
        return z ^ z >> 31

    g, z = 0x9E3779B97F4A7C15, 0
    for coordinate in (42, 7, int(Stream.COUPLED)):
        z = mix((z ^ coordinate) + g & m) if z else mix(coordinate + g & m)
    expected = [-np.log(((mix(z + (t + 1) * g & m) >> 12) + 0.5) * 2.0**-52) for t in (0, 1, 151_935)]
    assert np.allclose(exponential(42, 7, np.array([0, 1, 151_935])), expected, rtol=1e-15, atol=0)
    # SplitMix64 seeded with 0 starts with these published numbers.
    assert [mix((i + 1) * g & m) for i in range(2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
