"""Prompts with constrained outputs, and the part of their outcome that is the same on any number of ranks."""

from collections.abc import Sequence
from typing import Any

from headrace_worker.core.plan import RowSampling
from headrace_worker.offline import Completion, Prompt
from support.ranks.prompts import prompts
from support.worker.guides import Rule, RuleGuide, exactly, number, one_in

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
