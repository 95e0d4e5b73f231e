"""Background tasks of the controller's process: one that fails is repeated and shown, on a fake driver."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_cluster.controller.record_keeper import RecordKeeper
from headrace_cluster.core.snapshot import Lease
from headrace_cluster.ray import controller as controller_module
from headrace_cluster.ray import names
from headrace_cluster.ray.controller import Controller
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_proto.cluster_member import SecretFile
from support.cluster.fake_driver import FakeDriver
from support.members import secret_file

Eventually = Callable[..., Awaitable[Any]]


def _fail_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    original, failures = getattr(owner, name), [RuntimeError(f"no {name}")]

    async def failing(*args: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return await original(*args, **named)

    monkeypatch.setattr(owner, name, failing)


def test_a_background_task_that_fails_is_repeated(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """Otherwise the record or the secret would end without a word."""
    saved: list[object] = []
    leases = [Lease(id="ours")]
    record = SimpleNamespace(
        snapshot=lambda: None,
        save_snapshot=saved.append,
        lease=lambda: leases[-1],
        save_lease=leases.append,
        remove=saved.clear,
    )
    monkeypatch.setattr(controller_module, "LEASE_SECONDS", 0.01)
    monkeypatch.setattr(names, "end_cluster", saved.append)
    monkeypatch.setattr(controller_module, "ClusterRecord", lambda cluster: record)
    monkeypatch.setattr(controller_module, "RayDriver", lambda *_, **__: driver)
    for owner, name in ((RecordKeeper, "run"), (SecretFile, "watch")):
        _fail_once(monkeypatch, owner, name)
    spec = parse_spec({"admin": {"port": 0}, "control": {"host": "127.0.0.1", "port": 0}})

    async def scenario() -> None:
        controller = Controller(spec, leases[0], SecretFile(secret_file()), "k")
        opened = await controller.open()
        try:
            await asyncio.sleep(0)
            await eventually(lambda: "the watch over the secret file failed" in " ".join(controller.view().problems))
            await eventually(lambda: saved)

            async def answers() -> bytes:
                reader, writer = await asyncio.open_connection("127.0.0.1", opened.admin_port)
                writer.write(b"GET /status HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n\r\n")
                found = await reader.readline()
                writer.close()
                return found

            assert b"200" in await answers()
            assert not controller.ended.is_set()
            leases.append(Lease(id="another"))
            await eventually(lambda: controller.ended.is_set() and controller.taken)
        finally:
            await controller.close()
            assert saved == ["headrace"], "the record is removed, and what is left ends by name"
            for task in controller._tasks:
                task.cancel()

    asyncio.run(scenario())
