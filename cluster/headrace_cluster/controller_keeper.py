"""Looks at the controller, and starts another one when it is lost: serving goes on meanwhile."""

import time
from collections.abc import Callable
from typing import Protocol

from headrace_cluster.controller.memory import ControllerMemory
from headrace_cluster.controller.view import View
from headrace_cluster.errors import ControllerFailedError, ControllerLostError
from headrace_proto.errors import HeadraceError

RETURN_SECONDS = (0.0, 1.0, 2.0, 4.0, 8.0)  # before each try to start another one
WINDOW_SECONDS = 120.0  # a loss longer ago does not count


class Controlled(Protocol):
    """What a keeper needs of a ClusterSession."""

    def view(self) -> View:
        """How the cluster is. Raises ControllerLostError."""
        ...

    def return_controller(self, memory: ControllerMemory | None) -> None:
        """Starts another controller. Raises HeadraceError."""
        ...


class ControllerKeeper:
    """Of one thread. It never waits for a next try: `look` is called again and again anyway."""

    def __init__(
        self, session: Controlled, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session = session
        self._say = say
        self._clock = clock
        self._memory: ControllerMemory | None = None
        self._losses: list[float] = []
        self._return_at: float | None = None  # when the next one is started; None while one is there

    def look(self) -> View | None:
        """How the cluster is; None while it has no controller.

        Raises ControllerFailedError once controllers end again and again, and what `view` raises for the cluster.
        """
        if self._return_at is not None:
            if self._clock() < self._return_at:
                return None
            try:
                self._session.return_controller(self._memory)
            except HeadraceError as error:
                self._lost(str(error))
                return None
            self._return_at = None
            self._say("the controller is back")
        try:
            view = self._session.view()
        except ControllerLostError as error:
            self._lost(str(error))
            return None
        self._memory = view.memory
        return view

    def _lost(self, cause: str) -> None:
        now = self._clock()
        self._losses = [when for when in self._losses if now - when < WINDOW_SECONDS] + [now]
        if len(self._losses) > len(RETURN_SECONDS):
            raise ControllerFailedError(
                f"{cause}; that was the {len(self._losses)}th time in {WINDOW_SECONDS:g} s, so this cluster is given up"
            )
        delay = RETURN_SECONDS[len(self._losses) - 1]
        self._return_at = now + delay
        soon = f"in {delay:g} s" if delay else "now"
        self._say(f"{cause}; starting another one {soon}, serving goes on")
