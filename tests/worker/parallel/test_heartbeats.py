"""Detection of silent peers, in ticks."""

import pytest

from headrace_worker.comm.failure_detection import HeartbeatTracker


@pytest.fixture
def heartbeats() -> HeartbeatTracker:
    made = HeartbeatTracker(limit=3, parting=2)
    made.add(1)
    made.add(2)
    return made


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


def test_a_peer_that_left_is_overdue_after_the_parting_ticks(heartbeats: HeartbeatTracker) -> None:
    heartbeats.limit = 100
    heartbeats.tick()
    heartbeats.record_leaving(1)
    assert [heartbeats.tick() for _ in range(4)] == [[], [], [1], []]
    assert heartbeats.has_left(1) and not heartbeats.has_left(2)
