"""Guided requests with the fake runner: a mask is built from all previous tokens, at any depth of the loop."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from headrace_worker.core.plan import StepPlan
from headrace_worker.core.request import Finish, Request
from support.worker.engine_bench import make_bench
from support.worker.fake_model import undisturbed, undisturbed_of
from support.worker.guides import RuleGuide, exactly, number, one_in

VOCABULARY = 1100
END = 2
DIGITS = range(100, 1000, 7)
MAKERS: list[Callable[[], RuleGuide] | None] = [
    None,
    lambda: RuleGuide(VOCABULARY, one_in(7, VOCABULARY)),
    lambda: RuleGuide(VOCABULARY, one_in(40, VOCABULARY), longest=5),
    None,
    lambda: RuleGuide(VOCABULARY, number(DIGITS, END, 6)),
    lambda: RuleGuide(VOCABULARY, exactly([5, 4, 3, 2, 9, 8, 7]), longest=7),
]
LOOPS = [(0, 1), (1, 1), (2, 1), (0, 2), (0, 3)]  # depth, batches


def prompt_of(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(10, 900) for _ in range(length)]


def requests_of(bench: Any, count: int, max_tokens: int = 12) -> tuple[list[Any], list[Callable[[], RuleGuide] | None]]:
    makers = [MAKERS[index % len(MAKERS)] for index in range(count)]
    made = [
        bench.request(
            prompt_of(index, 1 + index * 5 % 23),
            max_tokens - index % 4,
            stop_ids=frozenset({END}) if maker is MAKERS[4] else frozenset(),
            guide=maker() if maker is not None else None,
        )
        for index, maker in enumerate(makers)
    ]
    return made, makers


def check(
    requests: Sequence[Any],
    makers: Sequence[Callable[[], RuleGuide] | None],
    emitted: dict[bytes, list[int]],
) -> None:
    for request, maker in zip(requests, makers, strict=True):
        prompt, count = request.tokens[: request.prompt_len], request.max_len - request.prompt_len
        whole = (
            undisturbed(prompt, count) if maker is None else undisturbed_of(prompt, count, maker(), request.stop_ids)
        )
        tokens = emitted.get(request.attempt_id, [])
        if request.finish in (Finish.STOP, Finish.COMPLETE, Finish.LENGTH):
            assert tokens == whole
        else:
            assert request.finish in (Finish.CANCELLED, Finish.ERROR) and tokens == whole[: len(tokens)]


@pytest.mark.parametrize(("depth", "batches"), LOOPS)
@pytest.mark.parametrize("budget", [8, 64])
def test_tokens_are_those_of_a_plain_loop(depth: int, batches: int, budget: int) -> None:
    bench = make_bench(num_blocks=256, budget=budget, depth=depth, batches=batches)
    requests, makers = requests_of(bench, 24)
    emitted = bench.run(requests)
    check(requests, makers, emitted)
    assert {request.finish for request in requests} <= {Finish.STOP, Finish.COMPLETE, Finish.LENGTH}
    assert emitted[requests[5].attempt_id] == [5, 4, 3, 2, 9, 8, 7][: 12 - 5 % 4]
    assert bench.kv.pool.used == 0


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules(seed: int) -> None:
    """Cancels, tiny pools, steps that fail when they are sampled or collected: no request gets a wrong token."""
    random = Random(seed)
    depth, batches = LOOPS[seed % len(LOOPS)]
    bench = make_bench(num_blocks=12 + random.randrange(40), budget=16, depth=depth, batches=batches)
    failures = 0

    def fail(plan: StepPlan) -> None:
        nonlocal failures
        if len(plan.work) > 2 and (failures == 0 or random.random() < 0.05):
            failures += 1
            raise ArithmeticError

    bench.runner.on_collect = fail
    if batches == 1:  # with several ranks a sampling error is raised when the step is collected
        bench.runner.on_draw = fail
    requests, makers = requests_of(bench, 24)
    emitted: dict[bytes, list[int]] = {}
    for request in requests:
        assert bench.engine.submit(request) is None
    while bench.engine.has_work:
        if random.random() < 0.03:
            bench.engine.cancel(random.choice(requests).attempt_id)
        for output in bench.engine.step():
            emitted.setdefault(output.attempt_id, []).extend(output.token_ids)
        bench.scheduler.check()
    check(requests, makers, emitted)
    assert failures > 0
    # If all but one request of a failed step were cancelled, the last one counts as the cause.
    assert sum(request.finish is Finish.ERROR for request in requests) <= 1
    assert bench.kv.pool.used == 0


def test_the_forward_pass_of_a_guided_step_does_not_wait_for_the_tokens_before_it() -> None:
    bench = make_bench(depth=1)
    events: list[str] = []
    guide = RuleGuide(VOCABULARY, one_in(7, VOCABULARY))
    mask = guide.mask

    def recording_mask() -> Any:
        events.append(f"mask after {len(guide.taken)}")
        return mask()

    guide.mask = recording_mask  # type: ignore[method-assign]
    bench.runner.on_launch = lambda plan: events.append("launch")
    bench.runner.on_collect = lambda plan: events.append("collect")
    bench.run([bench.request([5, 6, 7], 3, guide=guide)])
    assert events == [
        "launch", "mask after 0",
        "launch", "collect", "mask after 1",
        "launch", "collect", "mask after 2", "collect",
    ]  # fmt: skip


@pytest.mark.parametrize(("depth", "batches"), LOOPS)
def test_a_guide_that_raises_ends_its_own_request(depth: int, batches: int) -> None:
    """One raises for its third mask, one for its fourth token, one when it is asked whether it is finished."""
    bench = make_bench(depth=depth, batches=batches)

    class Broken(RuleGuide):
        def __init__(self, where: str) -> None:
            super().__init__(VOCABULARY, one_in(7, VOCABULARY))
            self.where = where

        def mask(self) -> Any:
            if self.where == "mask" and len(self.taken) == 2:
                raise LookupError
            return super().mask()

        def advance(self, token: int) -> None:
            if self.where == "advance" and len(self.taken) == 3:
                raise LookupError
            super().advance(token)

        @property
        def finished(self) -> bool:
            if self.where == "finished" and len(self.taken) == 2:
                raise LookupError
            return False

    requests, makers = requests_of(bench, 6)
    broken = [
        bench.request(prompt_of(i, 5), guide=Broken(name)) for i, name in enumerate(("mask", "advance", "finished"))
    ]
    emitted = bench.run([*requests, *broken])
    check(requests, makers, emitted)
    assert [request.finish for request in broken] == [Finish.ERROR] * 3
    assert [len(emitted[request.attempt_id]) for request in broken] == [2, 3, 1]
    assert bench.kv.pool.used == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("known", [1, 3, 5])
def test_outputs_of_an_earlier_attempt_restore_the_guides_state(depth: int, known: int) -> None:
    for maker in filter(None, MAKERS):
        prompt = prompt_of(3, 9)
        whole = undisturbed_of(prompt, 12, maker(), frozenset({END}) if maker is MAKERS[4] else frozenset())
        if len(whole) <= known:
            continue
        bench = make_bench(depth=depth)
        fresh = bench.request(prompt, 12, stop_ids=frozenset({END}) if maker is MAKERS[4] else frozenset())
        moved = Request(
            attempt_id=fresh.attempt_id,
            tokens=prompt + whole[:known],
            prompt_len=len(prompt),
            max_len=fresh.max_len,
            sampling=fresh.sampling,
            stop_ids=fresh.stop_ids,
            chain=fresh.chain,
            arrival=0.0,
            guide=maker(),
        )
        assert bench.engine.submit(moved) is None
        got: list[int] = []
        while bench.engine.has_work:
            got += [token for output in bench.engine.step() for token in output.token_ids]
        assert got == whole[known:]
