"""The whole engine (scheduler, KV manager, runner, sampler) against plain transformers in float32.

The oracle is teacher-forced: one plain forward over prompt + outputs, whose best token at every position must be the
engine's. That is greedy decoding position by position. If the two best logits are closer than 1e-3 either is accepted;
such ties are counted and must be rare.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.plan import RowSampling
from headrace_worker.core.request import Finish
from headrace_worker.model.load import LoadedModel, load
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.offline import Completion, OfflineEngine, Prompt
from support.worker.tiny_models import replica_config

TIE = 1e-3
MODELS = ("llama", "qwen3", "mistral")  # tiny ones
with_a_real_model = pytest.mark.parametrize("subject", ("smollm2", *MODELS), indirect=True)
GREEDY = RowSampling(temperature=0.0, logprobs=3)
SCORED = RowSampling(temperature=0.0, logprobs=3, prompt_logprobs=2)


class Subject:
    """A model loaded by Headrace and by plain transformers."""

    def __init__(self, config: ReplicaConfig, plain: Any, loaded: LoadedModel) -> None:
        self.config = config
        self.plain = plain
        self.loaded = loaded

    def engine(self, **options: Any) -> OfflineEngine:
        fields = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(self.config)}
        defaults = {"max_num_seqs": 32, "max_model_len": 200, "kv_cache_memory": 1 << 28}
        return OfflineEngine(ReplicaConfig(**fields | defaults | options), self.loaded)

    def prompts(self, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
        random = Random(seed)
        top = min(self.loaded.vocab_size, 40_000)
        return [[random.randrange(3, top) for _ in range(length)] for length in lengths]

    def check(self, prompt: Sequence[int], completion: Completion) -> int:
        """Compares one completion with the oracle; returns the number of ties."""
        assert completion.error == ""
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.inference_mode():
            logits = self.plain(ids).logits[0, len(prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(-1)
        ties = 0
        for row, token in enumerate(completion.token_ids):
            best = int(logits[row].argmax())
            if token != best:
                assert float(logits[row, best] - logits[row, token]) < TIE, f"output {row}: {token} is not {best}"
                ties += 1
            reported = completion.logprobs[row]
            assert abs(reported.logprob - float(logprobs[row, token])) < 1e-3
            expected = logprobs[row].topk(3).values.tolist()
            assert reported.top_logprobs == pytest.approx(expected, abs=1e-3)
        return ties


@pytest.fixture(scope="module", params=MODELS)
def subject(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> Subject:
    if request.param == "smollm2":
        config = replica_config("smollm2", block_size=16)
        untouched = load(config, plan=SurgeryPlan.none())
        plain = AutoModelForCausalLM.from_config(untouched.config, attn_implementation="sdpa", dtype=torch.float32)
        plain.load_state_dict(untouched.module.state_dict(), strict=False)
        plain.tie_weights()
        return Subject(config, plain.eval(), load(config))
    folder = tiny(request.param)
    config = replica_config(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return Subject(config, plain, load(config))


def run(engine: OfflineEngine, prompts: list[list[int]], lengths: Sequence[int]) -> list[Completion]:
    """Generates and checks the bookkeeping at every step; all blocks are released in the end."""
    work = [Prompt(prompt, length, GREEDY, ignore_eos=True) for prompt, length in zip(prompts, lengths, strict=True)]
    completions = engine.generate(work, after_step=engine.assembly.engine.scheduler.check)
    assert [len(completion.token_ids) for completion in completions] == list(lengths)
    assert engine.assembly.kv.pool.used == 0
    return completions


def assert_oracle(subject: Subject, prompts: list[list[int]], completions: list[Completion]) -> None:
    ties = sum(subject.check(*pair) for pair in zip(prompts, completions, strict=True))
    assert ties <= len(prompts)


@with_a_real_model
def test_alone(subject: Subject) -> None:
    engine = subject.engine()
    for prompt in subject.prompts([1, 7, 40]):
        assert_oracle(subject, [prompt], run(engine, [prompt], [12]))


def test_in_a_mixed_batch_of_32(subject: Subject) -> None:
    random = Random(2)
    prompts = subject.prompts([random.randrange(1, 70) for _ in range(32)])
    lengths = [random.randrange(1, 20) for _ in range(32)]
    assert_oracle(subject, prompts, run(subject.engine(), prompts, lengths))


@pytest.mark.parametrize("budget", [16, 64])
def test_with_chunked_prefill(subject: Subject, budget: int) -> None:
    prompts = subject.prompts([90, 3, 33, 64, 16, 17], seed=3)
    engine = subject.engine(max_num_batched_tokens=budget)
    assert_oracle(subject, prompts, run(engine, prompts, [10] * 6))


def test_with_prefix_hits(subject: Subject) -> None:
    stem = subject.prompts([50], seed=4)[0]
    prompts = [stem[: 20 + 4 * index] + tail for index, tail in enumerate(subject.prompts([5] * 8, seed=5))]
    engine = subject.engine()
    run(engine, [stem], [4])
    completions = run(engine, prompts, [10] * 8)
    assert all(completion.cached_tokens > 0 for completion in completions)
    assert_oracle(subject, prompts, completions)
    # Once more, now that the prompts themselves are cached.
    again = run(engine, prompts, [10] * 8)
    assert_oracle(subject, prompts, again)
    assert sum(c.cached_tokens for c in again) > sum(c.cached_tokens for c in completions)


def test_after_preemption(subject: Subject) -> None:
    layout = subject.loaded.layout
    # Memory for two and a half requests, so that sixteen preempt each other; for one request if a window bounds their
    # size, and then prompts that are small when they are admitted.
    share, length = (1.0, 2) if any(group.window for group in layout.groups) else (2.5, 30)
    blocks = 1 + int(share * len(layout.groups) * (96 // layout.block_size))
    engine = subject.engine(max_model_len=96, kv_cache_memory=blocks * layout.block_bytes)
    prompts = subject.prompts([length] * 16, seed=6)
    completions = run(engine, prompts, [60] * 16)
    assert sum(completion.preemptions for completion in completions) > 0
    assert_oracle(subject, prompts, completions)


def test_bad_words_and_allowed_tokens_are_those_of_transformers(subject: Subject) -> None:
    """Alone and beside thirty others: greedy decoding with transformers' own processors."""
    engine = subject.engine()
    prompts = subject.prompts([5, 17, 40], seed=11)
    plain = run(engine, prompts, [12] * 3)
    for prompt, free in zip(prompts, plain, strict=True):
        ids = free.token_ids
        words = [(ids[0],), (ids[1], ids[2]), (ids[4], ids[5], ids[6]), (ids[8],)]
        allowed = sorted({*ids[::2], *range(50, 60)})
        for options, given in (
            ({"bad_words": tuple(words)}, {"bad_words_ids": [list(word) for word in words]}),
            ({"allowed_token_ids": tuple(allowed)}, {"prefix_allowed_tokens_fn": lambda _, __, ids=allowed: ids}),
        ):
            with torch.inference_mode():
                whole = subject.plain.generate(
                    torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False, **given
                )
            expected = whole[0, len(prompt) :].tolist()
            work = Prompt(prompt, 12, RowSampling(temperature=0.0, **options), ignore_eos=True)
            others = [Prompt(other, 9, RowSampling(seed=3), ignore_eos=True) for other in subject.prompts([9] * 15)]
            (alone,) = engine.generate([work])
            together = engine.generate([*others, work, *others])[len(others)]
            assert alone.token_ids == together.token_ids == expected, given
            assert alone.token_ids != ids


def test_no_end_token_before_min_tokens(subject: Subject) -> None:
    """The model's own end tokens, which the prompt does not name."""
    (end, *_) = subject.loaded.facts.eos_token_ids
    sampling = RowSampling(temperature=0.0, logit_bias=((end, 100.0),), min_tokens=5)
    (found,) = subject.engine().generate([Prompt(subject.prompts([7])[0], 20, sampling)])
    assert len(found.token_ids) == 6 and found.token_ids.index(end) == 5 and found.finish is Finish.STOP


def check_scores(subject: Subject, prompts: list[list[int]], completions: list[Completion]) -> None:
    """The prompts' log-probabilities are those of transformers, which computes each prompt alone and whole."""
    assert_oracle(subject, prompts, completions)
    for prompt, completion in zip(prompts, completions, strict=True):
        with torch.inference_mode():
            logprobs = subject.plain(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
        assert len(completion.prompt_logprobs) == len(prompt) - 1
        for row, (token, found) in enumerate(zip(prompt[1:], completion.prompt_logprobs, strict=True)):
            assert found.logprob == pytest.approx(float(logprobs[row, token]), abs=1e-3)
            assert found.top_logprobs == pytest.approx(logprobs[row].topk(2).values.tolist(), abs=1e-3)
            assert len(found.top_ids) == 2


def test_log_probabilities_of_prompts(subject: Subject) -> None:
    """Alone, in chunks, beside requests without them, and of cached prompts, which are computed again."""
    scored = [Prompt(prompt, 4, SCORED, ignore_eos=True) for prompt in subject.prompts([1, 2, 90, 200, 40, 33], seed=7)]
    prompts = [list(prompt.token_ids) for prompt in scored]
    for budget in (32, 1024):
        engine = subject.engine(max_num_batched_tokens=budget, max_model_len=250)
        (alone,) = engine.generate(scored[2:3])
        check_scores(subject, prompts[2:3], [alone])
        free = [Prompt(prompt, 9, GREEDY, ignore_eos=True) for prompt in subject.prompts([80, 5, 200], seed=8)]
        found = engine.generate([*free[:2], *scored, *free[2:]], after_step=engine.assembly.engine.scheduler.check)
        check_scores(subject, prompts, found[2:8])
        assert_oracle(subject, [list(prompt.token_ids) for prompt in free], [*found[:2], *found[8:]])
        again = engine.generate(scored)
        check_scores(subject, prompts, again)
        assert not any(completion.cached_tokens for completion in (alone, *found[2:8], *again))
        assert not any(completion.prompt_logprobs for completion in found[:2])


def test_log_probabilities_of_preempted_prompts(subject: Subject) -> None:
    layout = subject.loaded.layout
    share = 1 if any(group.window for group in layout.groups) else 3
    blocks = 1 + share * len(layout.groups) * (96 // layout.block_size)
    engine = subject.engine(max_model_len=96, kv_cache_memory=blocks * layout.block_bytes, max_num_batched_tokens=24)
    prompts = subject.prompts([70] * 8, seed=9)
    found = engine.generate([Prompt(prompt, 20, SCORED, ignore_eos=True) for prompt in prompts])
    check_scores(subject, prompts, found)
    assert sum(completion.preemptions for completion in found) > 0
