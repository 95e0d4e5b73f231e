"""How a changed secret of the cluster reaches the builds that are up."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from headrace_cluster.controller.health import watch_health
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.spec.cluster_spec import parse_spec
from support.cluster.fake_driver import FakeDriver
from support.members import MEMBER


def test_every_build_that_is_up_gets_it_even_if_a_call_fails(
    driver: FakeDriver, eventually: Callable[..., Any]
) -> None:
    async def run() -> None:
        spec = parse_spec({"models": [{"replicas": 2}]})
        supervisor = Supervisor(spec, driver, Membership(), partial(watch_health, MEMBER))
        supervisor.start()
        names = [ReplicaName(f"smollm2-{place}", 1) for place in range(2)]
        await eventually(lambda: supervisor.reconciler.ready and sorted(driver.secrets) == names)
        driver.errors["send_secret"].append(RuntimeError("no reply"))
        supervisor.send_secret()
        await eventually(lambda: sorted(driver.secrets) == sorted(2 * names))
        await supervisor.stop()

    asyncio.run(run())
