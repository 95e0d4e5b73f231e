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
    ReplicasLostError,
)
from headrace_router.core.retry import LONGEST_PAUSE, MAX_MOVES, MAX_REFUSALS, RETRY_SECONDS, RetryState


def _state(**options: Any) -> RetryState[str]:
    fields = {"max_attempts": 3, "migration_limit": 2, "patience": 5.0} | options
    return RetryState("m", **fields)  # type: ignore[arg-type]


def test_before_the_first_token_each_replica_is_tried_once() -> None:
    state = _state()
    state.ended("a", Outcome.LOST, begun=False, failed=True)
    state.ended("b", Outcome.LOST, begun=False, failed=True)
    assert state.excluded == ["a", "b"]
    with pytest.raises(ReplicaLostError):
        state.ended("c", Outcome.LOST, begun=False, failed=True)


def test_the_error_names_the_cause() -> None:
    with pytest.raises(NoReplicaError):
        _state().not_placed(begun=False, now=0.0)
    refused = _state()
    refused.ended("a", Outcome.REFUSED, begun=False, failed=True)
    with pytest.raises(OverloadedError):
        refused.not_placed(begun=False, now=0.0)
    lost = _state()
    lost.ended("a", Outcome.LOST, begun=False, failed=True)
    with pytest.raises(ReplicaLostError, match="before it answered"):
        lost.not_placed(begun=False, now=0.0)


def test_the_wait_for_a_replica_is_bounded_separately_after_each_loss() -> None:
    state = _state()
    state.ended("a", Outcome.LOST, begun=True, failed=True)
    for now in (10.0, 14.9):
        state.not_placed(begun=True, now=now)
    assert state.excluded == []
    state.ended("a", Outcome.LOST, begun=True, failed=True)
    state.not_placed(begun=True, now=20.0)
    with pytest.raises(ReplicaLostError, match="within 5 s"):
        state.not_placed(begun=True, now=25.0)


def test_a_refused_stream_tries_the_other_replicas_and_then_all_again() -> None:
    state = _state(max_attempts=1)
    state.ended("a", Outcome.LOST, begun=True, failed=True)
    state.ended("b", Outcome.REFUSED, begun=True, failed=True)
    state.ended("c", Outcome.REFUSED, begun=True, failed=True)
    assert state.excluded == ["a", "b", "c"] and state.losses == 1
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
                    state.ended(
                        random.choice("abc"),
                        random.choice((Outcome.REFUSED, Outcome.LOST)),
                        begun,
                        failed=random.random() < 0.9,
                    )
            assert begun and state.losses <= state.migration_limit
        except ApiError:
            continue


@pytest.mark.parametrize("replicas", [1, 3, 40])
@pytest.mark.parametrize("patience", [5.0, 60.0, 1e9])
def test_refusals_by_all_replicas_end_the_stream(replicas: int, patience: float) -> None:
    """Each round is followed by a longer pause; a replica that was found and refuses is no progress."""
    random = Random(1)
    state = _state(patience=patience, jitter=random.random)
    now, tried, pauses = 0.0, 0, []
    state.ended("lost", Outcome.LOST, begun=True, failed=True)
    with pytest.raises(OverloadedError, match="send the request again"):
        while True:
            free = [number for number in range(replicas) if str(number) not in state.excluded]
            if state.round_over:
                pauses.append(state.must_wait(now))
            elif not free:
                pauses.append(state.not_placed(True, now))
            else:
                tried += 1
                state.ended(str(free[0]), Outcome.REFUSED, begun=True, failed=True)
                continue
            now += pauses[-1]
    assert tried <= MAX_REFUSALS and now <= min(patience, 220.0) + 1.5 * LONGEST_PAUSE
    assert pauses[0] < 1.5 * RETRY_SECONDS and max(pauses) <= 1.5 * LONGEST_PAUSE
    assert len(set(pauses)) == len(pauses), "with jitter"


def test_new_tokens_end_the_count_of_refusals() -> None:
    state = _state()
    for _ in range(MAX_REFUSALS):
        state.ended("a", Outcome.REFUSED, begun=True, failed=True)
        state.not_placed(True, now=0.0)
        state.progressed()
    state.not_placed(True, now=100.0)


@pytest.mark.parametrize("begun", [False, True])
def test_a_second_lost_replica_ends_the_choice(begun: bool) -> None:
    """The choice may be the cause: a client that repeats it at once would lose the next ones."""
    state = _state(migration_limit=1)
    state.ended("a", Outcome.LOST, begun=begun, failed=True)
    with pytest.raises(ReplicasLostError, match=r"2 replicas were lost .* it is not run again") as error:
        state.ended("b", Outcome.LOST, begun=begun, failed=True)
    assert error.value.status == 422 and error.value.retry_after is None


def test_without_migration_the_first_loss_ends_the_choice() -> None:
    with pytest.raises(ReplicaLostError, match="send the request again") as error:
        _state(migration_limit=0).ended("a", Outcome.LOST, begun=True, failed=True)
    assert error.value.status == 503


def test_replicas_that_end_in_order_are_no_losses() -> None:
    state = _state(migration_limit=1)
    for _ in range(MAX_MOVES):
        state.ended("a", Outcome.LOST, begun=True, failed=False)
    assert state.losses == 0
    with pytest.raises(ReplicaLostError, match=f"{MAX_MOVES} times"):
        state.ended("a", Outcome.LOST, begun=True, failed=False)


def test_a_move_by_the_router_is_no_loss() -> None:
    state = _state(migration_limit=1)
    for replica in "abc":
        state.moved(replica)
    state.ended("d", Outcome.LOST, begun=True, failed=True)
    assert state.losses == 1 and state.excluded == ["d"]
