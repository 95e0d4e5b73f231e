"""Ranks of one replica, as a controller sees them: their start, which error is reported, their end. No Ray."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import pytest
import ray.exceptions
import ray.util

from headrace_cluster.core.driver import Progress, RankFacts, StartFailedError
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import ProfileOutcome, RankReport, Stage
from headrace_cluster.errors import RoleError
from headrace_cluster.ray import rank_group
from headrace_cluster.ray.rank_actor import RankActor
from headrace_cluster.ray.rank_group import RankGroup
from headrace_proto.role import Role
from headrace_worker.core.config import ReplicaStarted
from headrace_worker.profiling.report import ProfileRefusedError, ProfileReport

T = TypeVar("T")
STARTING = {"stage": Stage.STARTING, "progress": "loading", "fraction": 0.5}
AWAY = ray.exceptions.ActorUnavailableError("no connection", None)
KILLED = ray.exceptions.ActorDiedError()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "this node")
    for name in ("CAUSE_SECONDS", "DEATH_SECONDS"):
        monkeypatch.setattr(rank_group, name, 0.3)
    for name in ("STARTING_SECONDS", "UNAVAILABLE_SECONDS"):
        monkeypatch.setattr(rank_group, name, 0.01)


class _Method:
    def __init__(self, call: Any) -> None:
        self.remote = call


class _Actor:
    """An actor's handle with these outcomes of `report`, a number being a delay; then the last one stays."""

    def __init__(self, *outcomes: Any) -> None:
        self._outcomes = list(outcomes)
        self._version = 0
        self.report = _Method(self._report)

    async def _report(self, seen: int, seconds: float) -> bytes:
        while self._outcomes:
            outcome = self._outcomes.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            if isinstance(outcome, dict):
                self._version += 1
                return msgspec.msgpack.encode(_report(version=self._version, **outcome))
            await asyncio.sleep(outcome)
        await asyncio.Event().wait()
        raise AssertionError


def _report(**changed: Any) -> RankReport:
    report = RankReport(
        pid=100, node="another", gpus=[], fingerprint=b"", secrets=(), model="m", tp=1, pp=1, role="both"
    )
    return msgspec.structs.replace(report, **changed)


def _ready(address: str = "") -> dict[str, Any]:
    names = "pid threads max_model_len max_num_seqs max_num_batched_tokens kv_blocks kv_bytes block_size weight_bytes"
    numbers: dict[str, Any] = dict.fromkeys(names.split(), 1)
    facts = ReplicaStarted(
        address=address, boot_id=b"", device="cpu", dtype="float32", revision="", notes=[], **numbers
    )
    return {"stage": Stage.READY, "started": facts}


def _with_group(call: Callable[[RankGroup], Awaitable[T]], *actors: Any) -> T:
    async def scenario() -> T:
        group = RankGroup(ReplicaName("m-0", 1), "c", actors)
        try:
            return await asyncio.wait_for(call(group), 10)
        finally:
            group.close()

    return asyncio.run(scenario())


def test_a_replica_is_ready_when_all_its_ranks_are_and_rank_0_has_its_facts() -> None:
    async def start(group: RankGroup) -> None:
        assert await group.locate() == [RankFacts(rank, 100, "another") for rank in range(2)]
        assert group.progress == Progress("loading", 0.5)
        assert (await group.started()).address == "first"

    _with_group(start, _Actor(STARTING, AWAY, 0.1, _ready("first")), _Actor(STARTING, 0.2, _ready()))


def test_the_causing_rank_is_reported_although_it_fails_last() -> None:
    seen = {"stage": Stage.FAILED, "error": "another rank was lost", "secondary": True}
    cause = {"stage": Stage.FAILED, "error": "the second shard is corrupt", "final": True, "lacks_resources": True}
    with pytest.raises(StartFailedError, match="second shard") as raised:
        _with_group(RankGroup.started, _Actor(seen), _Actor(0.1, cause), _Actor())
    assert raised.value.final and raised.value.lacks_resources
    with pytest.raises(StartFailedError, match=r"rank 1 of m-0 \(process 100\) was killed while it started"):
        _with_group(RankGroup.started, _Actor(seen), _Actor(STARTING, 0.1, KILLED))


def test_a_rank_whose_process_is_never_created_fails_the_build_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of a GCS that was lost meanwhile keep the place; the next build has another one."""
    monkeypatch.setattr(rank_group, "CREATE_SECONDS", 0.05)
    with pytest.raises(StartFailedError, match="m-0 has a place, but Ray created no process for a rank") as raised:
        _with_group(RankGroup.locate, _Actor(STARTING), _Actor())
    assert not raised.value.final


def test_a_rank_that_cannot_be_reached_is_asked_again() -> None:
    """The network may be down, or Ray's GCS: only a death that Ray reports is one."""
    ended = {"stage": Stage.ENDED, "error": "the step loop failed"}
    away = (AWAY, ray.exceptions.RaySystemError("no GCS"), AWAY)
    assert _with_group(RankGroup.ended, _Actor(*away, _ready(), *away, ended)).endswith("ended: the step loop failed")
    assert _with_group(RankGroup.ended, _Actor(*away, _ready(), KILLED)) == "rank 0 of m-0 (process 100) was killed"
    lost = _Actor(_ready(), {"stage": Stage.ENDED, "error": "rank 1 was lost"})
    sentence = _with_group(RankGroup.ended, lost, _Actor(_ready(), 0.1, KILLED))
    assert sentence == "rank 1 of m-0 (process 100) was killed", "rank 0 ended because of it"


class _Replica:
    def __init__(self, result: ProfileReport | Exception) -> None:
        self._result = result

    def profile(self, steps: int, seconds: float) -> ProfileReport:
        if isinstance(self._result, Exception):
            raise self._result
        return msgspec.structs.replace(self._result, steps=steps, seconds=seconds)


class _Profiled(_Actor):
    """The handle of a real RankActor around such a replica, or of one that was killed."""

    def __init__(self, result: ProfileReport | Exception) -> None:
        super().__init__()
        self.profile = _Method(self._profile)
        self._result = result

    async def _profile(self, steps: int, seconds: float) -> bytes:
        if isinstance(self._result, ray.exceptions.RayError):
            raise self._result
        actor = RankActor.__new__(RankActor)
        actor._replica = _Replica(self._result)
        return actor.profile(steps, seconds)


def test_a_profile_has_the_outcome_of_every_rank() -> None:
    report = ProfileReport("/p/r0.gz", 0, 0.0, [])
    refused = ProfileRefusedError("serve with --profile DIR")
    actors = [_Profiled(report), _Profiled(refused), _Profiled(ray.exceptions.RayActorError())]
    outcomes = _with_group(lambda group: group.profile(7, 2.5), *actors)
    assert outcomes == [
        ProfileOutcome(ProfileReport("/p/r0.gz", 7, 2.5, [])),
        ProfileOutcome(error="serve with --profile DIR"),
        ProfileOutcome(error="rank 2 of m-0 was killed while it was profiled"),
    ]


class _Rank0(_Actor):
    """A handle that accepts a role, does not reply, or is dead."""

    def __init__(self, error: Exception | None = None, *, unresponsive: bool = False) -> None:
        super().__init__()
        self.roles: list[tuple[str, int]] = []
        self._error, self._unresponsive = error, unresponsive
        self.set_role = _Method(self._set_role)

    async def _set_role(self, role: str, number: int) -> None:
        if self._unresponsive:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error
        self.roles.append((role, number))


def test_a_role_is_sent_to_rank_0_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "ROLE_SECONDS", 0.05)
    ranks = [_Rank0(), _Rank0()]
    _with_group(lambda group: group.set_role(Role.PREFILL, 4), *ranks)
    assert [rank.roles for rank in ranks] == [[("prefill", 4)], []]
    for rank, words in ((_Rank0(unresponsive=True), "does not answer"), (_Rank0(KILLED), "just ended")):
        with pytest.raises(RoleError, match=rf"rank 0 of m-0.*{words}"):
            _with_group(lambda group: group.set_role(Role.DECODE, 5), rank)


class _Draining(_Actor):
    """A rank whose call of `drain` has this outcome."""

    def __init__(self, outcome: Exception | None = None) -> None:
        super().__init__()
        self.calls: list[bool] = []
        self._outcome = outcome
        self.drain = _Method(self._drain)

    async def _drain(self, held: bool) -> None:
        self.calls.append(held)
        if self._outcome is not None:
            raise self._outcome


def test_every_rank_that_is_alive_drains_or_the_call_fails() -> None:
    """The message may be lost: a replica that nothing told to drain would wait for the end of the drain's time."""
    ranks = [_Draining(), _Draining(KILLED)]
    _with_group(lambda group: group.drain(True), *ranks)
    assert [rank.calls for rank in ranks] == [[True], [True]]
    with pytest.raises(ray.exceptions.ActorUnavailableError):
        _with_group(lambda group: group.drain(False), _Draining(), _Draining(AWAY))
