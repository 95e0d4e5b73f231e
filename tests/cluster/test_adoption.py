"""What a controller takes over from one that was killed: which builds, which records, and when routers hear of it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from fake_driver import FakeDriver

from headrace_cluster.controller import supervisor as supervisor_module
from headrace_cluster.controller.adoption import Wanted, choose, recall, remember
from headrace_cluster.controller.driver import AdoptedBuild, Inheritance, RankFacts
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.memory import ControllerMemory, ReplicaMemory
from headrace_cluster.controller.reconciler import Launch, Reconciler, State, Stop, desired_replicas
from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.naming import ReplicaName
from headrace_cluster.pools import Role
from headrace_cluster.rank_config import RankReport, fingerprint
from headrace_cluster.spec import HealthSpec, parse_spec
from headrace_proto import control_pb2, replica_pb2
from headrace_worker.config import ReplicaConfig, ReplicaStarted

Eventually = Callable[..., Awaitable[Any]]

HEALTH = {"interval_seconds": 0.05, "silence_seconds": 0.3, "replace_seconds": 0.4, "drain_seconds": 2}
FIRST, SECOND = ReplicaName("smollm2-0", 3), ReplicaName("smollm2-1", 1)
MARK = b"as wanted"


def _started(address: str = "127.0.0.1:1") -> ReplicaStarted:
    names = "pid threads max_model_len max_num_seqs max_num_batched_tokens kv_blocks kv_bytes block_size weight_bytes"
    numbers: dict[str, Any] = dict.fromkeys(names.split(), 1)
    texts = {"boot_id": b"", "device": "cpu", "dtype": "float32", "revision": "", "load_seconds": 0.0, "notes": []}
    return ReplicaStarted(address=address, **numbers, **texts)


def _report(pid: int = 7, **changed: Any) -> RankReport:
    report = RankReport(
        pid=pid,
        node="here",
        gpus=[],
        fingerprint=MARK,
        role="both",
        started=_started(),
        draining=False,
        ended=False,
    )
    return msgspec.structs.replace(report, **changed)


# -- which builds ---------------------------------------------------------------------------------------------------


def test_the_newest_complete_build_goes_on() -> None:
    reports: dict[tuple[ReplicaName, int], RankReport | None] = {}
    for generation in (2, 9, 10):  # numbers, not text
        reports |= {(ReplicaName("m-0", generation), rank): _report(10 * generation + rank) for rank in (0, 1)}
    del reports[ReplicaName("m-0", 10), 1]
    (build,) = choose(reports, {"m-0": Wanted(2, MARK)})
    assert build.name == ReplicaName("m-0", 9)
    assert build.ranks == [RankFacts(0, 90, "here", "cpu"), RankFacts(1, 91, "here", "cpu")]


@pytest.mark.parametrize(
    "second",
    [
        None,  # it did not answer
        _report(started=None),
        _report(ended=True),
        _report(fingerprint=b"another model"),
    ],
)
def test_one_rank_that_is_not_up_spoils_its_build(second: RankReport | None) -> None:
    name = ReplicaName("m-0", 1)
    assert choose({(name, 0): _report(), (name, 1): second}, {"m-0": Wanted(2, MARK)}) == []


def test_what_is_not_wanted_is_left_out() -> None:
    name = ReplicaName("m-0", 1)
    reports: dict[tuple[ReplicaName, int], RankReport | None] = {(name, 0): _report(), (name, 1): _report()}
    assert choose(reports, {}) == []
    assert choose(reports, {"m-0": Wanted(1, MARK)}) == [], "the spec has another shape by now"
    assert choose(reports, {"m-0": Wanted(3, MARK)}) == []


def test_role_and_draining_are_rank_0s_word() -> None:
    name = ReplicaName("m-0", 1)
    reports: dict[tuple[ReplicaName, int], RankReport | None] = {
        (name, 1): _report(role="both"),
        (name, 0): _report(role="prefill", draining=True, started=_started("10.0.0.1:5")),
    }
    (build,) = choose(reports, {"m-0": Wanted(2, MARK)})
    assert (build.role, build.draining, build.started.address) == (Role.PREFILL, True, "10.0.0.1:5")


def test_a_fingerprint_is_of_what_cannot_change_while_it_runs() -> None:
    config = ReplicaConfig(replica_id="m-0", model="m", source="m", secret=b"s" * 32)
    same = {"generation": 7, "role": "decode", "cpu_threads": 3}
    assert fingerprint(msgspec.structs.replace(config, **same)) == fingerprint(config)
    for change in ({"secret": b"t" * 32}, {"tp": 2}, {"source": "n"}, {"replica_id": "m-1"}, {"kv_cache_memory": 1}):
        assert fingerprint(msgspec.structs.replace(config, **change)) != fingerprint(config)


# -- which records --------------------------------------------------------------------------------------------------


def _reconciler() -> Reconciler:
    return Reconciler(desired_replicas(parse_spec({"models": [{"replicas": 2}]})), HealthSpec())


def _build(name: ReplicaName, role: Role = Role.BOTH, *, draining: bool = False) -> AdoptedBuild:
    return AdoptedBuild(name, [RankFacts(0, 7, "here")], _started(), role, draining)


def test_adopted_builds_are_not_built_again_and_the_others_count_on() -> None:
    reconciler = _reconciler()
    memory = ControllerMemory(created=5, replicas={"smollm2-1": _memory(generation=4)})
    inheritance = Inheritance([_build(FIRST)], {"smollm2-0": 6, "smollm2-1": 2})
    recall(reconciler, memory, inheritance, 100.0)
    assert reconciler.records["smollm2-0"].state is State.READY
    assert reconciler.actions(100.1) == [
        Launch(ReplicaName("smollm2-1", 5), reconciler.records["smollm2-1"].model, Role.BOTH)
    ]
    # A last word of the killed build does not touch the new one; a rebuild of the adopted one gets the next number.
    reconciler.died(FIRST, "rank 0 was killed", 101.0)
    (launch,) = reconciler.actions(101.0)
    assert launch.name == ReplicaName("smollm2-0", 4)


def _memory(**given: Any) -> ReplicaMemory:
    return ReplicaMemory(**{"generation": 1, "role": "both", "held": False, **given})


def test_an_adopted_build_that_stays_silent_is_replaced() -> None:
    reconciler = _reconciler()
    recall(reconciler, None, Inheritance([_build(FIRST), _build(SECOND)]), 100.0)
    assert reconciler.actions(101.9) == []
    reconciler.heard(SECOND, State.READY, 0.01, 102.0)
    reconciler.actions(102.1)
    assert reconciler.records["smollm2-0"].state is State.UNHEALTHY
    assert Stop(FIRST, drain=False) in reconciler.actions(118.0)


def test_a_rebuild_that_fails_after_the_return_does_not_end_the_cluster() -> None:
    reconciler = _reconciler()
    memory = ControllerMemory(created=5, replicas={"smollm2-0": _memory(ever_ready=True)})
    recall(reconciler, memory, Inheritance([_build(SECOND)]), 0.0)
    (launch,) = reconciler.actions(0.1)
    reconciler.start_failed(launch.name, "no place for it just now", 0.2, final=True)
    assert reconciler.fatal == ""


def test_what_operators_wanted_is_remembered_and_recalled() -> None:
    before, after = _reconciler(), _reconciler()
    for record, (generation, role, held, ready) in zip(
        before.records.values(), ((3, Role.PREFILL, False, True), (2, Role.DECODE, True, False)), strict=True
    ):
        record.generation, record.role, record.held, record.ever_ready = generation, role, held, ready
    memory = remember(before, 77, {ReplicaName("smollm2-1", 2): 12.5})
    memory = msgspec.msgpack.decode(msgspec.msgpack.encode(memory), type=ControllerMemory)
    drains = recall(after, memory, Inheritance([_build(FIRST, Role.PREFILL)]), 0.0)
    assert memory.created == 77 and drains == {ReplicaName("smollm2-1", 2): 12.5}
    for key in ("generation", "role", "held"):
        assert [getattr(r, key) for r in after.records.values()] == [getattr(r, key) for r in before.records.values()]
    assert after.actions(0.1) == [] and after.records["smollm2-1"].state is State.DRAINED


def test_the_rank_knows_of_a_younger_order() -> None:
    """Role and drain may have changed after the last view that was kept."""
    reconciler = _reconciler()
    memory = ControllerMemory(created=5, replicas={"smollm2-0": _memory(generation=3), "smollm2-1": _memory()})
    inheritance = Inheritance([_build(FIRST, Role.DECODE), _build(SECOND, draining=True)])
    recall(reconciler, memory, inheritance, 0.0)
    assert reconciler.records["smollm2-0"].role is Role.DECODE
    assert reconciler.actions(0.1) == [Stop(SECOND, drain=True)]
    reconciler.stopped(SECOND, 1.0)
    assert reconciler.actions(1.1) == [] and reconciler.records["smollm2-1"].state is State.DRAINED


# -- the supervisor -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _returned(
    driver: FakeDriver, secret: bytes, memory: ControllerMemory | None = None
) -> AsyncIterator[tuple[Supervisor, Membership]]:
    spec = parse_spec({"models": [{"replicas": 2}], "health": HEALTH})
    membership = Membership()
    supervisor = Supervisor(spec, driver, membership, secret)
    await supervisor.adopt(memory)
    supervisor.start()
    try:
        yield supervisor, membership
    finally:
        await supervisor.stop()


def _lists(membership: Membership) -> tuple[list[control_pb2.MemberList], "asyncio.Task[None]"]:
    heard: list[control_pb2.MemberList] = []

    async def listen() -> None:
        async for members in membership.watch():
            heard.append(members)

    return heard, asyncio.create_task(listen())


def test_routers_hear_of_a_new_controller_when_it_knows_everybody(
    driver: FakeDriver, secret: bytes, eventually: Eventually
) -> None:
    async def scenario() -> None:
        driver.leave(FIRST), driver.leave(SECOND)
        driver.replicas[SECOND].silent.set()
        async with _returned(driver, secret, ControllerMemory(created=77)) as (supervisor, membership):
            heard, listening = _lists(membership)
            assert driver.asked_to_adopt == ["smollm2-0", "smollm2-1"]
            await eventually(lambda: supervisor.status()["replicas"][0]["revision"] == "r1")  # its health has come
            await asyncio.sleep(0.25)
            assert heard == [], "half a list would take the other half from the routers"
            driver.replicas[SECOND].silent.clear()
            await eventually(lambda: heard)
            states = [(m.identity.replica_id, m.identity.generation, m.state) for m in heard[0].members]
            ready = replica_pb2.REPLICA_STATE_READY
            assert states == [("smollm2-0", 3, ready), ("smollm2-1", 1, ready)]
            assert heard[0].models[0].created == 77
            assert [call for call in driver.calls if call[0] != "stop"] == []
            assert set(supervisor.started()) == {"smollm2-0", "smollm2-1"}
            assert [rank["pid"] for rank in supervisor.status()["replicas"][0]["ranks"]] == [1003]
            assert supervisor.memory().replicas["smollm2-0"].generation == 3
            listening.cancel()

    asyncio.run(scenario())


def test_one_that_stays_silent_does_not_keep_the_list_back_for_ever(
    driver: FakeDriver, secret: bytes, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "QUIET_SECONDS", 0.2)

    async def scenario() -> None:
        driver.leave(FIRST), driver.leave(SECOND).silent.set()
        async with _returned(driver, secret) as (_, membership):
            heard, listening = _lists(membership)
            await eventually(lambda: heard)
            assert [m.identity.replica_id for m in heard[0].members] == ["smollm2-0"]
            listening.cancel()

    asyncio.run(scenario())


def test_an_adopted_replica_that_dies_is_rebuilt(driver: FakeDriver, secret: bytes, eventually: Eventually) -> None:
    async def scenario() -> None:
        driver.leave(FIRST)
        async with _returned(driver, secret) as (supervisor, _):
            await eventually(lambda: supervisor.reconciler.ready)
            assert ("launch", ReplicaName("smollm2-1", 1)) in driver.calls, "the one that nobody left is built"
            driver.kill(FIRST)
            again = ReplicaName("smollm2-0", 4)
            await eventually(lambda: again in driver.replicas and supervisor.reconciler.ready)
            calls = [call for call in driver.calls if call[1].replica_id == "smollm2-0"]
            assert calls[:2] == [("stop", FIRST), ("launch", again)]

    asyncio.run(scenario())


def test_a_drain_goes_on_with_the_time_that_is_left(driver: FakeDriver, secret: bytes, eventually: Eventually) -> None:
    memory = ControllerMemory(
        created=1, replicas={"smollm2-0": _memory(generation=3, held=True, drain_seconds=0.4, ever_ready=True)}
    )

    async def scenario() -> None:
        driver.leave(FIRST, draining=True).running = 1
        driver.leave(SECOND)
        async with _returned(driver, secret, memory) as (supervisor, _):
            record = supervisor.reconciler.records["smollm2-0"]
            loop = asyncio.get_running_loop()
            began = loop.time()
            await eventually(lambda: record.state is State.DRAINED)
            assert 0.2 < loop.time() - began < 1.5, "not the two seconds that a new drain would have"
            assert supervisor.reconciler.ready

    asyncio.run(scenario())


def test_a_first_controller_speaks_at_once(driver: FakeDriver, secret: bytes, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _returned(driver, secret) as (supervisor, membership):
            heard, listening = _lists(membership)
            await eventually(lambda: heard)
            await eventually(lambda: supervisor.reconciler.ready)
            listening.cancel()

    asyncio.run(scenario())
