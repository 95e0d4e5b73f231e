"""Constrained outputs of real forward passes: the tokens of a plain loop over transformers, in every step mode."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace_worker.core.plan import RowSampling
from headrace_worker.core.request import Finish
from headrace_worker.offline import OfflineEngine, Prompt
from support.worker.guides import Rule, RuleGuide, exactly, number, one_in
from support.worker.step_modes import MODES, OPTIONS, engine_in, same

__all__ = ["engine_in"]

VOCABULARY, END = 320, 2
DIGITS = range(48, 120, 3)
TIE = 1e-3
RULES: list[Rule | None] = [
    one_in(7, VOCABULARY),
    None,
    number(DIGITS, END, 8),
    exactly([300, 5, 5, 319, 40]),
    None,
    one_in(60, VOCABULARY),
]


def prompts(count: int, seed: int) -> list[list[int]]:
    random = Random(seed)
    shared = [random.randrange(3, 300) for _ in range(20)]
    made = [[random.randrange(3, 300) for _ in range(random.randrange(1, 50))] for _ in range(count)]
    return [shared + ids if index % 4 == 0 else ids for index, ids in enumerate(made)]


def workload(count: int = 36, seed: int = 0) -> list[Prompt]:
    """Guided and free requests with every sampling option."""
    work = []
    for index, ids in enumerate(prompts(count, seed)):
        rule = RULES[index % len(RULES)]
        options = OPTIONS[index % 9]
        longest = 5 if rule is RULES[3] else 1 << 30
        guide = None if rule is None else lambda rule=rule, longest=longest: RuleGuide(VOCABULARY, rule, longest)
        work.append(Prompt(ids, 4 + index % 9, RowSampling(**options), guide=guide))
    return work


@pytest.fixture(scope="module")
def plain_loop(tiny: Callable[[str], Path]) -> Callable[..., list[tuple[int, float]]]:
    """Greedy tokens under a rule by transformers alone, and the margin of each."""
    models: dict[str, Any] = {}

    def generate(family: str, prompt: Sequence[int], rule: Rule, count: int) -> list[tuple[int, float]]:
        if family not in models:
            models[family] = AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.float32).eval()
        drawn: list[tuple[int, float]] = []
        while len(drawn) < count and (not drawn or drawn[-1][0] != END):
            tokens = [token for token, _ in drawn]
            allowed = sorted(rule(tokens))
            if not allowed:
                break
            with torch.inference_mode():
                logits = models[family](torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, -1]
            best = logits[allowed].sort(descending=True)
            margin = float(best.values[0] - best.values[1]) if len(allowed) > 1 else float("inf")
            drawn.append((allowed[int(best.indices[0])], margin))
        return drawn

    return generate


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_greedy_tokens_are_those_of_a_plain_loop(
    family: str, engine_in: Callable[..., OfflineEngine], plain_loop: Callable[..., list[tuple[int, float]]]
) -> None:
    rules = [rule for rule in RULES if rule is not None]
    asks = [(ids, rules[index % 4]) for index, ids in enumerate(prompts(12, seed=5))]
    greedy = RowSampling(temperature=0.0)
    work = [
        Prompt(ids, 10, greedy, guide=partial(RuleGuide, VOCABULARY, rule, 5 if rule is RULES[3] else 99))
        for ids, rule in asks
    ]
    ties = 0
    expected = [plain_loop(family, ids, rule, 10) for ids, rule in asks]
    for mode in MODES:
        for found, wanted in zip(engine_in(family, mode).generate(work), expected, strict=True):
            assert found.error == "" and found.finish in (Finish.STOP, Finish.COMPLETE, Finish.LENGTH)
            for place, (token, margin) in enumerate(wanted):
                if found.token_ids[place] != token:
                    assert margin < TIE, (mode, place)
                    ties += 1
                    break
            else:
                assert len(found.token_ids) == len(wanted)
    assert ties <= 2


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_guided_and_free_requests_do_not_change_each_other(
    family: str, engine_in: Callable[..., OfflineEngine]
) -> None:
    """Each has the result it has alone, in every mode; a free one the result it has without guides."""
    work = workload()
    plain = engine_in(family, "one at a time")
    expected = plain.generate(work)
    assert {completion.finish for completion in expected} <= {Finish.LENGTH, Finish.STOP, Finish.COMPLETE}
    assert same([plain.generate([prompt])[0] for prompt in work], expected)
    free = [index for index, prompt in enumerate(work) if prompt.guide is None]
    assert same(plain.generate([work[index] for index in free]), [expected[index] for index in free])
    for prompt, completion in zip(work, expected, strict=True):
        if prompt.guide is not None:
            guide = prompt.guide()
            for token in completion.token_ids:
                if token != END:
                    guide.advance(token)
    for mode in MODES:
        engine = engine_in(family, mode)
        assert same(engine.generate(work), expected), mode
        assert engine.assembly.kv.pool.used == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_that_allows_nothing_ends_its_request_only(mode: str, engine_in: Callable[..., OfflineEngine]) -> None:
    """After two tokens; greedy and sampled, filtered and penalised."""

    def dead_end(taken: Sequence[int]) -> Sequence[int]:
        return (VOCABULARY + 3,) if len(taken) == 2 else range(30, 60)  # an id that the model does not have

    doomed = [
        Prompt([9, 9], 8, RowSampling(**options), guide=lambda: RuleGuide(VOCABULARY + 32, dead_end))
        for options in OPTIONS[:8]
    ]
    others = workload(12, seed=4)
    found = engine_in("llama", mode).generate([*doomed, *others])
    assert [(one.finish, len(one.token_ids)) for one in found[:8]] == [(Finish.ERROR, 2)] * 8
    assert all(one.error.endswith("a constraint that the vocabulary can express") for one in found[:8])
    assert same(found[8:], engine_in("llama", "one at a time").generate(others))


def test_logprobs_are_those_of_the_model_and_not_of_the_mask(
    engine_in: Callable[..., OfflineEngine], tiny: Callable[[str], Path]
) -> None:
    sampling = RowSampling(temperature=1.0, seed=3, top_k=5, logprobs=2)
    prompt = [4, 5, 6]
    guide = lambda: RuleGuide(VOCABULARY, one_in(60, VOCABULARY))  # noqa: E731
    found = engine_in("llama", "one ahead").generate([Prompt(prompt, 6, sampling, guide=guide)])[0]
    model = AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float32).eval()
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt + found.token_ids])).logits[0, 2:-1].log_softmax(-1)
    for row, (token, entry) in enumerate(zip(found.token_ids, found.logprobs, strict=True)):
        assert abs(entry.logprob - float(logprobs[row, token])) < 1e-3
        assert abs(entry.top_logprobs[0] - float(logprobs[row].max())) < 1e-3
