"""The seconds of a chunk's pieces: without what the source or the target had to do first."""

import pytest

from headrace_worker.kv_transfer.send_clock import SendClock


def test_waits_do_not_count() -> None:
    now = 100.0
    clock = SendClock(lambda: now)
    assert clock.seconds == 0
    now += 5.0  # the target's step
    clock.sent(10)
    assert clock.seconds == 5, "nothing else is known"
    for _ in range(3):
        with clock.paused():
            now += 7.0  # a layer is computed
        now += 0.5
        clock.sent(10)
    assert clock.seconds == pytest.approx(4 * 0.5)
