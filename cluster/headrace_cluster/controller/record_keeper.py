"""Saves what the next controller of the cluster must know."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.core.snapshot import ControllerSnapshot

RECORD_SECONDS = 0.25  # between two looks at what the record must hold


class RecordKeeper:
    """Saves each new state soon after it changed. `run` it as a task of one event loop."""

    def __init__(self, supervisor: Supervisor, save: Callable[[ControllerSnapshot], Awaitable[None]]) -> None:
        self._supervisor = supervisor
        self._save = save
        self._begun = self._done = 0  # rounds
        self._wake = asyncio.Event()
        self._ended = asyncio.Condition()  # of each round

    async def run(self) -> None:
        """Until it is cancelled. A failed `save` is repeated."""
        saved: ControllerSnapshot | None = None
        while True:
            self._wake.clear()
            self._begun += 1
            snapshot = self._supervisor.snapshot()
            if snapshot != saved:
                await self._supervisor.retries.run("the record in Ray's GCS", partial(self._save, snapshot))
                saved = snapshot
            async with self._ended:
                self._done = self._begun
                self._ended.notify_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECORD_SECONDS):
                    await self._wake.wait()

    async def saved(self) -> None:
        """Returns when the state of this moment, or a later one, is saved."""
        first = self._begun + 1  # the round that runs now may have an older state
        self._wake.set()
        async with self._ended:
            await self._ended.wait_for(lambda: self._done >= first)
