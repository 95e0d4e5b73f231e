"""Saves what the next controller of the cluster must know."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.core.snapshot import ControllerSnapshot

RECORD_SECONDS = 0.25  # between two looks at what the record must hold


async def keep_record(supervisor: Supervisor, save: Callable[[ControllerSnapshot], Awaitable[None]]) -> None:
    """Saves each new state soon after it changed, until cancelled. A failed `save` is repeated."""
    saved: ControllerSnapshot | None = None
    while True:
        snapshot = supervisor.snapshot()
        if snapshot != saved:
            await supervisor.retries.run("the record in Ray's GCS", partial(save, snapshot))
            saved = snapshot
        await asyncio.sleep(RECORD_SECONDS)
