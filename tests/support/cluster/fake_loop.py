"""A control loop on a FakeDriver, with short times."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from headrace_cluster.controller.control_loop import ControlLoop
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.replica_health import watch_health
from headrace_cluster.controller.status import status_document
from headrace_cluster.core.words import Words
from headrace_cluster.spec.cluster_spec import parse_spec
from support.cluster.fake_driver import FakeDriver
from support.members import MEMBER

HEALTH = {
    "interval_seconds": 0.05,
    "silence_seconds": 0.3,
    "replace_seconds": 0.4,
    "drain_seconds": 2,
    "start_seconds": 20,
}


class Controlled:
    """One controller; `words` is the record that it leaves."""

    def __init__(self, driver: FakeDriver, words: Words | None = None, **model: Any) -> None:
        spec = parse_spec({"models": [{"aliases": ["small"], **model}], "health": HEALTH})
        self.membership = Membership()
        self.saved: list[Words] = []
        self.words = words or Words()

        async def save(words: Words) -> None:
            driver._fail("save")
            self.saved.append(words)

        secrets = lambda: MEMBER.secret.fingerprints  # noqa: E731
        watch = partial(watch_health, MEMBER)
        self.loop = ControlLoop(spec, self.words, driver, self.membership, watch, secrets, save)
        self.planner = self.loop.planner

    def status(self) -> dict[str, Any]:
        return status_document(self.loop, self.membership)

    def states(self) -> list[str]:
        return [entry["state"] for entry in self.status()["replicas"]]

    def die(self) -> None:
        """As a killed process: what runs goes on."""
        for task in (*self.loop._tasks, *self.loop._watched.values(), *self.loop._streams.values()):
            task.cancel()


@asynccontextmanager
async def controlled(driver: FakeDriver, words: Words | None = None, **model: Any) -> AsyncIterator[Controlled]:
    """Runs until the end of the block, then ends all replicas."""
    made = Controlled(driver, words, **model)
    await made.loop.open()
    made.loop.start()
    try:
        yield made
    finally:
        await made.loop.stop()
