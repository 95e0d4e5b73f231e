"""Calls of the driver that are repeated until they succeed."""

import asyncio
from functools import partial

from headrace_cluster.controller.build import Build
from headrace_cluster.controller.retries import Retries
from headrace_cluster.core.driver import STOP_SECONDS, AdoptedBuild, ReplicaDriver
from headrace_cluster.core.naming import ReplicaName

PROGRESS_SECONDS = 0.5


class RepeatedCalls:
    """Of one driver. `headrace status` shows those that fail."""

    def __init__(self, driver: ReplicaDriver, retries: Retries) -> None:
        self._driver = driver
        self._retries = retries

    async def send_secret(self, name: ReplicaName) -> None:
        """See ReplicaDriver."""
        send = partial(self._driver.send_secret, name)
        await self._retries.run(f"the secret for {name.replica_id}", send)

    async def report(self, name: ReplicaName) -> AdoptedBuild | None:
        """See ReplicaDriver. Returns once every rank has replied, or one has ended."""
        return await self._retries.run(f"the report of {name.replica_id}", partial(self._driver.report, name))

    async def record_reports(self, name: ReplicaName, build: Build) -> None:
        """Keeps what the ranks report, for a next controller to which they do not reply."""
        found = await self.report(name)
        if found is not None:
            build.reports, build.ranks = found.reports, found.ranks

    async def stop(self, name: ReplicaName, seconds: float = STOP_SECONDS) -> None:
        """Returns when nothing of the build exists: the next one needs its memory."""
        await self._retries.run(f"the end of {name.replica_id}", partial(self._driver.stop, name, seconds))

    async def poll_progress(self, name: ReplicaName, build: Build) -> None:
        """Until it is cancelled."""
        poll = partial(self._driver.progress, name)
        while True:
            progress = await self._retries.run(f"the progress of {name.replica_id}", poll)
            build.progress = progress or build.progress
            await asyncio.sleep(PROGRESS_SECONDS)
