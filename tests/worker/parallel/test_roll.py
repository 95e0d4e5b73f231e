"""Whose silence is too long: counted in ticks."""

import pytest

from headrace_worker.parallel.roll import Roll


@pytest.fixture
def roll() -> Roll:
    made = Roll(limit=3, parting=2)
    made.add(1)
    made.add(2)
    return made


def test_who_is_heard_of_is_never_named(roll: Roll) -> None:
    for _ in range(100):
        assert roll.tick() == []
        roll.heard(1)
        roll.heard(2)


def test_silence_beyond_the_limit_is_named_once(roll: Roll) -> None:
    named = []
    for _ in range(20):
        named += roll.tick()
        roll.heard(2)
    assert named == [1]


def test_it_is_named_at_the_first_tick_beyond_the_limit(roll: Roll) -> None:
    assert [roll.tick() for _ in range(4)] == [[], [], [], [1, 2]]


def test_a_listener_that_stood_still_accuses_nobody(roll: Roll) -> None:
    """A second, or an hour, between two ticks is one tick."""
    roll.tick()
    roll.heard(1)
    roll.heard(2)
    assert roll.tick() == []


def test_a_longer_patience(roll: Roll) -> None:
    roll.limit = 5
    assert [bool(roll.tick()) for _ in range(6)] == [False] * 5 + [True]


def test_who_left_is_waited_for_only_as_long_as_a_parting_takes(roll: Roll) -> None:
    roll.limit = 100
    roll.tick()
    roll.left(1)
    assert [roll.tick() for _ in range(4)] == [[], [], [1], []]
    assert roll.has_left(1) and not roll.has_left(2)


def test_whose_end_is_known_is_not_silent(roll: Roll) -> None:
    roll.strike(1)
    roll.heard(1)
    assert [roll.tick() for _ in range(5)] == [[], [], [], [2], []]


def test_who_was_added_twice_or_never_changes_nothing(roll: Roll) -> None:
    roll.tick()
    roll.add(1)
    roll.heard(7)
    assert [roll.tick() for _ in range(3)] == [[], [], [1, 2]]
