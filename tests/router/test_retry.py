"""The retry decisions of a choice: pure, so every case is tested."""

from random import Random
from typing import Any

import pytest

from headrace_router.core.attempt import Outcome
from headrace_router.core.errors import (
    ApiError,
    NoReplicaError,
    OverloadedError,
    ReplicaLostError,
)
from headrace_router.core.retry import LONGEST_PAUSE, MAX_REFUSALS, RETRY_SECONDS, RetryState


def _state(**options: Any) -> RetryState[str]:
    fields = {"max_attempts": 3, "migration_limit": 2, "patience": 5.0} | options
    return RetryState("m", **fields)  # type: ignore[arg-type]


def test_before_the_first_token_each_replica_is_tried_once() -> None:
    state = _state()
    state.ended("a", Outcome.LOST, begun=False)
    state.ended("b", Outcome.LOST, begun=False)
    assert state.excluded == ["a", "b"]
    with pytest.raises(ReplicaLostError):
        state.ended("c", Outcome.LOST, begun=False)


def test_the_error_names_the_cause() -> None:
    with pytest.raises(NoReplicaError):
        _state().not_placed(begun=False, now=0.0)
    refused = _state()
    refused.ended("a", Outcome.REFUSED, begun=False)
    with pytest.raises(OverloadedError):
        refused.not_placed(begun=False, now=0.0)
    lost = _state()
    lost.ended("a", Outcome.LOST, begun=False)
    with pytest.raises(ReplicaLostError, match="before it answered"):
        lost.not_placed(begun=False, now=0.0)


def test_the_wait_for_a_replica_is_bounded_separately_after_each_loss() -> None:
    state = _state()
    state.ended("a", Outcome.LOST, begun=True)
    for now in (10.0, 14.9):
        state.not_placed(begun=True, now=now)
    assert state.excluded == []
    state.ended("a", Outcome.LOST, begun=True)
    state.not_placed(begun=True, now=20.0)
    with pytest.raises(ReplicaLostError, match="within 5 s"):
        state.not_placed(begun=True, now=25.0)


def test_a_refused_stream_tries_the_other_replicas_and_then_all_again() -> None:
    state = _state(max_attempts=1)
    state.ended("a", Outcome.LOST, begun=True)
    state.ended("b", Outcome.REFUSED, begun=True)
    state.ended("c", Outcome.REFUSED, begun=True)
    assert state.excluded == ["a", "b", "c"] and state.migrations == 1
    state.not_placed(begun=True, now=0.0)
    assert state.excluded == []


def test_retries_are_always_bounded() -> None:
    """For every sequence of events the choice ends: after a number of losses, or after a time."""
    for seed in range(300):
        random = Random(seed)
        state = _state(max_attempts=random.randrange(1, 5), migration_limit=random.randrange(4))
        begun, now = False, 0.0
        try:
            for _ in range(10_000):
                now += random.random()
                if random.random() < 0.4:
                    state.not_placed(begun, now)
                else:
                    begun = begun or random.random() < 0.5
                    state.ended(random.choice("abc"), random.choice((Outcome.REFUSED, Outcome.LOST)), begun)
            assert begun and state.migrations <= state.migration_limit
        except ApiError:
            continue


@pytest.mark.parametrize("replicas", [1, 3, 40])
@pytest.mark.parametrize("patience", [5.0, 60.0, 1e9])
def test_refusals_by_all_replicas_end_the_stream(replicas: int, patience: float) -> None:
    """Each round is followed by a longer pause; a replica that was found and refuses is no progress."""
    random = Random(1)
    state = _state(patience=patience, jitter=random.random)
    now, tried, pauses = 0.0, 0, []
    state.ended("lost", Outcome.LOST, begun=True)
    with pytest.raises(OverloadedError, match="send the request again"):
        while True:
            free = [number for number in range(replicas) if str(number) not in state.excluded]
            if state.round_over:
                pauses.append(state.must_wait(now))
            elif not free:
                pauses.append(state.not_placed(True, now))
            else:
                tried += 1
                state.ended(str(free[0]), Outcome.REFUSED, begun=True)
                continue
            now += pauses[-1]
    assert tried <= MAX_REFUSALS and now <= min(patience, 220.0) + 1.5 * LONGEST_PAUSE
    assert pauses[0] < 1.5 * RETRY_SECONDS and max(pauses) <= 1.5 * LONGEST_PAUSE
    assert len(set(pauses)) == len(pauses), "with jitter"


def test_new_tokens_end_the_count_of_refusals() -> None:
    state = _state()
    for _ in range(MAX_REFUSALS):
        state.ended("a", Outcome.REFUSED, begun=True)
        state.not_placed(True, now=0.0)
        state.progressed()
    state.not_placed(True, now=100.0)


def test_a_choice_that_must_run_alone_ends_with_that_reason() -> None:
    state = _state()
    state.ended("a", Outcome.LOST, begun=True)
    state.alone = True
    state.must_wait(now=0.0)
    with pytest.raises(ReplicaLostError, match=r"2 replicas were lost .* none was free to run it alone within 5 s"):
        state.must_wait(now=5.0)


def test_a_choice_that_must_run_alone_and_is_refused_waits() -> None:
    """The replica was idle when it was chosen: another router was first."""
    state = _state()
    for replica in "ab":
        state.ended(replica, Outcome.LOST, begun=False)
    state.alone = True
    for now in (0.0, 4.9):
        state.ended("c", Outcome.REFUSED, begun=False)
        assert state.round_over and state.excluded == ["a", "b"]
        state.must_wait(now)
        assert not state.round_over
    with pytest.raises(ReplicaLostError, match="alone within 5 s"):
        state.must_wait(5.0)


def test_a_move_by_the_router_is_no_loss() -> None:
    state = _state(migration_limit=1)
    for replica in "abc":
        state.moved(replica)
    state.ended("d", Outcome.LOST, begun=True)
    assert state.migrations == 1 and state.excluded == ["d"]
