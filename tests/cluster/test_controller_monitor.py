"""After a lost controller: another one, a later attempt, the end. The clock is a number."""

import pytest

from headrace_cluster.core.snapshot import ControllerSnapshot
from headrace_cluster.core.view import View
from headrace_cluster.errors import ControllerFailedError, ControllerLostError
from headrace_cluster.launch.controller_monitor import RESTART_SECONDS, WINDOW_SECONDS, ControllerMonitor
from headrace_proto.errors import HeadraceError, ListenError


class _Controller:
    """Alive or lost, until it is started again."""

    def __init__(self) -> None:
        self.alive = True
        self.created = 1
        self.restarts: list[int | None] = []  # `created` of the snapshot that each new controller received
        self.failures: list[HeadraceError] = []  # of the next restarts

    def view(self) -> View:
        if not self.alive:
            raise ControllerLostError("the controller's process ended")
        snapshot = ControllerSnapshot(created=self.created)
        return View(
            ready=True,
            fatal="",
            stop_requested=False,
            progress=[],
            started={},
            roles={},
            routers=[],
            snapshot=snapshot,
            failures={},
        )

    def restart(self, snapshot: ControllerSnapshot | None) -> None:
        self.restarts.append(snapshot.created if snapshot is not None else None)
        if self.failures:
            raise self.failures.pop(0)
        self.alive = True


class _Bench:
    """A monitor with its controller, its clock and its messages."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.messages: list[str] = []
        self.controller = _Controller()
        self.monitor = ControllerMonitor(self.controller, self.messages.append, lambda: self.now)

    def wait(self, seconds: float) -> View | None:
        """The first view within `seconds`, with ten polls per second."""
        until = self.now + seconds
        while True:
            view = self.monitor.poll()
            if view is not None or self.now >= until:
                return view
            self.now += 0.1


@pytest.fixture
def bench() -> _Bench:
    return _Bench()


def test_the_next_controller_receives_the_last_snapshot(bench: _Bench) -> None:
    assert bench.monitor.poll() is not None
    bench.controller.created = 2
    bench.monitor.poll()
    bench.controller.alive = False
    assert bench.monitor.poll() is None and bench.controller.restarts == []
    assert bench.monitor.poll() is not None and bench.controller.restarts == [2]
    assert bench.messages == [
        "the controller's process ended; starting another one now, serving goes on",
        "a new controller runs",
    ]


def test_without_a_view_there_is_no_snapshot(bench: _Bench) -> None:
    bench.controller.alive = False
    assert bench.wait(1) is not None and bench.controller.restarts == [None]


def test_a_failed_restart_is_repeated_later(bench: _Bench) -> None:
    bench.controller.alive = False
    bench.controller.failures = [ListenError("port 8002 is in use")]
    began = bench.now
    assert bench.wait(10) is not None
    assert len(bench.controller.restarts) == 2 and bench.now - began >= RESTART_SECONDS[1]
    assert "port 8002 is in use; starting another one in 1 s, serving goes on" in bench.messages


def test_a_crash_loop_ends_the_cluster(bench: _Bench) -> None:
    waits = []
    with pytest.raises(ControllerFailedError, match="6th time"):
        while True:
            bench.controller.alive = False
            began = bench.now
            assert bench.wait(20) is not None
            waits.append(round(bench.now - began))
    assert waits == [0, 1, 2, 4, 8]


def test_earlier_losses_do_not_count(bench: _Bench) -> None:
    for _ in range(3 * len(RESTART_SECONDS)):
        bench.controller.alive = False
        assert bench.wait(1) is not None
        bench.now += WINDOW_SECONDS
    assert len(bench.controller.restarts) == 3 * len(RESTART_SECONDS)
