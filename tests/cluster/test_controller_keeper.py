"""What follows a lost controller: another one, a later try, the end. The clock is a number."""

import pytest

from headrace_cluster.controller.memory import ControllerMemory
from headrace_cluster.controller.view import View
from headrace_cluster.controller_keeper import RETURN_SECONDS, WINDOW_SECONDS, ControllerKeeper
from headrace_cluster.errors import ControllerFailedError, ControllerLostError
from headrace_proto.errors import HeadraceError, ListenError


class _Session:
    """A cluster whose controller lives or does not."""

    def __init__(self) -> None:
        self.alive = True
        self.created = 1
        self.returns: list[int | None] = []  # what each new controller was told to remember
        self.failures: list[HeadraceError] = []  # of the next returns

    def view(self) -> View:
        if not self.alive:
            raise ControllerLostError("the controller's process ended")
        memory = ControllerMemory(created=self.created)
        return View(
            ready=True,
            fatal="",
            stop_requested=False,
            replicas=1,
            progress=[],
            started={},
            roles={},
            routers=[],
            memory=memory,
            failures={},
        )

    def return_controller(self, memory: ControllerMemory | None) -> None:
        self.returns.append(memory.created if memory is not None else None)
        if self.failures:
            raise self.failures.pop(0)
        self.alive = True


class _Desk:
    """A keeper with its session, its clock and what it said."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.said: list[str] = []
        self.session = _Session()
        self.keeper = ControllerKeeper(self.session, self.said.append, lambda: self.now)

    def wait(self, seconds: float) -> View | None:
        """The view after so long, looked for ten times a second; the first that there is."""
        until = self.now + seconds
        while True:
            view = self.keeper.look()
            if view is not None or self.now >= until:
                return view
            self.now += 0.1


@pytest.fixture
def desk() -> _Desk:
    return _Desk()


def test_a_lost_controller_is_followed_by_one_that_remembers(desk: _Desk) -> None:
    assert desk.keeper.look() is not None
    desk.session.created = 2
    desk.keeper.look()
    desk.session.alive = False
    assert desk.keeper.look() is None and desk.session.returns == []
    assert desk.keeper.look() is not None and desk.session.returns == [2]
    assert desk.said == [
        "the controller's process ended; starting another one now, serving goes on",
        "the controller is back",
    ]


def test_one_that_is_lost_before_the_first_look_has_nothing_to_remember(desk: _Desk) -> None:
    desk.session.alive = False
    assert desk.wait(1) is not None and desk.session.returns == [None]


def test_a_return_that_fails_is_tried_again_later(desk: _Desk) -> None:
    desk.session.alive = False
    desk.session.failures = [ListenError("port 8002 is in use")]
    began = desk.now
    assert desk.wait(10) is not None
    assert len(desk.session.returns) == 2 and desk.now - began >= RETURN_SECONDS[1]
    assert "port 8002 is in use; starting another one in 1 s, serving goes on" in desk.said


def test_a_crash_loop_ends_the_cluster(desk: _Desk) -> None:
    waits = []
    with pytest.raises(ControllerFailedError, match="6th time"):
        while True:
            desk.session.alive = False
            began = desk.now
            assert desk.wait(20) is not None
            waits.append(round(desk.now - began))
    assert waits == [0, 1, 2, 4, 8]


def test_losses_of_long_ago_do_not_count(desk: _Desk) -> None:
    for _ in range(3 * len(RETURN_SECONDS)):
        desk.session.alive = False
        assert desk.wait(1) is not None
        desk.now += WINDOW_SECONDS
    assert len(desk.session.returns) == 3 * len(RETURN_SECONDS)
