"""The sampler against transformers' processors, its independence of the batch, its seeds and its distribution."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headrace_kernels.reference.noise import absorb, gumbel_noise
from headrace_worker.core.guide import NOTHING_ALLOWED
from headrace_worker.core.plan import RowInit, RowSampling
from headrace_worker.device.cpu import CpuDevice
from headrace_worker.sampler import SampleBatch, SampleOutput, Sampler
from headrace_worker.sampler.noise_key import row_key

VOCAB = 300


class Bench:
    """Rows with tokens; ``draw`` samples one token for each of some rows and appends it."""

    def __init__(self, vocab: int, max_rows: int = 80) -> None:
        self.sampler = Sampler(vocab, max_rows, CpuDevice())
        self.tokens = torch.zeros((max_rows, 128), dtype=torch.int32)
        self.lengths = [0] * max_rows

    def start(self, row: int, prompt: list[int], outputs: list[int] | None = None, **options: Any) -> None:
        known = prompt + (outputs or [])
        self.sampler.init(RowInit(row, 1, known, len(prompt), RowSampling(**options)))
        self.tokens[row] = 0
        self.tokens[row, : len(known)] = torch.tensor(known)
        self.lengths[row] = len(known)

    def batch(self, logits: torch.Tensor, rows: list[int], positions: list[int]) -> SampleBatch:
        on_device = torch.tensor(rows), torch.tensor(positions)
        return SampleBatch(CpuDevice(), logits.clone(), rows, positions, *on_device, self.tokens)

    def draw(self, logits: torch.Tensor, rows: list[int]) -> SampleOutput:
        output = self.sampler.sample(self.batch(logits, rows, [self.lengths[row] for row in rows]))
        for row, token in zip(rows, output.tokens.tolist(), strict=True):
            self.tokens[row, self.lengths[row]] = token
            self.lengths[row] += 1
        return output


def logits_for(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def test_greedy_is_the_argmax() -> None:
    b = Bench(VOCAB)
    for row in range(4):
        b.start(row, [1, 2], temperature=0.0 if row else 1e-7)
    logits = logits_for(4)
    output = b.draw(logits, [0, 1, 2, 3])
    assert output.tokens.tolist() == logits.argmax(-1).tolist()
    assert output.peaks.isfinite().all() and output.logprobs is None


def test_repetition_penalty_is_transformers() -> None:
    b = Bench(VOCAB)
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


def test_presence_and_frequency_count_the_output_only() -> None:
    b = Bench(8)
    logits = torch.tensor([[3.0, 2.5, 2.2, 0.0, 0.0, 0.0, 0.0, 0.0]])
    b.start(0, [0, 0, 0], temperature=0.0, presence_penalty=0.6)
    b.start(1, [0, 0, 0], temperature=0.0, frequency_penalty=0.3)
    drawn = [b.draw(logits.expand(2, -1), [0, 1]).tokens.tolist() for _ in range(5)]
    assert [t for t, _ in drawn] == [0, 1, 0, 0, 0]  # 3.0, then 2.4 < 2.5, then 1.9 and 2.4 > 2.2
    assert [t for _, t in drawn] == [0, 0, 1, 0, 1]  # 3.0, 2.7, 2.5, 2.4, 2.2 against 2.1


def test_counts_are_rebuilt_from_a_rows_outputs_and_reset_when_it_is_reassigned() -> None:
    b = Bench(VOCAB)
    options: dict[str, Any] = dict(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3)
    logits = logits_for(1, spread=1.0)
    b.start(0, [3, 4], **options)
    drawn = [int(b.draw(logits, [0]).tokens) for _ in range(12)]
    b.start(1, [3, 4], outputs=drawn[:5], **options)  # as after preemption or migration
    assert [int(b.draw(logits, [1]).tokens) for _ in range(7)] == drawn[5:]
    b.start(0, [3, 4], **options)
    assert [int(b.draw(logits, [0]).tokens) for _ in range(12)] == drawn


def test_bias_and_min_tokens() -> None:
    b = Bench(VOCAB)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 10.0
    b.start(0, [1, 2, 3], temperature=0.0, min_tokens=2, stop_token_ids=(7, 100000), logit_bias=((50, 5.0), (9, -3.0)))
    assert [int(b.draw(logits, [0]).tokens) for _ in range(4)] == [50, 50, 7, 7]
    b.start(1, [1], outputs=[50], temperature=0.0, min_tokens=2, stop_token_ids=(7,))
    assert [int(b.draw(logits, [1]).tokens) == 7 for _ in range(3)] == [False, True, True]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_are_those_of_transformers(temperature: float) -> None:
    """Of six tokens, so that beginnings occur often; each row alone and beside the others, with outputs of before.

    The processor reads outputs alone, after a token that is in no word: it takes words for absent that are as long as
    what it reads, and one more.
    """
    vocab, none = 7, 6
    rng = random.Random(3)
    words = [tuple(word for word in _random_words(rng, none) if len(word) > 1 or word[0] < 2) for _ in range(8)]
    together, alone = Bench(vocab), Bench(vocab)
    outputs: list[list[int]] = [[rng.randrange(none) for _ in range(row)] for row in range(8)]
    for row in range(8):
        for bench in (together, alone):
            bench.start(row, [1, 2, 3], outputs[row], temperature=temperature, seed=row, bad_words=words[row])
    excluded = 0
    for step in range(40):
        logits = logits_for(8, vocab, seed=step, spread=1.0)
        logits[:, none] = float("-inf")
        expected = logits.clone()
        for row in range(8):
            processor = NoBadWordsLogitsProcessor([list(word) for word in words[row]])
            expected[row] = processor(torch.tensor([[none, *outputs[row]]]), logits[row : row + 1])[0]
            excluded += int((expected[row] != logits[row]).sum())
        drawn = together.draw(logits, list(range(8))).tokens.tolist()
        for row in range(8):
            assert torch.isfinite(expected[row, drawn[row]]), (step, row)
            if not temperature:
                assert drawn[row] == expected[row].argmax().item()
            assert int(alone.draw(logits[row : row + 1], [row]).tokens) == drawn[row]
            outputs[row].append(drawn[row])
    assert excluded > 400
    again = Bench(vocab)
    again.start(0, [1, 2, 3], outputs[7][:-1], temperature=temperature, seed=7, bad_words=words[7])
    assert int(again.draw(logits[7:], [0]).tokens) == outputs[7][-1]  # as after preemption or migration


def test_a_prompt_may_end_with_the_beginning_of_a_bad_word() -> None:
    b = Bench(VOCAB)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 9.0, 8.0
    b.start(0, [5, 7], temperature=0.0, bad_words=((7, 7), (7, 8, 7), (400, 7)))
    assert [int(b.draw(logits, [0]).tokens) for _ in range(5)] == [7, 8, 8, 7, 8]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_allowed_tokens_are_those_of_transformers(temperature: float) -> None:
    rng = random.Random(5)
    allowed = [rng.sample(range(VOCAB), 1 + 40 * (row % 4)) if row % 3 else [] for row in range(9)]
    together, alone = Bench(VOCAB), Bench(VOCAB)
    for row in range(9):
        for bench in (together, alone):
            options: dict[str, Any] = dict(temperature=temperature, logit_bias=((5, 90.0),), logprobs=2)
            bench.start(row, [1, 2], seed=row, allowed_token_ids=tuple(allowed[row]), **options)
    for step in range(8):
        logits = logits_for(9, seed=step)
        result = together.draw(logits, list(range(9))).to_result(step)
        for row, token in enumerate(result.tokens):
            ids = allowed[row] or list(range(VOCAB))
            biased = logits[row : row + 1].clone()
            biased[0, 5] += 90
            expected = PrefixConstrainedLogitsProcessor(lambda _, __, ids=ids: ids, 1)(torch.zeros(1, 1), biased)  # type: ignore[misc]
            assert torch.isfinite(expected[0, token])
            if not temperature:
                assert token == expected.argmax().item()
            assert alone.draw(logits[row : row + 1], [row]).to_result(step).tokens == [token]
            assert result.logprobs[row].top_ids == logits[row].topk(2).indices.tolist()
    assert not result.failed


def test_a_mask_and_allowed_tokens_both_hold_and_a_row_without_a_token_fails_alone() -> None:
    b = Bench(VOCAB)
    logits = logits_for(4)
    mask = np.array([0b1110], np.int32)
    b.start(0, [1], temperature=0.0, allowed_token_ids=(2, 40))
    b.start(1, [1], allowed_token_ids=(40,))
    b.start(2, [1], allowed_token_ids=(7, 8), min_tokens=1, stop_token_ids=(7,), bad_words=((8,),))
    b.start(3, [1], temperature=0.0)
    masks = {1: mask, 0: mask}
    result = b.sampler.sample(b.batch(logits, [0, 1, 2, 3], [1] * 4), masks).to_result(0)
    assert (result.tokens[0], result.tokens[3]) == (2, int(logits[3].argmax()))
    assert result.failed == {1: NOTHING_ALLOWED, 2: NOTHING_ALLOWED} and not result.not_finite


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
    logits = logits_for(1, seed=4, spread=2.0)
    expected = logits / options.get("temperature", 1.0)
    if "min_p" in options:
        expected = MinPLogitsWarper(options["min_p"])(None, expected)
    if "top_k" in options:
        expected = TopKLogitsWarper(min(options["top_k"], VOCAB))(None, expected)
    if "top_p" in options:
        expected = TopPLogitsWarper(options["top_p"])(None, expected)
    expected = expected.softmax(-1)[0].double()

    draws = 20_000
    b = Bench(VOCAB)
    b.start(0, [1], seed=11, **options)
    row_ids = torch.zeros(draws, dtype=torch.int64)
    drawn, _ = b.sampler.draw(logits.expand(draws, -1).contiguous(), row_ids, torch.arange(draws))
    counts = torch.bincount(drawn, minlength=VOCAB).double()
    assert counts[expected == 0].sum() == 0
    _fits(counts, expected * draws)


def test_plain_sampling_follows_the_softmax() -> None:
    draws, vocab = 20_000, 50
    b = Bench(vocab)
    b.start(0, [1], temperature=1.7, seed=2**64 - 1)
    logits = logits_for(1, vocab)
    counts = torch.zeros(vocab, dtype=torch.double)
    for position in range(draws):
        counts[b.sampler.sample(b.batch(logits, [0], [position + 1])).tokens] += 1
    _fits(counts, (logits / 1.7).softmax(-1)[0].double() * draws)


def _fits(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Pearson's test on the cells with enough mass, at about 5 sigma."""
    big = expected >= 5
    statistic = ((counts - expected)[big].square() / expected[big]).sum().item()
    cells = int(big.sum())
    assert statistic < cells + 5 * (2 * cells) ** 0.5 + 5
    rest = expected[~big].sum().item()
    assert abs(counts[~big].sum().item() - rest) < 5 * (rest + 1) ** 0.5


def test_seeds() -> None:
    logits = logits_for(1)

    def run(**options: Any) -> list[int]:
        b = Bench(VOCAB)
        b.start(0, [1], **options)
        return [int(b.draw(logits, [0]).tokens) for _ in range(20)]

    assert run(seed=5) == run(seed=5)
    assert run(seed=5) != run(seed=6)
    assert run(seed=5) != run(seed=5, choice_index=1)
    assert len(set(run(seed=5, temperature=3.0))) > 3  # positions differ


def test_the_token_is_the_argmax_of_logits_and_noise() -> None:
    """With flat logits, so that the noise decides: another position, seed or choice gives other tokens."""
    b = Bench(VOCAB)
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
        bad_words=maybe(_random_words(rng, VOCAB), ()),
        allowed_token_ids=maybe(tuple(rng.sample(range(VOCAB), 40)), ()),
    )


def _random_words(rng: random.Random, vocab: int) -> tuple[tuple[int, ...], ...]:
    """Sequences of one to four tokens; some end with the same token."""
    return tuple(tuple(rng.randrange(vocab) for _ in range(rng.choice([1, 2, 2, 3, 4]))) for _ in range(12))


def test_each_row_alone_equals_itself_in_a_batch_of_64() -> None:
    rng = random.Random(1)
    options = [_random_options(rng) for _ in range(64)]
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))] for _ in range(64)]
    together, alone = Bench(VOCAB), Bench(VOCAB)
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


def test_logprobs_are_those_of_the_raw_logits() -> None:
    b = Bench(VOCAB)
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
def test_broken_logits_fail_their_row_only(broken: float, options: dict[str, Any]) -> None:
    healthy, b = Bench(VOCAB), Bench(VOCAB)
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


def test_minus_infinity_is_a_legal_logit() -> None:
    b = Bench(VOCAB)
    logits = torch.full((2, VOCAB), float("-inf"))
    logits[:, 17] = -3.0
    b.start(0, [1], temperature=1.0)
    b.start(1, [1], temperature=1.0, top_p=0.9, top_k=10)
    output = b.draw(logits, [0, 1])
    assert output.tokens.tolist() == [17, 17] and output.peaks.isfinite().all()
