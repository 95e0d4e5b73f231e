"""After a lost controller: another one, and later attempts without end. The clock is a number."""

import pytest

from headrace_cluster.core.view import View
from headrace_cluster.errors import ControllerLostError, ControllerTakenError
from headrace_cluster.launch.controller_monitor import BACKOFF, WINDOW_SECONDS, ControllerMonitor
from headrace_proto.errors import ListenError


class _Controller:
    """Alive or lost, until it is started again."""

    def __init__(self) -> None:
        self.alive = True
        self.restarts = 0
        self.failures: list[Exception] = []  # of the next restarts

    def poll(self) -> View:
        if not self.alive:
            raise ControllerLostError("the controller's process ended")
        return View(
            ready=True,
            fatal="",
            stop_requested=False,
            progress=[],
            started={},
            roles={},
            routers=[],
            failures={},
        )

    def restart(self) -> None:
        self.restarts += 1
        if self.failures:
            raise self.failures.pop(0)
        self.alive = True


class _Bench:
    """A monitor with its controller, its clock and its messages."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.messages: list[str] = []
        self.controller = _Controller()
        self.monitor = ControllerMonitor(self.controller, self.messages.append, lambda: self.now, lambda: 0.0)

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


def test_another_controller_is_started_at_once(bench: _Bench) -> None:
    assert bench.monitor.poll() is not None
    bench.controller.alive = False
    assert bench.monitor.poll() is None and bench.controller.restarts == 0
    assert bench.monitor.poll() is not None and bench.controller.restarts == 1
    assert bench.messages == [
        "the controller's process ended; starting another one now, serving goes on",
        "a new controller runs",
    ]


def test_a_failed_restart_is_repeated_later(bench: _Bench) -> None:
    bench.controller.alive = False
    bench.controller.failures = [ListenError("port 8002 is in use")]
    began = bench.now
    assert bench.wait(10) is not None
    assert bench.controller.restarts == 2 and bench.now - began >= BACKOFF.first
    assert "port 8002 is in use; starting another one in 1 s, serving goes on" in bench.messages


def test_any_error_of_ray_is_a_lost_controller(bench: _Bench) -> None:
    bench.controller.alive = False
    bench.controller.failures = [RuntimeError("no GCS"), OSError()]
    assert bench.wait(10) is not None and bench.controller.restarts == 3
    assert any("no GCS; starting another one" in message for message in bench.messages)
    assert any(message.startswith("OSError; starting another one") for message in bench.messages)


def test_attempts_never_end(bench: _Bench) -> None:
    """An hour of losses: the pause grows to its limit, and the cluster goes on."""
    waits = []
    for _ in range(120):
        bench.controller.alive = False
        began = bench.now
        assert bench.wait(40) is not None
        waits.append(round(bench.now - began))
    assert waits[:6] == [0, 1, 2, 4, 8, 16]
    assert max(waits) == BACKOFF.limit


def test_a_cluster_that_another_process_keeps_is_left_to_it(bench: _Bench) -> None:
    bench.controller.alive = False
    bench.controller.failures = [ControllerTakenError("another process has taken over")]
    with pytest.raises(ControllerTakenError):
        bench.wait(1)


def test_earlier_losses_do_not_count(bench: _Bench) -> None:
    for _ in range(15):
        bench.controller.alive = False
        assert bench.wait(1) is not None
        bench.now += WINDOW_SECONDS
    assert bench.controller.restarts == 15
