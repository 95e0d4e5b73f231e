"""In every step mode (one at a time, one ahead, replayed from fixed buffers) each request's tokens are the same.

Replay is tested without a GPU: the recorded step is called again on the same buffers, as a graph does.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from headrace_worker.core.plan import RowSampling
from headrace_worker.core.request import Finish
from headrace_worker.offline import OfflineEngine, Prompt
from support.worker.step_modes import MODES, OPTIONS, engine_in, same

__all__ = ["engine_in"]

FAMILIES = ("llama", "gemma2", "mistral", "qwen3_5_text")


def workload(count: int = 40, seed: int = 0) -> list[Prompt]:
    """Prompts of all lengths, some with a common prefix, with every sampling option."""
    random = Random(seed)
    shared = [random.randrange(3, 300) for _ in range(24)]
    prompts = []
    for index in range(count):
        ids = [random.randrange(3, 300) for _ in range(random.randrange(1, 60))]
        if index % 3 == 0:
            ids = shared[: random.randrange(4, 24)] + ids
        prompts.append(Prompt(ids, random.randrange(1, 14), RowSampling(**OPTIONS[index % len(OPTIONS)])))
    return prompts


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_do_not_depend_on_how_steps_are_run(family: str, engine_in: Callable[..., OfflineEngine]) -> None:
    work = workload()
    plain = engine_in(family, "one at a time")
    expected = plain.generate(work)
    assert {Finish.LENGTH, Finish.STOP} == {completion.finish for completion in expected}
    assert any(completion.cached_tokens for completion in expected)
    first = work[: len(OPTIONS)]
    alone = [plain.generate([prompt])[0] for prompt in first]
    assert same(alone, expected[: len(OPTIONS)])
    for mode in MODES:
        engine = engine_in(family, mode)
        assert same(engine.generate(work), expected), mode
        assert same([engine.generate([prompt])[0] for prompt in first], alone), mode
        assert engine.assembly.kv.pool.used == 0


AHEAD = [mode for mode in MODES if mode != "one at a time"]


@pytest.mark.parametrize("mode", AHEAD)
def test_preemption(mode: str, engine_in: Callable[..., OfflineEngine]) -> None:
    """A pool that holds little more than one of the longest requests: some are preempted, without any effect."""
    work = workload(24, seed=1)
    expected = engine_in("llama", "one at a time").generate(work)
    engine = engine_in("llama", mode, kv_cache_memory=100_000)
    assert same(engine.generate(work), expected)
    assert engine.assembly.engine.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("mode", AHEAD)
def test_requests_that_are_cancelled_midway(mode: str, engine_in: Callable[..., OfflineEngine]) -> None:
    """Their rows and blocks are reassigned while a step that still writes them is in flight."""
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
def test_a_step_that_fails_while_the_next_is_in_flight(
    mode: str, engine_in: Callable[..., OfflineEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request makes each of its steps fail; only it ends, and all others get their tokens."""
    work = workload(12, seed=4)
    expected = engine_in("llama", "one at a time").generate(work)
    offline = engine_in("llama", mode)
    runner = offline.assembly.runner
    sample, poison = runner.sample, list(work[5].token_ids)

    def broken(batch: Any, logits: Any, masks: Any) -> Any:
        for row in batch.sample_rows:
            if runner.rows.tokens[row, : len(poison)].tolist() == poison:
                raise ValueError("this request breaks the sampler")
        return sample(batch, logits, masks)

    monkeypatch.setattr(runner, "sample", broken)
    found = offline.generate(work)
    assert found[5].finish is Finish.ERROR
    assert same(found[:5] + found[6:], expected[:5] + expected[6:])
    assert offline.assembly.kv.pool.used == 0
