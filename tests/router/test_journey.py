"""Where a choice goes next: pure, so every way is tried."""

from random import Random

import pytest

from headrace_router.errors import ApiError, NoReplicaError, OverloadedError, ReplicaLostError
from headrace_router.journey import Journey, Loss


def _journey(**options: float) -> Journey[str]:
    fields = {"max_attempts": 3, "migration_limit": 2, "patience": 5.0} | options
    return Journey("m", **fields)  # type: ignore[arg-type]


def test_before_the_first_token_each_replica_is_tried_once() -> None:
    journey = _journey()
    journey.ended("a", Loss.LOST, begun=False)
    journey.ended("b", Loss.LOST, begun=False)
    assert journey.excluded == ["a", "b"]
    with pytest.raises(ReplicaLostError):
        journey.ended("c", Loss.LOST, begun=False)


def test_the_error_says_what_happened() -> None:
    with pytest.raises(NoReplicaError):
        _journey().nowhere(begun=False, now=0.0)
    refused = _journey()
    refused.ended("a", Loss.REFUSED, begun=False)
    with pytest.raises(OverloadedError):
        refused.nowhere(begun=False, now=0.0)
    lost = _journey()
    lost.ended("a", Loss.LOST, begun=False)
    with pytest.raises(ReplicaLostError, match="before it answered"):
        lost.nowhere(begun=False, now=0.0)


def test_a_stream_waits_for_its_patience_each_time_anew() -> None:
    journey = _journey()
    journey.ended("a", Loss.LOST, begun=True)
    for now in (10.0, 14.9):
        journey.nowhere(begun=True, now=now)
    assert journey.excluded == []
    journey.placed()
    journey.ended("a", Loss.LOST, begun=True)
    journey.nowhere(begun=True, now=20.0)
    with pytest.raises(ReplicaLostError, match="within 5 s"):
        journey.nowhere(begun=True, now=25.0)


def test_a_stream_that_is_refused_asks_the_others_and_then_all_again() -> None:
    journey = _journey(max_attempts=1)
    journey.ended("a", Loss.LOST, begun=True)
    journey.ended("b", Loss.REFUSED, begun=True)
    journey.ended("c", Loss.REFUSED, begun=True)
    assert journey.excluded == ["a", "b", "c"] and journey.migrations == 1
    journey.nowhere(begun=True, now=0.0)
    assert journey.excluded == []


def test_no_replica_at_all_is_tried_for_ever() -> None:
    """Whatever happens, in whatever order, it ends: after so many losses, or so much time."""
    for seed in range(300):
        random = Random(seed)
        journey = _journey(max_attempts=random.randrange(1, 5), migration_limit=random.randrange(4))
        begun, now = False, 0.0
        try:
            for _ in range(10_000):
                now += random.random()
                if random.random() < 0.4:
                    journey.nowhere(begun, now)
                else:
                    journey.placed()
                    begun = begun or random.random() < 0.5
                    journey.ended(random.choice("abc"), random.choice(list(Loss)), begun)
            assert begun and journey.migrations <= journey.migration_limit
        except ApiError:
            continue
