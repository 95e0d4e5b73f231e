"""Operations on replicas in the admin API: bodies, rejections, responses."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import httpx
import pytest

from headrace_cluster.controller import operations
from headrace_cluster.controller.admin import admin_app
from headrace_cluster.controller.health import watch_health
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.operations import replica_operations
from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.errors import RoleError
from headrace_cluster.spec.cluster_spec import parse_spec
from support.cluster.fake_driver import FakeDriver
from support.members import MEMBER

Eventually = Callable[..., Awaitable[Any]]

KEY = {"Authorization": "Bearer the-key"}


def _keys() -> list[bytes]:
    return [b"the-key"]


async def _saved() -> None:
    """At once."""


def _stop() -> None:
    raise AssertionError("no stop was requested")


def test_operations_are_executed(driver: FakeDriver, eventually: Eventually, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        record_answers = asyncio.Event()
        record_answers.set()

        async def saved() -> None:
            await record_answers.wait()

        health = {"interval_seconds": 0.05, "drain_seconds": 2}
        spec = parse_spec({"models": [{"replicas": 2}], "health": health})
        supervisor = Supervisor(spec, driver, Membership(), partial(watch_health, MEMBER))
        app = admin_app(
            lambda: [b"the-key"], {"/status": supervisor.status}, _stop, replica_operations(supervisor, saved)
        )
        transport = httpx.ASGITransport(app)
        supervisor.start()
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8002", headers=KEY) as client:

            async def post(path: str, **body: Any) -> Any:
                answer = await client.post(path, json=body)
                return answer.status_code, answer.json()

            await eventually(lambda: supervisor.reconciler.ready)
            code, document = await post("/role", replica="smollm2-1", role="prefill")
            assert code == 200 and document.pop("seconds") < 1
            assert document == {
                "id": "smollm2-1",
                "generation": 1,
                "role": "prefill",
                "before": "both",
                "recorded": True,
            }
            code, document = await post("/role", replica="smollm2-0", role="prefill")
            assert code == 409 and "only ready replica" in document["error"]["message"]
            code, document = await post("/drain", replica="smollm2-0")
            assert code == 409 and "--force" in document["error"]["message"]
            assert await post("/drain", replica="smollm2-1") == (
                200,
                {"id": "smollm2-1", "generation": 1, "seconds": 2.0, "recorded": True},
            )
            await eventually(lambda: supervisor.status()["replicas"][1]["state"] == "drained")
            ended = {"id": "smollm2-1", "generation": 1, "recorded": True}
            assert await post("/undrain", replica="smollm2-1") == (200, ended)
            await eventually(lambda: supervisor.reconciler.ready)
            code, document = await post("/drain", replica="smollm2-0", seconds=0, force=True)
            assert (code, document["seconds"]) == (200, 0)
            monkeypatch.setattr(operations, "SAVE_SECONDS", 0.05)
            record_answers.clear()
            code, document = await post("/drain", replica="smollm2-0", seconds=0, force=True)
            assert (code, document["recorded"]) == (200, False), "the GCS does not answer"
        await supervisor.stop()

    asyncio.run(scenario())


def test_a_role_that_could_not_be_sent_is_recorded_as_it_was(driver: FakeDriver, eventually: Eventually) -> None:
    """The call may still arrive, and the next controller must know that it is not the last decision."""
    numbers: list[int] = []

    async def scenario() -> None:
        spec = parse_spec({"models": [{"replicas": 2}], "health": {"interval_seconds": 0.05, "drain_seconds": 2}})
        supervisor = Supervisor(spec, driver, Membership(), partial(watch_health, MEMBER))

        async def saved() -> None:
            numbers.append(supervisor.snapshot().replicas["smollm2-1"].role_number)

        (role,) = (entry for entry in replica_operations(supervisor, saved) if entry.path == "/role")
        supervisor.start()
        await eventually(lambda: supervisor.reconciler.ready)
        driver.unresponsive.add(ReplicaName("smollm2-1", 1))
        with pytest.raises(RoleError, match="does not answer"):
            await role.run(role.body.model_validate({"replica": "smollm2-1", "role": "prefill"}))
        assert numbers == [driver.numbers[ReplicaName("smollm2-1", 1)][0] + 1]
        await supervisor.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/role", "{}", "replica"),
        ("/role", '{"replica": "a"}', "role"),
        ("/role", '{"replica": "a", "role": "both", "model": "x"}', "model"),
        ("/role", '{"replica": 7, "role": "both"}', "replica"),
        ("/drain", "{}", "replica"),
        ("/drain", '{"replica": "a", "seconds": -1}', "seconds"),
        ("/drain", '{"replica": "a", "seconds": NaN}', "seconds"),
        ("/drain", '{"replica": "a", "seconds": 1e400}', "seconds"),
        ("/drain", '{"replica": "a", "force": "perhaps"}', "force"),
        ("/undrain", "[]", "body"),
    ],
)
def test_bad_bodies_change_nothing(driver: FakeDriver, path: str, body: str, word: str) -> None:
    async def scenario() -> None:
        supervisor = Supervisor(parse_spec({}), driver, Membership(), partial(watch_health, MEMBER))
        app = admin_app(
            lambda: [b"the-key"], {"/status": supervisor.status}, _stop, replica_operations(supervisor, _saved)
        )
        before = supervisor.status()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8002") as client:
            answer = await client.post(path, content=body, headers=KEY)
            assert answer.status_code == 400 and word in answer.json()["error"]["message"]
            assert (await client.post(path, content=body)).status_code == 401
            assert (await client.get(path, headers=KEY)).status_code == 405
        assert supervisor.status() == before

    asyncio.run(scenario())
