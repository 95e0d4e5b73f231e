"""Cached tokens when a prompt's KV blocks come from another replica: two engines, connected message by message."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from headrace_worker.core.plan import RowSampling, StepPlan
from headrace_worker.core.transfer.orders import ChunkRead, Connect, Order, Read
from support.worker.engine_bench import make_bench

PROMPT = 30  # tokens; blocks have 4, and the last token is always computed: 28 can be cached
CACHEABLE = 28


class Pair:
    """A prefill replica and one that decodes; blocks are copied according to their orders."""

    def __init__(self, make_bench: Callable[..., Any]) -> None:
        self.source, self.target = make_bench(), make_bench()
        self._orders: dict[int, list[Order]] = {}
        for number, bench in enumerate((self.source, self.target)):
            self._orders[number] = []

            def note(plan: StepPlan, number: int = number) -> None:
                self._orders[number] += plan.orders

            bench.runner.on_launch = note
        self.source.engine.exchange.granter.connect("d", Connect(1, (), (), reads=False))
        self.target.engine.exchange.fetcher.connect("p", Connect(1, (), (), reads=True))

    def answer(self, prompt: list[int], **options: Any) -> Any:
        """Runs one request on the target, its prompt fetched from the source; returns its first output."""
        request = self.target.request(prompt, 2, source="p", **options)
        assert self.target.engine.submit(request) is None
        outputs = []
        for _ in range(60):
            outputs += self.target.engine.step()
            self._exchange()
            if request.finish is not None:
                self.target.scheduler.check(self.target.engine.exchange.held())
                return next(output for output in outputs if output.cached_tokens is not None)
            self.source.engine.step()
            self._exchange()
        raise AssertionError("no end")

    def _exchange(self) -> None:
        source, target = self.source.engine.exchange, self.target.engine.exchange
        for _, message in target.take_outbound().to_sources:
            source.granter.receive("d", message)
        for _, answer in source.take_outbound().to_targets:
            target.fetcher.receive("p", answer)
        for order in self._orders[1]:
            if isinstance(order, Read):
                self._copy(order.theirs, order.mine)
                target.handle_report(ChunkRead(0, order.fetch, order.chunk, good=True))
        self._orders[0].clear()
        self._orders[1].clear()

    def _copy(self, sent: tuple[tuple[int, ...], ...], received: tuple[tuple[int, ...], ...]) -> None:
        for group, (there, here) in enumerate(zip(sent, received, strict=True)):
            for one, other in zip(there, here, strict=True):
                for offset in range(4):
                    self.target.runner.slots[group, other, offset] = self.source.runner.slots[group, one, offset]


@pytest.fixture
def pair() -> Pair:
    return Pair(make_bench)


def _prompt(seed: int, length: int = PROMPT) -> list[int]:
    random = Random(seed)
    return [random.randrange(10, 900) for _ in range(length)]


def _hits(bench: Any) -> tuple[int, int]:
    counters = bench.scheduler.counters
    return counters.prefix_queries, counters.prefix_hits


def test_tokens_that_the_prefill_replica_computed_do_not_count_as_cached(pair: Pair) -> None:
    assert pair.answer(_prompt(1)).cached_tokens == 0
    fetches = pair.target.engine.exchange.fetcher.counters
    assert (fetches.started, fetches.done) == (1, 1), "its blocks still came from the prefill replica"
    assert _hits(pair.target) == (PROMPT, 0) and _hits(pair.source) == (CACHEABLE, 0)
    assert pair.answer(_prompt(1)).cached_tokens == CACHEABLE, "now they are in the cache"
    assert _hits(pair.target) == (2 * PROMPT, CACHEABLE) and fetches.started == 1


@pytest.mark.parametrize("there", [12, CACHEABLE])
def test_tokens_in_the_prefill_replicas_own_cache_count_as_cached(pair: Pair, there: int) -> None:
    prompt = _prompt(2)
    pair.source.run([pair.source.request(prompt[: there + 1])])
    before = pair.source.scheduler.counters.prefix_hits
    assert pair.answer(prompt).cached_tokens == there
    assert _hits(pair.target) == (PROMPT, 0), "none of them was cached on the target"
    assert pair.source.scheduler.counters.prefix_hits - before == there


def test_local_and_remote_hits_add_up_and_none_counts_twice(pair: Pair) -> None:
    prompt = _prompt(3)
    pair.target.run([pair.target.request(prompt[:9])])
    pair.source.run([pair.source.request(prompt[:17])])
    before = pair.target.scheduler.counters.prefix_hits
    assert pair.answer(prompt).cached_tokens == 16
    assert pair.target.scheduler.counters.prefix_hits - before == 8


def test_a_prompt_is_counted_once(pair: Pair) -> None:
    """Not at the replica that only computes it, nor for a second choice, nor after a migration."""
    prompt, counters = _prompt(6), pair.target.scheduler.counters
    pair.answer(prompt)
    assert (counters.prompt_tokens, pair.source.scheduler.counters.prompt_tokens) == (PROMPT, 0)
    pair.answer(prompt, sampling=RowSampling(temperature=0.0, choice_index=1))
    pair.answer([*prompt, 7, 8], prompt_len=PROMPT)
    assert counters.prompt_tokens == PROMPT
    pair.answer(prompt)
    assert counters.prompt_tokens == 2 * PROMPT
