"""Detection of silent peers, in ticks."""

import pytest

from headrace_worker.comm.heartbeats import HeartbeatTracker


@pytest.fixture
def heartbeats() -> HeartbeatTracker:
    made = HeartbeatTracker(limit=3, parting=2)
    made.add(1)
    made.add(2)
    return made


def test_a_peer_that_sends_frames_is_never_overdue(heartbeats: HeartbeatTracker) -> None:
    for _ in range(100):
        assert heartbeats.tick() == []
        heartbeats.record_frame(1)
        heartbeats.record_frame(2)


def test_a_silent_peer_is_overdue_once(heartbeats: HeartbeatTracker) -> None:
    overdue = []
    for _ in range(20):
        overdue += heartbeats.tick()
        heartbeats.record_frame(2)
    assert overdue == [1]


def test_it_is_overdue_at_the_first_tick_beyond_the_limit(heartbeats: HeartbeatTracker) -> None:
    assert [heartbeats.tick() for _ in range(4)] == [[], [], [], [1, 2]]


def test_a_stalled_tracker_reports_no_peer(heartbeats: HeartbeatTracker) -> None:
    """A second, or an hour, between two ticks is one tick."""
    heartbeats.tick()
    heartbeats.record_frame(1)
    heartbeats.record_frame(2)
    assert heartbeats.tick() == []


def test_a_longer_limit(heartbeats: HeartbeatTracker) -> None:
    heartbeats.limit = 5
    assert [bool(heartbeats.tick()) for _ in range(6)] == [False] * 5 + [True]


def test_a_peer_that_left_is_overdue_after_the_parting_ticks(heartbeats: HeartbeatTracker) -> None:
    heartbeats.limit = 100
    heartbeats.tick()
    heartbeats.record_leaving(1)
    assert [heartbeats.tick() for _ in range(4)] == [[], [], [1], []]
    assert heartbeats.has_left(1) and not heartbeats.has_left(2)


def test_a_removed_peer_is_not_overdue(heartbeats: HeartbeatTracker) -> None:
    heartbeats.remove(1)
    heartbeats.record_frame(1)
    assert [heartbeats.tick() for _ in range(5)] == [[], [], [], [2], []]


def test_adding_twice_and_unknown_peers_have_no_effect(heartbeats: HeartbeatTracker) -> None:
    heartbeats.tick()
    heartbeats.add(1)
    heartbeats.record_frame(7)
    assert [heartbeats.tick() for _ in range(3)] == [[], [], [1, 2]]
