"""Background tasks of the controller's process: one that fails is repeated and shown, on a fake driver."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_base.cluster_member import SecretFile
from headrace_cluster.controller.control_loop import ControlLoop
from headrace_cluster.controller.spec_file import SpecFile, digest
from headrace_cluster.core.words import Lease, UsedSpec, Words
from headrace_cluster.errors import TakeOverError
from headrace_cluster.ray import connection, names
from headrace_cluster.ray import ray_controller as controller_module
from headrace_cluster.ray.ray_controller import Controller, LeaseLostError
from headrace_cluster.spec.cluster_spec import ClusterSpec, parse_spec
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


class _Record:
    """In this process: what the controllers of a cluster leave."""

    def __init__(self) -> None:
        self.saved: list[object] = []
        self.leases = [Lease(id="before")]
        self.hangs = threading.Event()
        self.kept = Words()
        self.another_acts = False
        self.renewals = itertools.count()

    def words(self) -> Words:
        return msgspec.structs.replace(self.kept)

    def save_words(self, words: Words) -> None:
        self.saved.append(words)

    def lease(self) -> Lease | None:
        while self.hangs.is_set():
            time.sleep(0.01)
        return self.leases[-1] if self.leases else None

    def save_lease(self, lease: Lease) -> None:
        self.leases.append(lease)

    def renew(self, lease: Lease, number: int) -> None:
        self.another_acts = False

    def renewal(self, lease: Lease) -> bytes:
        return str(next(self.renewals) if self.another_acts else 0).encode()

    def remove(self) -> None:
        self.saved.clear()


@pytest.fixture
def record(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> _Record:
    """Of a controller on a fake driver, whose node is part of Ray."""
    record = _Record()
    monkeypatch.setattr(controller_module, "LEASE_SECONDS", 0.01)
    monkeypatch.setattr(controller_module, "NODE_SECONDS", 0.01)
    monkeypatch.setattr(connection, "node_is_alive", lambda: True)
    monkeypatch.setattr(names, "end_cluster", record.saved.append)
    monkeypatch.setattr(controller_module, "ClusterRecord", lambda cluster: record)
    monkeypatch.setattr(controller_module, "RayDriver", lambda *_, **__: driver)
    return record


SPEC = {"admin": {"port": 0}, "control": {"host": "127.0.0.1", "port": 0}}


@asynccontextmanager
async def _opened(
    record: _Record, file: SpecFile | None = None, *, take_over: bool = False
) -> AsyncIterator[tuple[Controller, Callable[[], Awaitable[bytes]]]]:
    """A controller, and the status line of its answer to GET /status."""
    spec, lease = parse_spec(SPEC), Lease(id="ours", epoch=2)
    secret = SecretFile(secret_file())
    controller = Controller(spec, lease, record.words(), secret, "k", spec_file=file, take_over=take_over)
    opened = await controller.open()

    async def answers() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", opened.admin_port)
        writer.write(b"GET /status HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n\r\n")
        found = await reader.readline()
        writer.close()
        return found

    try:
        yield controller, answers
    finally:
        await controller.close()
        assert record.saved == ["headrace"], "the record is removed, and what is left ends by name"
        for task in controller._tasks:
            task.cancel()


def test_a_background_task_that_fails_is_repeated(
    record: _Record, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """Otherwise the record or the secret would end without a word."""
    for owner, name in ((ControlLoop, "save"), (SecretFile, "watch")):
        _fail_once(monkeypatch, owner, name)

    async def scenario() -> None:
        async with _opened(record) as (controller, answers):
            await asyncio.sleep(0)
            await eventually(lambda: "the watch over the secret file failed" in " ".join(controller.view().problems))
            await eventually(lambda: record.saved)
            assert b"200" in await answers()
            assert not controller.ended.is_set()

    asyncio.run(scenario())


def test_a_changed_spec_file_changes_the_replicas(
    record: _Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr(controller_module, "SPEC_SECONDS", 0.01)
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps(SPEC))

    def build() -> ClusterSpec:
        return parse_spec(json.loads(path.read_text()))

    async def scenario() -> None:
        async with _opened(record, SpecFile(path, digest(path), build(), build, lambda spec: spec)) as (controller, _):
            await eventually(lambda: controller.view().ready)
            path.write_text(json.dumps(SPEC | {"models": [{"replicas": 3}]}))
            await eventually(lambda: len(controller.view().started) == 3)
            path.write_text(json.dumps(SPEC | {"models": [{"replicas": "many"}]}))
            await eventually(lambda: "is not used" in " ".join(controller._status()["problems"]))
            assert len(controller.view().started) == 3

    asyncio.run(scenario())


def test_a_controller_ends_when_another_one_acts_and_makes_no_call_of_ray(
    record: _Record, eventually: Eventually
) -> None:
    async def scenario() -> None:
        async with _opened(record) as (controller, _):
            record.leases.append(Lease(id="another", epoch=3))
            with pytest.raises(LeaseLostError):
                await controller._calls.run(lambda: pytest.fail("beside the decisions of another controller"))
            await eventually(lambda: controller.ended.is_set() and controller.taken)

    asyncio.run(scenario())


def _used(*models: dict[str, Any]) -> Words:
    """The record of a controller with these models."""
    data = [model.model_dump(mode="json") for model in parse_spec({"models": list(models)}).models]
    return Words(created=1, spec=UsedSpec(data, "process 7 on head, a.yaml"))


def test_another_spec_ends_nothing_of_a_controller_that_acts(record: _Record, driver: FakeDriver) -> None:
    """It is told what would end, and whose spec names it."""
    record.kept = _used({"max_num_seqs": 4}, {"name": "other", "source": "smollm2", "replicas": 2})
    record.another_acts = True

    async def scenario() -> None:
        with pytest.raises(TakeOverError) as caught:
            async with _opened(record):
                pytest.fail("it must not act")
        sentence = str(caught.value)
        assert "acts (process 7 on head, a.yaml)" in sentence and "--take-over" in sentence
        assert "other: ends; smollm2: max_num_seqs 4 → none." in sentence
        assert driver.calls == [] and record.saved == [] and [lease.id for lease in record.leases] == ["before"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("used", "acts", "take_over"),
    [
        (({"max_num_seqs": 4},), False, False),  # it has ended, is paused, or does not reach Ray
        (({"max_num_seqs": 4},), True, True),
        (({},), True, False),  # the same models: the newest controller acts
        ((), True, False),  # of an earlier version
    ],
)
def test_another_spec_is_used_otherwise(
    record: _Record, used: tuple[dict[str, Any], ...], acts: bool, take_over: bool, eventually: Eventually
) -> None:
    record.kept, record.another_acts = _used(*used) if used else Words(created=1), acts

    async def scenario() -> None:
        async with _opened(record, take_over=take_over) as (controller, _):
            await eventually(lambda: controller.view().ready)
            assert [lease.id for lease in record.leases] == ["before", "ours"]
            await eventually(lambda: record.saved)
            (model,) = record.saved[-1].spec.models  # type: ignore[attr-defined]
            assert model["max_num_seqs"] is None, "the next one compares with this spec"

    asyncio.run(scenario())


def test_a_record_that_ray_loses_is_written_again(record: _Record, eventually: Eventually) -> None:
    """The controller has all of it: nothing is forgotten."""

    async def scenario() -> None:
        async with _opened(record) as (controller, _):
            await eventually(lambda: controller.view().ready and record.saved)
            record.leases.clear()
            record.saved.clear()
            await eventually(lambda: record.saved and record.leases)
            assert [lease.id for lease in record.leases] == ["ours"]
            assert controller.view().problems == [] and not controller.ended.is_set()

    asyncio.run(scenario())


def test_a_controller_ends_when_its_node_has_left_ray(
    record: _Record, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """One look that does not find it is not enough: a GCS that was restarted may not list it yet."""
    alive = [False, True, False, True]
    monkeypatch.setattr(connection, "node_is_alive", lambda: alive.pop() if alive else False)

    async def scenario() -> None:
        async with _opened(record) as (controller, _):
            await eventually(lambda: controller.view().ready and controller.ended.is_set() and controller.node_lost)
            assert not alive and not controller.taken

    asyncio.run(scenario())


def test_the_controller_answers_while_ray_hangs(
    record: _Record, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr("headrace_cluster.ray.calls.CALL_SECONDS", 0.1)

    async def scenario() -> None:
        async with _opened(record) as (controller, answers):
            record.hangs.set()
            try:
                await eventually(lambda: "Ray has not answered within 0.1 s" in " ".join(controller.view().problems))
                assert b"200" in await answers()
                assert not controller.ended.is_set()
            finally:
                record.hangs.clear()

    asyncio.run(scenario())
