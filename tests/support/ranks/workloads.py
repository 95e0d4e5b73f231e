"""Requests to replicas of several ranks, and the comparison of their outcomes."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from headrace_worker.core.plan import RowSampling
from headrace_worker.offline import Completion, OfflineEngine, Prompt
from support.worker.guides import Rule, RuleGuide, exactly, number, one_in


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(3, 300) for _ in range(random.randrange(1, 40))] for _ in range(count)]


def checked_run(
    offline: OfflineEngine, prompts: Sequence[Sequence[int]], count: int, after_step: Callable[[], None]
) -> list[Completion]:
    """`count` greedy tokens after each prompt; all blocks are released in the end."""
    greedy = RowSampling(temperature=0.0, logprobs=2)
    work = [Prompt(prompt, count, greedy, ignore_eos=True) for prompt in prompts]

    def check() -> None:
        offline.assembly.engine.scheduler.check()
        after_step()

    completions = offline.generate(work, after_step=check)
    assert [len(completion.token_ids) for completion in completions] == [count] * len(prompts)
    assert offline.assembly.kv.pool.used == 0
    return completions


FEW = tuple(range(3, 20))


def varied_prompts() -> list[Prompt]:
    """Requests with different options, all in one batch."""
    sampled = RowSampling(temperature=1.0, seed=11, logprobs=3)
    asks = [
        RowSampling(temperature=0.0, logprobs=2),
        sampled,
        RowSampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=2**63 + 5, choice_index=1, logprobs=0),
        RowSampling(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, logprobs=1),
        RowSampling(temperature=0.6, repetition_penalty=1.2, frequency_penalty=1.0, seed=3, allowed_token_ids=FEW),
        RowSampling(temperature=0.0, logit_bias=((17, 8.0), (18, -100.0)), logprobs=5, bad_words=((17, 17), (9,))),
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


VOCABULARY = 317
END = 2
RULES: list[Rule | None] = [
    one_in(7, VOCABULARY),
    None,
    number(range(48, 120, 3), END, 8),
    exactly([300, 5, 5, 316, 40, 7]),
    one_in(50, VOCABULARY),
    None,
]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 2},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "seed": 3},
    {"temperature": 1.0, "seed": 4, "min_tokens": 3, "stop_token_ids": (END,)},
]


def guided_workload(count: int) -> list[Prompt]:
    work = []
    for index, ids in enumerate(prompts(count, seed=3)):
        rule, sampling = RULES[index % len(RULES)], RowSampling(**OPTIONS[index % len(OPTIONS)])
        longest = 6 if rule is RULES[3] else 1 << 30
        guide = None if rule is None else lambda rule=rule, longest=longest: RuleGuide(VOCABULARY, rule, longest)
        work.append(Prompt(ids, 10, sampling, guide=guide))
    # One whose third mask allows no token of the model.
    dead_end = RuleGuide(VOCABULARY + 32, lambda taken: (VOCABULARY + 1,) if len(taken) == 2 else range(30, 60))
    work.insert(2, Prompt([5, 6], 8, RowSampling(temperature=0.0), guide=lambda: RuleGuide(349, dead_end.rule)))
    return work


def outcome(completions: Sequence[Completion]) -> list[Any]:
    return [(completion.token_ids, completion.finish, completion.error) for completion in completions]
