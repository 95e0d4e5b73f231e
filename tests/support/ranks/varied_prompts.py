"""Requests whose options all differ, and the comparison of their outcomes."""

from collections.abc import Sequence

import pytest

from headrace_worker.core.plan import RowSampling
from headrace_worker.offline import Completion, Prompt
from support.ranks.prompts import prompts


def varied_prompts() -> list[Prompt]:
    """Requests with different options, all in one batch."""
    sampled = RowSampling(temperature=1.0, seed=11, logprobs=3)
    asks = [
        RowSampling(temperature=0.0, logprobs=2),
        sampled,
        RowSampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=2**63 + 5, choice_index=1, logprobs=0),
        RowSampling(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, logprobs=1),
        RowSampling(temperature=0.6, repetition_penalty=1.2, frequency_penalty=1.0, seed=3),
        RowSampling(temperature=0.0, logit_bias=((17, 8.0), (18, -100.0)), logprobs=5),
        RowSampling(temperature=1.5, seed=4, min_tokens=6, stop_token_ids=tuple(range(3, 120))),
        RowSampling(temperature=1.5, seed=5, stop_token_ids=tuple(range(3, 120))),
    ]
    return [
        Prompt(prompt[:25], 24, sampling, ignore_eos=True)
        for prompt, sampling in zip(prompts(len(asks), seed=9), asks, strict=True)
    ]


def same(ours: Sequence[Completion], theirs: Sequence[Completion]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.token_ids, one.finish, one.error) == (other.token_ids, other.finish, "")
        assert len(one.logprobs) == len(other.logprobs)
        for mine, its in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.logprob == pytest.approx(its.logprob, abs=1e-3)
            assert mine.top_logprobs == pytest.approx(its.top_logprobs, abs=1e-3)
