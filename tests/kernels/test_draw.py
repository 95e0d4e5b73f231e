"""Sampling: the same tokens on every backend, the right distribution, noise that is never inf or NaN."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_kernels import DrawOptions, catalog, draw
from headrace_kernels.reference import draw as definition
from headrace_kernels.reference import noise as reference

BACKENDS = [name for name in catalog.DRAW.available() if name != "torch"]
BEFORE = [[785, 596, 638, 443], [785, 596, 638, 14], [765, 596, 638, 159], [785, 596, 638, 443]]
Case = tuple[Tensor, Tensor, Tensor, DrawOptions]


def options(
    rows: int, *, temperature: float = 1.0, top_p: float = 1.0, min_p: float = 0.0, top_k: int = 0
) -> DrawOptions:
    numbers = torch.tensor([[temperature, top_p, math.log(min_p) if min_p else -math.inf]])
    integers = torch.stack([torch.arange(rows) * 977 - 10**17, torch.full((rows,), top_k)], 1)
    return DrawOptions(numbers.repeat(rows, 1), integers)


def random_case(rows: int, vocab: int, seed: int, dtype: torch.dtype) -> Case:
    """Rows of all shapes: flat, peaked, with ties, with -inf; every option, alone and with others."""
    generator = torch.Generator().manual_seed(seed)

    def pick(values: list[float], *shape: int) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), shape, generator=generator)]

    def often(share: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) < share

    scores = torch.randn(rows, vocab, generator=generator) * pick([0.0, 0.3, 1.0, 3.0, 10.0, 40.0], rows, 1)
    scores = torch.where(often(0.3, rows, 1), (scores * 4).round() / 4, scores)
    scores = scores.masked_fill(often(0.2, rows, 1) & often(0.5, rows, vocab), -math.inf)
    scores[:, -1] = scores[:, -1].clamp(min=0.5)
    top_p = torch.where(often(0.5, rows), pick([1e-9, 0.05, 0.3, 0.8, 0.95, 0.999], rows), 1.0)
    min_p = torch.where(often(0.3, rows), pick([1e-12, 0.001, 0.05, 0.5, 1.0], rows), 0.0)
    top_k = torch.where(often(0.5, rows), pick([1, 2, 5, 20, 50, 300, vocab, vocab + 5], rows).long(), 0)
    keys = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    numbers = torch.stack([pick([0.0, 0.1, 0.7, 1.0, 1.5], rows), top_p, min_p.log()], 1)
    order = torch.randperm(rows, generator=generator)
    positions = torch.randint(0, 5000, (rows,), generator=generator)
    return scores.to(dtype)[order], order, positions, DrawOptions(numbers, torch.stack([keys, top_k], 1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 5, 511, 512, 5003, 20_000])  # rows of 20,000 are read as vectors
def test_backends_draw_the_same_tokens(backend: str, dtype: torch.dtype, vocab: int) -> None:
    """Bit for bit. The interpreter takes some 0.3 s per row."""
    rows = min(600, 3_000_000 // vocab) if backend == "cpu" or torch.cuda.is_available() else 3
    case = random_case(rows, vocab, vocab + dtype.itemsize, dtype)
    tokens, peaks = catalog.DRAW.named(backend)(*case)
    expected = definition.draw(*case)
    assert torch.equal(tokens, expected[0]) and torch.equal(peaks, expected[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_alone_is_the_row_in_a_batch(backend: str) -> None:
    logits, rows, positions, chosen = random_case(12, 9001, 3, torch.bfloat16)
    draw = catalog.DRAW.named(backend)
    together = draw(logits, rows, positions, chosen)
    for row in range(0, 12, 3):
        of = slice(row, row + 1)
        alone = draw(logits[of], rows[of], positions[of], chosen)
        assert torch.equal(alone[0], together[0][of]) and torch.equal(alone[1], together[1][of])


@pytest.mark.parametrize("backend", catalog.DRAW.available())
def test_rows_that_are_not_finite_say_so_and_have_some_token(backend: str) -> None:
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(0))
    logits[1, 600], logits[2, 5], logits[3], logits[5, :699] = math.nan, math.inf, -math.inf, -math.inf
    for chosen in (options(6), options(6, temperature=0.0), options(6, top_p=0.5, top_k=3, min_p=0.1)):
        tokens, peaks = catalog.DRAW.named(backend)(logits, torch.arange(6), torch.arange(6), chosen)
        assert peaks.isfinite().tolist() == [True, False, False, False, True, True]
        assert ((tokens >= 0) & (tokens < 700)).all() and tokens[5] == 699
        assert peaks[3] == -math.inf


@pytest.mark.parametrize("backend", catalog.DRAW.available())
def test_tokens_that_were_drawn_before_stay_the_same(backend: str) -> None:
    """By Headrace before 28 November 2026: seeds keep their results."""
    logits = (torch.arange(4 * 1000).reshape(4, 1000) * 7919 % 1009).float() / 100
    draw = catalog.DRAW.named(backend)
    cases: list[dict[str, Any]] = [
        dict(temperature=0.7),
        dict(top_p=0.5),
        dict(top_k=20, top_p=0.95, temperature=0.6),
        dict(min_p=0.3),
    ]
    rows = torch.arange(4)
    assert [draw(logits, rows, rows + 10, options(4, **chosen))[0].tolist() for chosen in cases] == BEFORE


DISTRIBUTIONS: list[dict[str, Any]] = [
    dict(temperature=1.7),
    dict(top_p=0.3),
    dict(top_p=0.95, temperature=0.8),
    dict(top_k=20, top_p=0.8),
    dict(min_p=0.05, top_p=0.9),
]


@pytest.mark.parametrize("chosen", DISTRIBUTIONS)
def test_draws_follow_the_softmax_of_what_is_kept(chosen: dict[str, Any]) -> None:
    """Pearson's test with 100,000 draws, at about 5 sigma."""
    draws, vocab = 100_000, 300
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(4)) * 2
    one = options(1, **chosen)
    tokens, _ = draw(
        logits.expand(draws, -1).contiguous(), torch.zeros(draws, dtype=torch.int64), torch.arange(draws), one
    )
    counts = torch.bincount(tokens, minlength=vocab).double()
    temperature, top_p, log_min_p = one.numbers[0]
    scaled = (logits / temperature).double()[0]
    probabilities = scaled.softmax(-1)
    probabilities[probabilities < probabilities.max() * log_min_p.exp()] = 0
    if chosen.get("top_k"):
        probabilities[probabilities < probabilities.topk(int(chosen["top_k"])).values[-1]] = 0
    probabilities /= probabilities.sum()
    ordered, order = probabilities.sort(descending=True)
    probabilities[order[(ordered.cumsum(0) - ordered) >= top_p]] = 0
    expected = probabilities / probabilities.sum() * draws
    assert counts[expected == 0].sum() == 0
    big = expected >= 5
    statistic = ((counts - expected)[big].square() / expected[big]).sum().item()
    assert statistic < int(big.sum()) + 5 * (2 * int(big.sum())) ** 0.5 + 5


def test_known_noise() -> None:
    """A seed's results depend on the definition: these values must never change."""
    got = reference.gumbel_noise_at(torch.tensor([0, -1, 2**62]), torch.arange(3).expand(3, 3))
    expected = [[_by_definition(key, index) for index in range(3)] for key in (0, 2**64 - 1, 2**62)]
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-6, rtol=1e-6)


def _by_definition(key: int, index: int) -> float:
    x = (key + 0x9E3779B97F4A7C15 * (index + 1)) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    x ^= x >> 31
    return -math.log(-math.log1p(-((x >> 32) + 0.5) / 2**32))


def test_distribution_of_the_noise() -> None:
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
