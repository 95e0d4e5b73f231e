"""A request that was present when replicas were lost runs alone on its replica, for all routers (I25)."""

from collections.abc import Callable
from typing import Any

from headrace_proto.trial import TRIAL_TOKENS
from headrace_worker.core.request import Finish

Make = Callable[..., Any]


def test_nothing_runs_beside_a_request_that_must_run_alone(make_bench: Make) -> None:
    bench = make_bench()
    suspect = bench.request([1, 2, 3], max_tokens=2 * TRIAL_TOKENS)
    suspect.alone = True
    assert bench.engine.submit(suspect) is None
    tokens = 0
    while tokens < TRIAL_TOKENS:
        refusal = bench.engine.submit(bench.request([4, 5, 6]))
        assert refusal.finish is Finish.REFUSED and "alone" in refusal.error
        tokens += sum(len(output.token_ids) for output in bench.engine.step())
    assert bench.engine.submit(bench.request([4, 5, 6])) is None


def test_a_request_that_must_run_alone_is_refused_beside_others(make_bench: Make) -> None:
    bench = make_bench()
    other, suspect = bench.request([1, 2, 3]), bench.request([4, 5, 6])
    suspect.alone = True
    assert bench.engine.submit(other) is None
    refusal = bench.engine.submit(suspect)
    assert refusal.finish is Finish.REFUSED and "alone" in refusal.error
    bench.engine.cancel(other.attempt_id)
    assert bench.engine.submit(suspect) is None


def test_the_end_of_a_request_ends_its_trial(make_bench: Make) -> None:
    bench = make_bench()
    for number in range(3):
        suspect = bench.request([number + 1] * 3)
        suspect.alone = True
        assert bench.engine.submit(suspect) is None
        assert bench.engine.submit(bench.request([9, 9, 9])).finish is Finish.REFUSED
        bench.engine.cancel(suspect.attempt_id)
    assert bench.engine.submit(bench.request([9, 9, 9])) is None
