"""The sampler against transformers' processors, its independence of the batch, its seeds and its distribution."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headrace_kernels.reference.noise import gumbel_noise
from headrace_worker.sampler import penalties, truncation
from headrace_worker.sampler.noise_key import absorb, row_key
from headrace_worker.sampler.truncation import Truncation, draw_truncated
from support.sampler.bench import Bench

VOCAB = 300


def logits_for(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def test_greedy_is_the_argmax(bench: Callable[..., Bench]) -> None:
    b = bench(VOCAB)
    for row in range(4):
        b.start(row, [1, 2], temperature=0.0 if row else 1e-7)
    logits = logits_for(4)
    output = b.draw(logits, [0, 1, 2, 3])
    assert output.tokens.tolist() == logits.argmax(-1).tolist()
    assert output.finite.all() and output.logprobs is None


def test_repetition_penalty_is_transformers(bench: Callable[..., Bench]) -> None:
    b = bench(VOCAB)
    prompts = [[5, 5, 7], [9], list(range(100))]
    for row, prompt in enumerate(prompts):
        b.start(row, prompt, temperature=0.0, repetition_penalty=1.0 + row)
    for step in range(20):
        logits = logits_for(3, seed=step)
        expected = [
            RepetitionPenaltyLogitsProcessor(1.0 + row)(
                b.tokens[row : row + 1, : b.lengths[row]].long(), logits[row : row + 1].clone()
            )
            .argmax()
            .item()
            for row in range(3)
        ]
        assert b.draw(logits, [0, 1, 2]).tokens.tolist() == expected


def test_penalties_of_long_rows_take_bounded_memory(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One long row among many would take a copy of its length for each of them."""
    options: dict[str, Any] = dict(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)

    def draw() -> list[list[int]]:
        b = bench(VOCAB)
        for row in range(6):
            b.start(row, list(range(5 + 7 * row)), **options | ({"presence_penalty": 0.0} if row % 2 else {}))
        return [b.draw(logits_for(6, seed=step), [3, 0, 5, 1, 4, 2]).tokens.tolist() for step in range(4)]

    whole = draw()
    elements = 50
    monkeypatch.setattr(penalties, "CHUNK_ELEMENTS", elements)
    sizes: list[int] = []
    scatter = torch.Tensor.scatter_

    def counted(tensor: torch.Tensor, dim: int, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        sizes.append(index.numel())
        return scatter(tensor, dim, index, values)

    monkeypatch.setattr(torch.Tensor, "scatter_", counted)
    assert draw() == whole
    assert len(sizes) > 8 and max(sizes) <= elements


def test_presence_and_frequency_count_the_output_only(bench: Callable[..., Bench]) -> None:
    b = bench(8)
    logits = torch.tensor([[3.0, 2.5, 2.2, 0.0, 0.0, 0.0, 0.0, 0.0]])
    b.start(0, [0, 0, 0], temperature=0.0, presence_penalty=0.6)
    b.start(1, [0, 0, 0], temperature=0.0, frequency_penalty=0.3)
    drawn = [b.draw(logits.expand(2, -1), [0, 1]).tokens.tolist() for _ in range(5)]
    assert [t for t, _ in drawn] == [0, 1, 0, 0, 0]  # 3.0, then 2.4 < 2.5, then 1.9 and 2.4 > 2.2
    assert [t for _, t in drawn] == [0, 0, 1, 0, 1]  # 3.0, 2.7, 2.5, 2.4, 2.2 against 2.1


def test_counts_are_rebuilt_from_a_rows_outputs_and_reset_when_it_is_reassigned(bench: Callable[..., Bench]) -> None:
    b = bench(VOCAB)
    options: dict[str, Any] = dict(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3)
    logits = logits_for(1, spread=1.0)
    b.start(0, [3, 4], **options)
    drawn = [int(b.draw(logits, [0]).tokens) for _ in range(12)]
    b.start(1, [3, 4], outputs=drawn[:5], **options)  # as after preemption or migration
    assert [int(b.draw(logits, [1]).tokens) for _ in range(7)] == drawn[5:]
    b.start(0, [3, 4], **options)
    assert [int(b.draw(logits, [0]).tokens) for _ in range(12)] == drawn


def test_counts_take_memory_only_for_rows_that_need_them(bench: Callable[..., Bench]) -> None:
    b = bench(VOCAB)
    empty = b.sampler._penalties._counts.nbytes
    for row in range(60):
        b.start(row, [1], repetition_penalty=1.2)
    assert b.sampler._penalties._counts.nbytes == empty
    for _ in range(50):
        b.start(70, [1], presence_penalty=1.0)
        b.start(71, [1], presence_penalty=1.0)
    assert b.sampler._penalties._counts.nbytes <= 4 * empty


def test_bias_and_min_tokens(bench: Callable[..., Bench]) -> None:
    b = bench(VOCAB)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 10.0
    b.start(0, [1, 2, 3], temperature=0.0, min_tokens=2, stop_token_ids=(7, 100000), logit_bias=((50, 5.0), (9, -3.0)))
    assert [int(b.draw(logits, [0]).tokens) for _ in range(4)] == [50, 50, 7, 7]
    b.start(1, [1], outputs=[50], temperature=0.0, min_tokens=2, stop_token_ids=(7,))
    assert [int(b.draw(logits, [1]).tokens) == 7 for _ in range(3)] == [False, True, True]


@pytest.mark.parametrize(
    "options",
    [
        dict(top_k=5),
        dict(top_p=0.7),
        dict(top_p=0.999),
        dict(min_p=0.05),
        dict(top_k=20, top_p=0.8),
        dict(min_p=0.02, top_k=30, top_p=0.9),
        dict(top_k=1),
        dict(top_k=VOCAB + 5, top_p=0.3),
        dict(top_k=200, temperature=3.0),
    ],
)
def test_distribution_is_that_of_transformers_warpers(options: dict[str, Any]) -> None:
    temperature = options.get("temperature", 1.0)
    scaled = logits_for(1, seed=4, spread=2.0) / temperature
    expected = scaled.clone()
    if "min_p" in options:
        expected = MinPLogitsWarper(options["min_p"])(None, expected)
    if "top_k" in options:
        expected = TopKLogitsWarper(min(options["top_k"], VOCAB))(None, expected)
    if "top_p" in options:
        expected = TopPLogitsWarper(options["top_p"])(None, expected)
    expected = expected.softmax(-1)[0].double()

    draws = 20_000
    state = truncation.TruncationState(VOCAB)
    top_k = options.get("top_k", 0)
    drawn = draw_truncated(
        scaled.expand(draws, -1),
        absorb(torch.full((draws,), row_key(11, 0)), torch.arange(draws)),
        Truncation(
            torch.full((draws, 1), top_k if 0 < top_k < VOCAB else VOCAB),
            torch.full((draws, 1), options.get("top_p", 1.0)),
            torch.full((draws, 1), options.get("min_p", 0.0)).log(),
        ),
    )
    assert state.rows == {}
    counts = torch.bincount(drawn, minlength=VOCAB).double()
    assert counts[expected == 0].sum() == 0
    _fits(counts, expected * draws)


def test_plain_sampling_follows_the_softmax(bench: Callable[..., Bench]) -> None:
    draws, vocab = 20_000, 50
    b = bench(vocab)
    b.start(0, [1], temperature=1.7, seed=2**64 - 1)
    logits = logits_for(1, vocab)
    counts = torch.zeros(vocab, dtype=torch.double)
    for position in range(draws):
        counts[b.sampler.sample(logits.clone(), [0], [position + 1], b.tokens).tokens] += 1
    _fits(counts, (logits / 1.7).softmax(-1)[0].double() * draws)


def _fits(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Pearson's test on the cells with enough mass, at about 5 sigma."""
    big = expected >= 5
    statistic = ((counts - expected)[big].square() / expected[big]).sum().item()
    cells = int(big.sum())
    assert statistic < cells + 5 * (2 * cells) ** 0.5 + 5
    rest = expected[~big].sum().item()
    assert abs(counts[~big].sum().item() - rest) < 5 * (rest + 1) ** 0.5


@pytest.mark.parametrize("vocab", [VOCAB, 5000])
def test_sampled_tokens_do_not_depend_on_the_number_of_candidates(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 40
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(rows, vocab, generator=generator) * torch.rand(rows, 1, generator=generator) * 5
    scores[7] = scores[7].round()  # many ties
    scores[8] = 0.0
    options = Truncation(
        torch.randint(1, vocab + 1, (rows, 1), generator=generator),
        torch.rand(rows, 1, generator=generator),
        (torch.rand(rows, 1, generator=generator) * 0.2).log(),
    )
    options.top_k[::3] = vocab
    options.log_min_p[::2] = float("-inf")
    keys = torch.arange(rows) * 977
    drawn = []
    for first in (1, 8, 64, vocab):
        monkeypatch.setattr(truncation, "FIRST_CANDIDATES", first)
        drawn.append(draw_truncated(scores, keys, options).tolist())
    assert drawn[0] == drawn[1] == drawn[2] == drawn[3]


@pytest.mark.parametrize("vocab", [VOCAB, 5000])
def test_top_p_samples_the_same_with_and_without_other_filters(vocab: int) -> None:
    rows = 60
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(rows, vocab, generator=generator) * torch.rand(rows, 1, generator=generator) * 6
    scores[3] = scores[3].round()
    top_p = torch.rand(rows, 1, generator=generator)
    top_p[::7] = 1.0
    columns = (torch.full((rows, 1), vocab), top_p, torch.zeros(rows, 1).log())
    keys = torch.arange(rows) * 31
    alone, beside = (draw_truncated(scores, keys, Truncation(*columns, cuts)) for cuts in (False, True))
    assert torch.equal(alone, beside)


def test_logits_may_be_a_slice_of_a_padded_vocabulary(bench: Callable[..., Bench]) -> None:
    """With all options that read or write single logits."""
    options = {
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "logit_bias": ((3, 2.0),),
        "logprobs": 2,
        "top_p": 0.9,
    }
    padded = torch.cat((logits_for(3), torch.full((3, 7), 1e9)), dim=1)
    drawn = []
    for logits in (padded.clone()[:, :VOCAB], padded[:, :VOCAB].contiguous()):
        b = bench(VOCAB)
        for row in range(3):
            b.start(row, [1, 2, 3 + row], [5, 5], seed=row, **options)
        output = b.sampler.sample(logits, [0, 1, 2], [5, 5, 5], b.tokens)
        drawn.append(output.tokens.tolist())
    assert drawn[0] == drawn[1]


def test_seeds(bench: Callable[..., Bench]) -> None:
    logits = logits_for(1)

    def run(**options: Any) -> list[int]:
        b = bench(VOCAB)
        b.start(0, [1], **options)
        return [int(b.draw(logits, [0]).tokens) for _ in range(20)]

    assert run(seed=5) == run(seed=5)
    assert run(seed=5) != run(seed=6)
    assert run(seed=5) != run(seed=5, choice_index=1)
    assert len(set(run(seed=5, temperature=3.0))) > 3  # positions differ


def test_the_key_is_as_documented() -> None:
    mask = 2**64 - 1

    def finalize(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    state = 0
    for word in (2**64 - 3, 2, 1, 77):
        state = finalize((state ^ word) + 0x9E3779B97F4A7C15 & mask)
    got = absorb(torch.tensor(row_key(2**64 - 3, 2)), torch.tensor(77))
    assert int(got) & mask == state


def test_the_token_is_the_argmax_of_logits_and_noise(bench: Callable[..., Bench]) -> None:
    """With flat logits, so that the noise decides: another position, seed or choice gives other tokens."""
    b = bench(VOCAB)
    b.start(3, [1, 2, 3], temperature=0.8, seed=42, choice_index=1)
    logits = logits_for(1, spread=0.1)
    drawn = [int(b.draw(logits, [3]).tokens) for _ in range(8)]
    keys = absorb(torch.full((8,), row_key(42, 1)), torch.arange(3, 11))
    expected = (logits / 0.8 + gumbel_noise(keys, VOCAB)).argmax(-1)
    assert drawn == expected.tolist()


def _random_options(rng: random.Random) -> dict[str, Any]:
    def maybe(value: object, neutral: object) -> object:
        return value if rng.random() < 0.4 else neutral

    return dict(
        temperature=rng.choice([0.0, 0.7, 1.0, 2.5]),
        top_p=maybe(rng.random() + 1e-3, 1.0),
        top_k=maybe(rng.randrange(1, 400), 0),
        min_p=maybe(rng.random() * 0.3, 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2.0), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        seed=rng.getrandbits(64),
        choice_index=rng.randrange(3),
        min_tokens=maybe(rng.randrange(8), 0),
        stop_token_ids=tuple(rng.sample(range(VOCAB), 3)),
        logit_bias=maybe(tuple((t, rng.uniform(-5, 5)) for t in rng.sample(range(VOCAB), 4)), ()),
        logprobs=maybe(rng.randrange(6), None),
    )


def test_each_row_alone_equals_itself_in_a_batch_of_64(bench: Callable[..., Bench]) -> None:
    rng = random.Random(1)
    options = [_random_options(rng) for _ in range(64)]
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))] for _ in range(64)]
    together, alone = bench(VOCAB), bench(VOCAB)
    for row in range(64):
        together.start(row, prompts[row], **options[row])
        alone.start(row, prompts[row], **options[row])
    for step in range(8):
        logits = logits_for(64, seed=step)
        order = rng.sample(range(64), 64)
        mixed = together.draw(logits[order], order).to_result(step)
        for i, row in enumerate(order):
            solo = alone.draw(logits[row : row + 1], [row]).to_result(step)
            assert mixed.tokens[i] == solo.tokens[0], options[row]
            assert mixed.logprobs.get(i) == solo.logprobs.get(0)


def test_logprobs_are_those_of_the_raw_logits(bench: Callable[..., Bench]) -> None:
    b = bench(VOCAB)
    b.start(0, [1], temperature=0.5, logit_bias=((3, 100.0),), logprobs=4)
    b.start(1, [1], temperature=0.0, logprobs=0)
    b.start(2, [1], temperature=0.0)
    logits = logits_for(3)
    result = b.draw(logits, [0, 1, 2]).to_result(9)
    expected = logits.double().log_softmax(-1)
    assert result.step == 9 and result.tokens[0] == 3 and sorted(result.logprobs) == [0, 1]
    assert result.logprobs[0].logprob == pytest.approx(expected[0, 3].item(), abs=1e-5)
    assert result.logprobs[0].top_ids == expected[0].topk(4).indices.tolist()
    assert result.logprobs[0].top_logprobs == pytest.approx(expected[0].topk(4).values.tolist(), abs=1e-5)
    assert result.logprobs[1].top_ids == [] and result.logprobs[1].logprob == pytest.approx(expected[1].max().item())


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "options", [dict(temperature=0.0), dict(), dict(top_p=0.5, logprobs=2), dict(repetition_penalty=1.5, top_k=3)]
)
def test_broken_logits_fail_their_row_only(bench: Callable[..., Bench], broken: float, options: dict[str, Any]) -> None:
    healthy, b = bench(VOCAB), bench(VOCAB)
    logits = logits_for(3)
    for row in range(3):
        healthy.start(row, [1, 2], seed=row, **options)
        b.start(row, [1, 2], seed=row, **options)
    expected = healthy.draw(logits, [0, 1, 2]).to_result(0)
    logits[1, 40:] = broken
    result = b.draw(logits, [0, 1, 2]).to_result(0)
    assert list(result.failed) == [1] and "not finite" in result.failed[1]
    assert 0 <= result.tokens[1] < VOCAB and 1 not in result.logprobs
    assert [result.tokens[i] for i in (0, 2)] == [expected.tokens[i] for i in (0, 2)]


def test_minus_infinity_is_a_legal_logit(bench: Callable[..., Bench]) -> None:
    b = bench(VOCAB)
    logits = torch.full((2, VOCAB), float("-inf"))
    logits[:, 17] = -3.0
    b.start(0, [1], temperature=1.0)
    b.start(1, [1], temperature=1.0, top_p=0.9, top_k=10)
    output = b.draw(logits, [0, 1])
    assert output.tokens.tolist() == [17, 17] and output.finite.all()
