"""However steps are run (one at a time, one ahead, replayed from fixed buffers), each request's tokens are the same.

Replaying is tested without a GPU: the recorded step is called again on the same buffers, which is what a graph does.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from headrace_worker.config import ReplicaConfig
from headrace_worker.offline import Completion, OfflineEngine, Prompt
from headrace_worker.plan import RowSampling
from headrace_worker.request import Finish

MODES = {
    "one at a time": {"async_scheduling": "off"},
    "one ahead": {"async_scheduling": "on"},
    "replayed": {"async_scheduling": "off", "record": True},
    "replayed, one ahead": {"async_scheduling": "on", "record": True},
}
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.8, "seed": 2},
    {"temperature": 1.3, "top_k": 20, "seed": 3},
    {"temperature": 1.0, "min_p": 0.05, "seed": 4, "logprobs": 2},
    {"temperature": 0.9, "repetition_penalty": 1.3, "seed": 5},
    {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5, "seed": 6},
    {"temperature": 0.0, "logit_bias": ((26, 5.0), (19, -100.0))},
    {"temperature": 1.0, "seed": 7, "min_tokens": 6, "stop_token_ids": tuple(range(40, 160))},
    {"temperature": 1.0, "seed": 8, "stop_token_ids": tuple(range(40, 120))},
]
FAMILIES = ("llama", "gemma2", "mistral")


def workload(count: int = 40, seed: int = 0) -> list[Prompt]:
    """Prompts of which some begin alike, of all lengths, with every sampling option."""
    random = Random(seed)
    shared = [random.randrange(3, 300) for _ in range(24)]
    prompts = []
    for index in range(count):
        ids = [random.randrange(3, 300) for _ in range(random.randrange(1, 60))]
        if index % 3 == 0:
            ids = shared[: random.randrange(4, 24)] + ids
        prompts.append(Prompt(ids, random.randrange(1, 14), RowSampling(**OPTIONS[index % len(OPTIONS)])))
    return prompts


def replay_by_calling(step: Callable[[], None]) -> Callable[[], None]:
    step()
    return step


@pytest.fixture(scope="module")
def engine_in(
    tiny: Callable[[str], Any], replica: Callable[..., ReplicaConfig], add_tokenizer: Callable[[Any], None]
) -> Callable[..., OfflineEngine]:
    def make(family: str, mode: str, **options: Any) -> OfflineEngine:
        folder = tiny(family)
        add_tokenizer(folder)
        chosen: dict[str, Any] = dict(MODES[mode])
        record = chosen.pop("record", False)
        sizes = {"max_num_seqs": 12, "max_num_batched_tokens": 40, "max_model_len": 128, "kv_cache_memory": 4 << 20}
        engine = OfflineEngine(replica(folder, **sizes | chosen | options))
        if record:
            decode, mixed = engine.assembly.runner.record(replay_by_calling, 64)
            assert decode[-1] == 12 and mixed == [16, 32, 64]
        return engine

    return make


def same(one: list[Completion], other: list[Completion]) -> bool:
    """The same tokens and ends, and log-probabilities as close as sums in another order are."""
    if [(c.token_ids, c.finish) for c in one] != [(c.token_ids, c.finish) for c in other]:
        return False
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a.logprobs, b.logprobs, strict=True)]
    return all(a.top_ids == b.top_ids and abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_do_not_depend_on_how_steps_are_run(family: str, engine_in: Callable[..., OfflineEngine]) -> None:
    work = workload()
    plain = engine_in(family, "one at a time")
    expected = plain.generate(work)
    assert {Finish.LENGTH, Finish.STOP} == {completion.finish for completion in expected}
    assert any(completion.cached_tokens for completion in expected)
    alone = [plain.generate([prompt])[0] for prompt in work[:11]]
    assert same(alone, expected[:11])
    for mode in MODES:
        engine = engine_in(family, mode)
        assert same(engine.generate(work), expected), mode
        assert same([engine.generate([prompt])[0] for prompt in work[:11]], alone), mode
        assert engine.assembly.kv.pool.used == 0


AHEAD = [mode for mode in MODES if mode != "one at a time"]


@pytest.mark.parametrize("mode", AHEAD)
def test_preemption(mode: str, engine_in: Callable[..., OfflineEngine]) -> None:
    """A pool that holds little more than one of the longest requests: some are preempted, and nobody notices."""
    work = workload(24, seed=1)
    expected = engine_in("llama", "one at a time").generate(work)
    engine = engine_in("llama", mode, kv_cache_memory=100_000)
    assert same(engine.generate(work), expected)
    assert engine.assembly.engine.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("mode", AHEAD)
def test_requests_that_are_cancelled_midway(mode: str, engine_in: Callable[..., OfflineEngine]) -> None:
    """Their rows and blocks go to others while a step that still writes them is in flight."""
    work = workload(36, seed=2)
    expected = engine_in("llama", "one at a time").generate(work)
    offline = engine_in("llama", mode)
    engine = offline.assembly.engine
    random, submitted = Random(3), []
    submit = engine.submit

    def remember(request: Any) -> Any:
        submitted.append(request)
        return submit(request)

    def cancel_some() -> None:
        request = random.choice(submitted)
        if submitted.index(request) % 4 == 0:
            engine.cancel(request.attempt_id)
        engine.scheduler.check()

    engine.submit = remember  # type: ignore[method-assign]
    found = offline.generate(work, after_step=cancel_some)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one.finish is not None:
            assert same([one], [other])
        else:
            assert index % 4 == 0 and one.token_ids == other.token_ids[: len(one.token_ids)]
    assert sum(one.finish is None for one in found) > 2
    assert offline.assembly.kv.pool.used == 0


@pytest.mark.parametrize("mode", ["one ahead", "replayed, one ahead"])
def test_a_step_that_fails_while_the_next_is_in_flight(mode: str, engine_in: Callable[..., OfflineEngine]) -> None:
    """One request makes every step that it is in fail; it ends alone, and all others get their tokens."""
    work = workload(12, seed=4)
    expected = engine_in("llama", "one at a time").generate(work)
    offline = engine_in("llama", mode)
    runner = offline.assembly.runner
    sample, poison = runner.sample, list(work[5].token_ids)

    def broken(batch: Any, logits: Any) -> Any:
        for row in batch.sample_rows:
            if runner.rows.tokens[row, : len(poison)].tolist() == poison:
                raise ValueError("this one breaks the sampler")
        return sample(batch, logits)

    runner.sample = broken  # type: ignore[method-assign]
    found = offline.generate(work)
    assert found[5].finish is Finish.ERROR
    assert same(found[:5] + found[6:], expected[:5] + expected[6:])
    assert offline.assembly.kv.pool.used == 0
