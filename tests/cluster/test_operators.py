"""What operators may do, through the admin API: bodies, refusals, and the effect."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from headrace_base.errors import MemoryTooSmallError, ModelUnsupportedError
from headrace_cluster.controller import control_loop, operations
from headrace_cluster.controller.admin import admin_app
from headrace_cluster.controller.operations import replica_operations
from headrace_cluster.core.backoff import Backoff
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.router_reports import START_SECONDS, WAIT_SECONDS
from headrace_cluster.spec.cluster_spec import ClusterSpec, parse_spec
from headrace_proto import control_pb2 as pb
from headrace_proto import replica_pb2
from support.cluster.fake_driver import FakeDriver
from support.cluster.fake_loop import Controlled, controlled

Eventually = Callable[..., Awaitable[Any]]
Post = Callable[..., Awaitable[tuple[int, Any]]]

FIRST, SECOND = ReplicaName("smollm2-0", 1), ReplicaName("smollm2-0", 2)
OTHER = ReplicaName("smollm2-1", 1)
KEY = {"Authorization": "Bearer the-key"}
POOLS: dict[str, Any] = {"prefill": {"replicas": 1}, "decode": {"replicas": 2}}
ROLES = {replica_pb2.ROLE_BOTH: "both", replica_pb2.ROLE_PREFILL: "prefill", replica_pb2.ROLE_DECODE: "decode"}


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_loop, "REPEAT", Backoff(0.05, 0.1))
    monkeypatch.setattr(control_loop, "SEEN_SECONDS", 0.2)
    monkeypatch.setattr(operations, "ROLE_SECONDS", 0.5)


@asynccontextmanager
async def _api(
    driver: FakeDriver,
    eventually: Eventually,
    check: Callable[[ClusterSpec], ClusterSpec] = lambda spec: spec,
    **model: Any,
) -> AsyncIterator[tuple[Controlled, Post]]:
    async with controlled(driver, **model) as control:
        app = admin_app(
            lambda: [b"the-key"],
            {"/status": control.status},
            lambda: pytest.fail("no stop was requested"),
            replica_operations(control.loop, control.membership, check),
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8002", headers=KEY) as client:

            async def post(path: str, **body: Any) -> tuple[int, Any]:
                answer = await client.post(path, json=body)
                document = answer.json()
                return answer.status_code, document["error"]["message"] if "error" in document else document

            await eventually(lambda: control.planner.ready)
            await eventually(lambda: all(build.connected for build in control.planner.builds.values()))
            yield control, post


async def _listed(control: Controlled) -> dict[str, str]:
    """Roles in the current member list."""
    members = await anext(control.membership.watch())
    return {member.identity.replica_id: ROLES[member.identity.role] for member in members.members}


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/role", "{}", "replica"),
        ("/role", '{"replica": "a", "role": "both", "model": "x"}', "model"),
        ("/drain", '{"replica": "a", "seconds": -1}', "seconds"),
        ("/drain", '{"replica": "a", "seconds": NaN}', "seconds"),
        ("/undrain", "[]", "body"),
    ],
)
def test_bad_bodies_change_nothing(driver: FakeDriver, path: str, body: str, word: str) -> None:
    async def scenario() -> None:
        control = Controlled(driver)
        app = admin_app(lambda: [b"the-key"], {}, lambda: None, replica_operations(control.loop, control.membership))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8002") as client:
            answer = await client.post(path, content=body, headers=KEY)
            assert answer.status_code == 400 and word in answer.json()["error"]["message"]
            assert (await client.post(path, content=body)).status_code == 401
            assert (await client.get(path, headers=KEY)).status_code == 405
        assert not (control.words.drained or control.words.roles)

    asyncio.run(scenario())


# -- drains ---------------------------------------------------------------------------------------------------------


def test_a_drain_waits_for_requests_then_the_replica_stays_down(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _api(driver, eventually, replicas=2) as (control, post):
            driver.replicas[FIRST].running = 1
            assert await post("/drain", replica="smollm2-0", seconds=30) == (
                200,
                {"id": "smollm2-0", "generation": 1, "seconds": 30.0, "recorded": True},
            )
            await eventually(lambda: control.states() == ["draining", "ready"])
            assert "what still runs in" in control.status()["replicas"][0]["note"]
            members = await anext(control.membership.watch())
            assert members.members[0].state == replica_pb2.REPLICA_STATE_DRAINING, "at once"
            await asyncio.sleep(0.4)
            assert FIRST in driver.ranks
            driver.replicas[FIRST].running = 0
            await eventually(lambda: control.states() == ["drained", "ready"] and FIRST not in driver.ranks)
            assert "brings it back" in control.status()["replicas"][0]["note"] and control.planner.ready
            again = Controlled(driver, control.words, replicas=2)
            await again.loop.open()
            assert again.planner.wanted["smollm2-0"].drained, "the next controller knows"
            assert await post("/undrain", replica="smollm2-0") == (
                200,
                {"id": "smollm2-0", "generation": 0, "recorded": True},
            )
            await eventually(lambda: control.states() == ["ready", "ready"] and SECOND in driver.ranks)
            code, sentence = await post("/undrain", replica="smollm2-0")
            assert code == 409 and "ready, not drained" in sentence

    asyncio.run(scenario())


def test_a_drain_of_a_rank_that_is_not_reached_ends_at_its_deadline(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _api(driver, eventually, replicas=2) as (control, post):
            driver.replicas[FIRST].running = 1
            driver.unresponsive = {FIRST}
            await post("/drain", replica="smollm2-0", seconds=0.3)
            await eventually(lambda: control.states() == ["drained", "ready"])

    asyncio.run(scenario())


def test_refused_drains(driver: FakeDriver, eventually: Eventually, monkeypatch: pytest.MonkeyPatch) -> None:
    """smollm2-1 is drained at the same time: it does not count any more."""

    async def scenario() -> None:
        async with _api(driver, eventually, replicas=2) as (control, post):
            await post("/drain", replica="smollm2-1")
            refusals = {"other-0": ("no replica 'other-0'", "smollm2-0, smollm2-1"), "smollm2-0": ("decode", "--force")}
            for replica_id, words in refusals.items():
                code, sentence = await post("/drain", replica=replica_id)
                assert code == 409 and all(word in sentence for word in words)
            monkeypatch.setattr(operations, "SAVE_SECONDS", 0.05)
            driver.errors["save"] = [RuntimeError("no GCS")] * 3
            code, document = await post("/drain", replica="smollm2-0", seconds=0, force=True)
            assert (code, document["recorded"]) == (200, False), "the GCS does not answer"
            await eventually(lambda: control.states() == ["drained", "drained"])
            members = await anext(control.membership.watch())
            assert [model.drained for model in members.models] == [True]

    asyncio.run(scenario())


def test_changes_wait_for_routers_but_not_without_end(driver: FakeDriver, eventually: Eventually) -> None:
    """One of two routers reaches no replica."""
    later = 0.0  # seconds that have passed for the member list
    names = [FIRST, OTHER]

    async def scenario() -> None:
        nonlocal later
        async with _api(driver, eventually, replicas=2) as (control, post):
            membership = control.membership
            membership._clock = lambda: asyncio.get_running_loop().time() + later
            for router_id in ("one", "cut-off"):
                membership.routers[router_id] = pb.RouterInfo(id=router_id, http=f"{router_id}:8000")
            for name in names:
                driver.replicas[name].routers = 1

            async def report(*, one: bool) -> None:
                for router_id, heard in (("one", one), ("cut-off", False)):
                    replicas = [pb.HeardReplica(replica_id=n.replica_id, generation=1, heard=heard) for n in names]
                    membership.report(pb.RouterReport(router_id=router_id, replicas=replicas))
                await asyncio.sleep(0.3)  # for health messages of all replicas

            def connected() -> set[bool]:
                return {entry["connected"] for entry in control.status()["replicas"]}

            await report(one=False)
            later += 2 * WAIT_SECONDS
            await report(one=False)
            assert connected() == {False}, "the controller cannot judge which one is cut off"
            await report(one=True)
            later += START_SECONDS
            await report(one=True)
            note = "router cut-off (cut-off:8000) reports no replica"
            assert connected() == {False} and note in control.status()["routers"][1]["note"]
            code, sentence = await post("/drain", replica="smollm2-0")
            assert code == 409 and "not every router is connected to smollm2-1" in sentence and note in sentence
            assert (await post("/rollout", replicas=["smollm2-0"]))[0] == 200
            await report(one=True)
            assert "it waits: not every router is connected" in control.status()["replicas"][0]["note"]
            later += WAIT_SECONDS
            await report(one=True)
            assert connected() == {True} and note in " ".join(control.status()["problems"])
            await eventually(lambda: SECOND in driver.ranks)

    asyncio.run(scenario())


# -- rollouts -------------------------------------------------------------------------------------------------------


def test_a_rollout_builds_a_replica_again_beside_the_old_build(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _api(driver, eventually) as (control, post):
            driver.replicas[FIRST].running = 1
            driver.start_gate.clear()
            assert await post("/rollout", replicas=["smollm2-0"], seconds=30) == (
                200,
                {
                    "replicas": {"smollm2-0": 1},
                    "drained": [],
                    "seconds": 30.0,
                    "changes": [],
                    "before": {},
                    "recorded": True,
                },
            )
            await eventually(lambda: SECOND in driver.ranks)
            (entry,) = control.status()["replicas"]
            assert (entry["state"], entry["generation"]) == ("ready", 1)
            assert [(build["generation"], build["state"]) for build in entry["beside"]] == [(2, "starting")]
            code, sentence = await post("/rollout", replicas=["m-7"])
            assert code == 409 and "there is no replica 'm-7'" in sentence
            driver.start_gate.set()
            await eventually(lambda: control.status()["replicas"][0]["generation"] == 2)
            (entry,) = control.status()["replicas"]
            assert [(build["generation"], build["state"]) for build in entry["beside"]] == [(1, "draining")]
            driver.replicas[FIRST].running = 0
            await eventually(lambda: FIRST not in driver.ranks and not control.status()["replicas"][0]["beside"])
            driver.failures = [MemoryTooSmallError("too little memory")]
            await post("/rollout")
            await eventually(lambda: "--allow-gap" in control.status()["replicas"][0]["roll_failed"])
            assert control.states() == ["ready"] and SECOND in driver.ranks, "a next build that fails changes nothing"

    asyncio.run(scenario())


# -- other models ---------------------------------------------------------------------------------------------------


def test_a_model_is_scaled_until_the_spec_says_another_number(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _api(driver, eventually, replicas=2) as (control, post):
            answer = {"changes": ["smollm2: replicas 2 → 3"], "models": ["smollm2"], "recorded": True}
            assert await post("/scale", pool="smollm2", replicas=3) == (200, answer)
            await eventually(lambda: control.states() == ["ready"] * 3)
            again = Controlled(driver, control.words, replicas=2)
            await again.loop.open()
            assert len(again.planner.wanted) == 3, "the next controller knows"
            await post("/scale", pool="smollm2", replicas=1)
            await eventually(lambda: control.states() == ["ready"])
            control.loop.spec = parse_spec({"models": [{"replicas": 2, "aliases": ["small"]}]})
            control.loop.rethink()
            assert len(control.planner.wanted) == 1, "the number in the spec is as it was"
            control.loop.spec = parse_spec({"models": [{"replicas": 4}]})
            control.loop.rethink()
            assert len(control.planner.wanted) == 4
            code, sentence = await post("/scale", pool="smollm2.decode", replicas=1)
            assert code == 409 and "there is no model or pool 'smollm2.decode'; there are: smollm2" in sentence
            assert (await post("/scale", pool="smollm2", replicas=0))[0] == 400

    asyncio.run(scenario())


def test_a_change_leaves_no_model_with_drained_replicas_alone(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _api(driver, eventually, replicas=2) as (control, post):
            await post("/drain", replica="smollm2-0")
            await eventually(lambda: control.states() == ["drained", "ready"])
            for path, body in (
                ("/scale", {"pool": "smollm2", "replicas": 1}),
                ("/apply", {"models": [{"replicas": 1, "max_num_seqs": 4}]}),
            ):
                code, sentence = await post(path, **body)
                assert code == 409 and "undrain smollm2-0" in sentence
            await asyncio.sleep(0.2)
            assert control.states() == ["drained", "ready"]
            assert (await post("/scale", pool="smollm2", replicas=3))[0] == 200

    asyncio.run(scenario())


def test_a_change_that_was_taken_back_is_no_failure(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _api(driver, eventually) as (control, post):
            driver.failures = [MemoryTooSmallError("too little memory")]
            await post("/apply", models=[{"aliases": ["small"], "max_num_seqs": 4}])
            await eventually(lambda: control.status()["replicas"][0]["roll_failed"] != "")
            await post("/apply", models=[{"aliases": ["small"]}])
            assert control.status()["replicas"][0]["roll_failed"] == ""
            assert control.states() == ["ready"] and control.status()["overrides"] == []

    asyncio.run(scenario())


def test_a_rollout_with_another_setting(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _api(driver, eventually) as (control, post):
            code, document = await post("/rollout", settings={"max_num_seqs": 16})
            assert (code, document["changes"]) == (200, ["smollm2: max_num_seqs none → 16"])
            assert document["before"] == {"max_num_seqs": None}
            assert control.status()["overrides"] == document["changes"]
            await eventually(lambda: list(driver.ranks) == [SECOND] and control.planner.ready)
            assert control.planner.wanted["smollm2-0"].model.max_num_seqs == 16
            for settings, words in (
                ({"max_num_seqs": 0}, "max_num_seqs: Input should be greater than or equal to 1"),
                ({"max_num_sqs": 4}, "max_num_sqs cannot be set: did you mean max_num_seqs?"),
                ({"replicas": 4}, "replicas is changed with `./headrace scale`"),
            ):
                code, sentence = await post("/rollout", settings=settings)
                assert code == 409 and words in sentence, sentence
            code, sentence = await post("/rollout", settings={"max_num_seqs": 8}, replicas=["smollm2-0"])
            assert code == 409 and "name it with --model" in sentence
            code, sentence = await post("/rollout", model="other")
            assert code == 409 and "there is no model 'other'" in sentence
            await asyncio.sleep(0.2)
            assert list(driver.ranks) == [SECOND], "what was refused changes nothing"

    asyncio.run(scenario())


def test_models_that_files_show_to_be_unserved_change_nothing(driver: FakeDriver, eventually: Eventually) -> None:
    """The files of a changed model are checked before any replica is built."""

    def check(spec: ClusterSpec) -> ClusterSpec:
        if any(model.source == "/models/fp8" for model in spec.models):
            raise ModelUnsupportedError("The checkpoint is quantized (fp8)")
        return spec

    async def scenario() -> None:
        async with _api(driver, eventually, check) as (control, post):
            for path, body in (
                ("/rollout", {"settings": {"source": "/models/fp8"}}),
                ("/apply", {"models": [{"aliases": ["small"]}, {"name": "other", "source": "/models/fp8"}]}),
            ):
                assert await post(path, **body) == (409, "The checkpoint is quantized (fp8)")
            assert control.status()["overrides"] == [] and list(driver.ranks) == [FIRST]

    asyncio.run(scenario())


def test_other_models_are_applied(driver: FakeDriver, eventually: Eventually) -> None:
    """What they replace goes on until they serve."""
    models = [{"name": "next", "source": "smollm2"}]

    async def scenario() -> None:
        async with _api(driver, eventually) as (control, post):
            changes = ["next: a new model", "smollm2: ends"]
            code, document = await post("/apply", models=models, dry_run=True)
            assert (code, document["changes"]) == (200, changes) and control.words.models is None
            driver.start_gate.clear()
            assert (await post("/apply", models=models))[1]["models"] == ["next", "smollm2"]
            await eventually(lambda: ReplicaName("next-0", 1) in driver.ranks)
            await asyncio.sleep(0.3)
            assert FIRST in driver.ranks
            driver.start_gate.set()
            await eventually(lambda: list(driver.ranks) == [ReplicaName("next-0", 1)])
            again = Controlled(driver, control.words)
            await again.loop.open()
            assert list(again.planner.wanted) == ["next-0"]
            for wrong, words in (([{"replicas": 0}], "replicas"), ([{"sourc": "x"}], "sourc")):
                code, sentence = await post("/apply", models=wrong)
                assert code == 409 and words in sentence

    asyncio.run(scenario())


# -- roles ----------------------------------------------------------------------------------------------------------


def test_a_role_is_published_at_once_and_outlives_the_build(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _api(driver, eventually, **POOLS) as (control, post):
            expected = {"smollm2-0": "decode", "smollm2-1": "decode", "smollm2-2": "prefill"}
            assert {replica["id"]: replica["role"] for replica in control.status()["replicas"]} == expected
            for replica_id, role, before in (("smollm2-2", "both", "prefill"), ("smollm2-0", "prefill", "decode")):
                code, document = await post("/role", replica=replica_id, role=role)
                assert code == 200 and document.pop("seconds") < 1
                assert document == {
                    "id": replica_id, "generation": 1, "role": role, "before": before, "recorded": True
                }  # fmt: skip
                await eventually(lambda: driver.replicas[ReplicaName(replica_id, 1)].role == role)  # noqa: B023
            await asyncio.sleep(0.3)
            assert (await _listed(control))["smollm2-0"] == "prefill" and len(driver.named("place")) == 3
            driver.kill(FIRST)
            await eventually(lambda: SECOND in driver.ranks and control.planner.ready)
            assert driver.replicas[SECOND].role == "prefill" == (await _listed(control))["smollm2-0"]
            code, document = await post("/scale", pool="smollm2.prefill", replicas=2)
            assert code == 200 and document["changes"][0].startswith("smollm2: prefill {")
            await eventually(lambda: control.states() == ["ready"] * 4)

    asyncio.run(scenario())


def test_refused_roles(driver: FakeDriver, eventually: Eventually) -> None:
    """One of the two decode replicas starts again."""
    refusals = [
        ("other-0", "decode", ("no replica 'other-0'", "smollm2-0, smollm2-1, smollm2-2")),
        ("smollm2-0", "encode", ("prefill, decode or both", "'encode'")),
        ("smollm2-0", "prefill", ("smollm2-0 is the only ready replica", "another one")),
        ("smollm2-1", "prefill", ("smollm2-1 is starting", "ready")),
    ]

    async def scenario() -> None:
        async with _api(driver, eventually, **POOLS) as (control, post):
            driver.start_gate.clear()
            driver.kill(OTHER)
            await eventually(lambda: control.states()[1] == "starting")
            for replica_id, role, words in refusals:
                code, sentence = await post("/role", replica=replica_id, role=role)
                assert code == 409 and all(word in sentence for word in words), sentence
            assert (await _listed(control))["smollm2-0"] == "decode" and not driver.named("role")
            driver.start_gate.set()

    asyncio.run(scenario())


def test_two_changes_at_once_keep_one_that_decodes(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _api(driver, eventually, **POOLS) as (_, post):
            changes = (post("/role", replica=f"smollm2-{number}", role="prefill") for number in (0, 1))
            assert sorted(code for code, _ in await asyncio.gather(*changes)) == [200, 409]

    asyncio.run(scenario())


def test_a_replica_that_does_not_answer_keeps_its_role(driver: FakeDriver, eventually: Eventually) -> None:
    """The call arrives later: the role is sent again."""
    name = ReplicaName("smollm2-2", 1)

    async def scenario() -> None:
        async with _api(driver, eventually, **POOLS) as (control, post):
            driver.unresponsive.add(name)
            code, sentence = await post("/role", replica="smollm2-2", role="decode")
            assert code == 409 and "does not answer" in sentence
            await eventually(lambda: control.planner.builds[name].role == "prefill")
            driver.unresponsive.clear()
            driver.ranks[name].note(role="decode")
            await eventually(lambda: driver.ranks[name].report.role == "prefill")

    asyncio.run(scenario())
