"""Background tasks of the controller's process: one that fails is repeated and shown, on a fake driver."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import uvicorn

from headrace_cluster.controller.certificates import ControllerCertificates
from headrace_cluster.controller.record_keeper import RecordKeeper
from headrace_cluster.core.view import ControllerArgs, ControllerSecrets
from headrace_cluster.ray import controller as controller_module
from headrace_cluster.ray.controller import Controller
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_proto.identity import Identity, seal
from support.cluster.fake_driver import FakeDriver

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
    """Before, the admin API, the record or the certificates ended without a word."""
    saved: list[object] = []
    record = SimpleNamespace(snapshot=lambda: None, save_snapshot=saved.append)
    monkeypatch.setattr(controller_module, "ClusterRecord", lambda cluster: record)
    monkeypatch.setattr(controller_module, "RayDriver", lambda *_, **__: driver)
    for owner, name in ((RecordKeeper, "run"), (ControllerCertificates, "keep"), (uvicorn.Server, "serve")):
        _fail_once(monkeypatch, owner, name)
    spec, identity = parse_spec({"admin": {"port": 0}, "control": {"port": 0}}), Identity()
    sealed = seal(identity.request, msgspec.msgpack.encode(ControllerSecrets(secrets=(b"s" * 32,), admin_key="k")))
    args = ControllerArgs(spec=spec.model_dump_json(), program="headrace", loopback=True)

    async def scenario() -> None:
        certificates = ControllerCertificates(identity, spec.cluster, sealed)
        controller = Controller(args, spec, identity, certificates, lambda: True)
        opened = await controller.open()
        try:
            await asyncio.sleep(0)
            await eventually(lambda: len(controller.view().problems) >= 2)
            shown = " ".join(controller.view().problems)
            assert "the renewal of certificates failed" in shown and "the admin API failed" in shown
            await eventually(lambda: saved)

            async def answers() -> bytes:
                reader, writer = await asyncio.open_connection("127.0.0.1", opened.admin_port)
                writer.write(b"GET /status HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n\r\n")
                found = await reader.readline()
                writer.close()
                return found

            await eventually(lambda: cast(Any, controller)._admin_server.started)
            assert b"200" in await answers()
        finally:
            await controller.close()
            for task in controller._tasks:
                task.cancel()

    asyncio.run(scenario())
