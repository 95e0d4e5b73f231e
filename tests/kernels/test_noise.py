"""Gumbel noise: the same bits everywhere, the right distribution, never inf or NaN."""

import math

import pytest
import torch

from headrace_kernels import catalog, gumbel_noise_at
from headrace_kernels.reference import noise as reference

BACKENDS = catalog.GUMBEL_NOISE_AT.available()


@pytest.fixture
def keys() -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (5,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_give_the_same_bits(backend: str, keys: torch.Tensor) -> None:
    expected = reference.gumbel_noise(keys, 20_001)
    ids = torch.stack([torch.randperm(20_001) for _ in keys])
    assert torch.equal(catalog.GUMBEL_NOISE_AT.named(backend)(keys, ids), expected.gather(1, ids))


def test_known_values() -> None:
    """A seed's results depend on the definition: these values must never change."""
    got = gumbel_noise_at(torch.tensor([0, -1, 2**62]), torch.arange(3).expand(3, 3))
    expected = [[_by_definition(key, index) for index in range(3)] for key in (0, 2**64 - 1, 2**62)]
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-6, rtol=1e-6)


def _by_definition(key: int, index: int) -> float:
    x = (key + 0x9E3779B97F4A7C15 * (index + 1)) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    x ^= x >> 31
    return -math.log(-math.log1p(-((x >> 32) + 0.5) / 2**32))


def test_distribution() -> None:
    noise = reference.gumbel_noise(torch.arange(40), 50_000).double()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772157) < 0.005
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    uniform = torch.exp(-torch.exp(-noise)).flatten().sort().values
    grid = (torch.arange(uniform.numel()) + 0.5) / uniform.numel()
    assert (uniform - grid).abs().max() < 1.63 / math.sqrt(uniform.numel())  # Kolmogorov-Smirnov, 1 %
    # The tail that decides an argmax: P(noise > t) = 1 - exp(-exp(-t)).
    for t in (5.0, 8.0):
        expected = noise.numel() * -math.expm1(-math.exp(-t))
        assert abs((noise > t).sum() - expected) < 4 * math.sqrt(expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_argmax_is_that_of_scores_plus_noise(backend: str, keys: torch.Tensor, spread: float) -> None:
    scores = torch.randn(5, 30_000, generator=torch.Generator().manual_seed(2)) * spread
    scores[:, ::7] = float("-inf")
    expected = (scores + reference.gumbel_noise(keys, 30_000)).argmax(-1)
    assert torch.equal(catalog.GUMBEL_ARGMAX.named(backend)(scores, keys), expected)
    one = torch.full((5, 9000), float("-inf"))
    one[:, 8888] = -1e30
    assert catalog.GUMBEL_ARGMAX.named(backend)(one, keys).tolist() == [8888] * 5


@pytest.mark.parametrize("backend", catalog.ROW_LOGSUMEXP.available())
@pytest.mark.parametrize("size", [1, 15, 16, 8191, 8192, 20_001])
def test_row_logsumexp(backend: str, size: int) -> None:
    scores = torch.randn(7, size, generator=torch.Generator().manual_seed(size)) * 10
    scores[1] -= 1e4
    scores[2, : size // 2] = float("-inf")
    scores[3, 0] = float("nan")
    got = catalog.ROW_LOGSUMEXP.named(backend)(scores)
    expected = torch.logsumexp(scores.double(), -1).float()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-6, equal_nan=True)
    if backend == "cpu":
        assert torch.equal(catalog.ROW_LOGSUMEXP.named(backend)(scores[4:5]), got[4:5])


@pytest.mark.parametrize("backend", catalog.ROW_MAX.available())
@pytest.mark.parametrize("size", [1, 15, 16, 17, 20_001])
def test_row_max(backend: str, size: int) -> None:
    scores = torch.randn(9, size, generator=torch.Generator().manual_seed(size))
    scores[1] = float("-inf")
    scores[2] = 3.0  # the first of equal ones
    scores[3, size // 2 :] = 9.0
    scores[4, -1], scores[5, 0] = float("inf"), float("nan")
    peaks, best = catalog.ROW_MAX.named(backend)(scores)
    expected = scores.max(-1)
    torch.testing.assert_close(peaks, expected.values, atol=0, rtol=0, equal_nan=True)
    numbers = peaks == peaks
    assert torch.equal(best[numbers], expected.indices[numbers])
    assert catalog.ROW_MAX.named(backend)(scores[:, ::2])[0].shape == (9,)
