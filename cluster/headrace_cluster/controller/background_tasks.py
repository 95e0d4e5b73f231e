"""Tasks that nothing awaits."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class BackgroundTasks:
    """Holds a reference to each task until it ends, since asyncio has weak ones only, and reports its error."""

    def __init__(self, report: Callable[[str, BaseException], None]) -> None:
        """report: receives what failed, and its error."""
        self._report = report
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs it in the current event loop."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report("a task of the controller", error)
