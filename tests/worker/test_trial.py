"""A request that was present when replicas were lost runs alone on its replica, for all routers."""

from collections.abc import Callable
from typing import Any

from headrace_proto.trial import RESERVED_SECONDS, TRIAL_SECONDS, TRIAL_TOKENS, WHOLE_ANSWER
from headrace_worker.core.request import Finish

Make = Callable[..., Any]


def test_nothing_runs_beside_a_request_that_must_run_alone(make_bench: Make) -> None:
    bench = make_bench()
    suspect = bench.request([1, 2, 3], max_tokens=2 * TRIAL_TOKENS)
    suspect.trial_tokens = TRIAL_TOKENS
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
    suspect.trial_tokens = TRIAL_TOKENS
    assert bench.engine.submit(other) is None
    refusal = bench.engine.submit(suspect)
    assert refusal.finish is Finish.REFUSED and "alone" in refusal.error
    bench.engine.cancel(other.attempt_id)
    assert bench.engine.submit(suspect) is None


def test_the_end_of_a_request_ends_its_trial(make_bench: Make) -> None:
    bench = make_bench()
    for number in range(3):
        suspect = bench.request([number + 1] * 3)
        suspect.trial_tokens = TRIAL_TOKENS
        assert bench.engine.submit(suspect) is None
        assert bench.engine.submit(bench.request([9, 9, 9])).finish is Finish.REFUSED
        bench.engine.cancel(suspect.attempt_id)
    assert bench.engine.submit(bench.request([9, 9, 9])) is None


def test_trials_have_half_of_the_time_at_most(make_bench: Make) -> None:
    """Whatever the routers send: after one, others are accepted for as long as it took."""
    bench = make_bench()
    number = 0

    def submit(trial_tokens: int) -> Any:
        nonlocal number
        number += 1
        request = bench.request([number, 2, 3])
        request.trial_tokens = trial_tokens
        refusal = bench.engine.submit(request)
        assert refusal is None or refusal.finish is Finish.REFUSED
        return None if refusal is not None else request

    def others_accepted() -> bool:
        other = submit(0)
        if other is not None:
            bench.engine.cancel(other.attempt_id)
        return other is not None

    share = 0.0
    trial = None
    for _ in range(4000):
        bench.clock.now += 0.25
        bench.engine.reserve()  # a router that asks without end
        trial = submit(WHOLE_ANSWER) or trial
        share += others_accepted() / 4000
        bench.engine.load()
        if trial is not None and bench.clock.now % 40 < 0.25:
            bench.engine.cancel(trial.attempt_id)
            trial = None
    assert 0.45 < share < 0.7


def test_a_trial_is_over_after_a_while(make_bench: Make) -> None:
    bench = make_bench()
    suspect = bench.request([1, 2, 3])
    suspect.trial_tokens = WHOLE_ANSWER
    assert bench.engine.submit(suspect) is None
    assert bench.engine.load().reserved
    bench.clock.now += TRIAL_SECONDS - 0.1
    assert bench.engine.submit(bench.request([4, 5, 6])) is not None
    bench.clock.now += 0.1
    assert bench.engine.submit(bench.request([4, 5, 6])) is None
    assert not bench.engine.load().reserved


def test_a_reserved_replica_reports_it_and_accepts_others(make_bench: Make) -> None:
    bench = make_bench()
    other, suspect = bench.request([1, 2, 3]), bench.request([4, 5, 6])
    suspect.trial_tokens = TRIAL_TOKENS
    bench.engine.reserve()
    assert bench.engine.load().reserved
    assert bench.engine.submit(other) is None
    bench.clock.now += RESERVED_SECONDS - 0.1
    bench.engine.reserve()
    bench.clock.now += RESERVED_SECONDS - 0.1
    assert bench.engine.load().reserved
    assert bench.engine.submit(suspect) is not None
    bench.engine.cancel(other.attempt_id)
    assert bench.engine.submit(suspect) is None
    bench.clock.now += 1.0
    assert bench.engine.load().reserved
    bench.engine.cancel(suspect.attempt_id)
    assert not bench.engine.load().reserved
    bench.engine.reserve()
    assert not bench.engine.load().reserved, "others have their turn"
    bench.clock.now += 2 * RESERVED_SECONDS + 1.0
    bench.engine.reserve()
    assert bench.engine.load().reserved
    bench.clock.now += RESERVED_SECONDS
    assert not bench.engine.load().reserved, "the router asks no more"


def test_a_reservation_is_not_renewed_for_ever(make_bench: Make) -> None:
    bench = make_bench()
    reserved = 0
    for _ in range(int(10 * TRIAL_SECONDS)):
        bench.engine.reserve()
        reserved += bench.engine.load().reserved
        bench.clock.now += 1.0
    assert reserved <= 5.1 * TRIAL_SECONDS
