"""Ranks of one replica: which GPUs are visible to a rank, and which error is reported. No Ray."""

import asyncio
from typing import Any

import msgspec
import pytest
import ray.exceptions

from headrace_cluster.core.driver import StartFailedError
from headrace_cluster.core.gpu_binding import GpuBinding, bind_gpus
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import ProfileOutcome, StartArgs, StartOutcome
from headrace_cluster.errors import RoleError
from headrace_cluster.ray.rank_actor import RankActor
from headrace_cluster.ray.rank_group import RankGroup, RankPlace
from headrace_proto.role import Role
from headrace_worker.core.config import Rendezvous, ReplicaStarted
from headrace_worker.profiling.report import ProfileRefusedError, ProfileReport

RENDEZVOUS = Rendezvous("127.0.0.1", 1, bytes(32))


def test_all_gpus_of_a_node_are_visible_to_its_ranks() -> None:
    places = [("a", ["4"]), ("a", ["2"]), ("b", ["0"]), ("b", ["1"])]
    assert bind_gpus(places) == [
        GpuBinding(("4", "2"), 0),
        GpuBinding(("4", "2"), 1),
        GpuBinding(("0", "1"), 0),
        GpuBinding(("0", "1"), 1),
    ]


def test_ranks_without_gpus_are_not_bound() -> None:
    assert bind_gpus([("a", []), ("a", [])]) == [None, None]


class _Method:
    def __init__(self, call: Any) -> None:
        self.remote = call


class _Actor:
    """An actor's handle whose calls return the given outcome after a delay."""

    def __init__(self, outcome: StartOutcome | None, seconds: float = 0.0) -> None:
        self.opened: list[StartArgs] = []
        self.starts: list[StartArgs] = []
        self._outcome, self._seconds = outcome, seconds
        self.open_rendezvous = _Method(self._open)
        self.start = _Method(self._start)

    async def _open(self, encoded: bytes) -> bytes:
        self.opened.append(msgspec.msgpack.decode(encoded, type=StartArgs))
        return msgspec.msgpack.encode(StartOutcome(rendezvous=RENDEZVOUS))

    async def _start(self, encoded: bytes) -> bytes:
        self.starts.append(msgspec.msgpack.decode(encoded, type=StartArgs))
        await asyncio.sleep(self._seconds)
        if self._outcome is None:
            await asyncio.Event().wait()
        return msgspec.msgpack.encode(self._outcome)


def _started(address: str) -> StartOutcome:
    names = "pid threads max_model_len max_num_seqs max_num_batched_tokens kv_blocks kv_bytes block_size weight_bytes"
    numbers: dict[str, Any] = dict.fromkeys(names.split(), 1)
    facts = ReplicaStarted(
        address=address, boot_id=b"", device="cpu", dtype="float32", revision="", notes=[], **numbers
    )
    return StartOutcome(started=facts)


def _group(*actors: _Actor) -> RankGroup:
    places = [RankPlace(100 + rank, "node", []) for rank in range(len(actors))]
    return RankGroup(ReplicaName("m-0", 1), "c", actors, places)


def test_all_ranks_start_with_rank_0s_rendezvous_and_rank_0_reports() -> None:
    actors = [_Actor(_started("first")), _Actor(_started(""), 0.05), _Actor(_started(""))]
    started = asyncio.run(_group(*actors).start())
    assert started.address == "first"
    assert [[start.rendezvous for start in actor.starts] for actor in actors] == [[RENDEZVOUS]] * 3


def test_rank_0_knows_its_gpu_before_it_opens_the_rendezvous() -> None:
    actors = [_Actor(_started("first")), _Actor(_started(""))]
    places = [RankPlace(100 + rank, "node", [str(4 + rank)]) for rank in range(2)]
    asyncio.run(RankGroup(ReplicaName("m-0", 1), "c", actors, places).start())
    assert actors[0].opened == [StartArgs(None, ("4", "5"), 0)] and not actors[1].opened
    assert [actor.starts for actor in actors] == [[StartArgs(RENDEZVOUS, ("4", "5"), gpu)] for gpu in range(2)]


def test_one_rank_needs_no_rendezvous() -> None:
    actor = _Actor(_started("alone"))
    asyncio.run(_group(actor).start())
    assert actor.starts == [StartArgs()]


def test_the_causing_rank_is_reported_although_it_answers_last() -> None:
    seen = StartOutcome(error="another rank was lost", secondary=True)
    cause = StartOutcome(error="the second shard is corrupt", final=True, lacks_resources=True)
    with pytest.raises(StartFailedError, match="second shard") as raised:
        asyncio.run(_group(_Actor(seen), _Actor(cause, 0.1), _Actor(None)).start())
    assert raised.value.final and raised.value.lacks_resources


class _Created:
    """The handle of a rank whose process answers, or is never created."""

    def __init__(self, *, answers: bool) -> None:
        self.facts = _Method(self._facts)
        self._answers = answers

    async def _facts(self) -> tuple[int, str, list[str]]:
        if not self._answers:
            await asyncio.Event().wait()
        return 7, "another node", []


def test_a_rank_whose_process_is_never_created_fails_the_build_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of a GCS that was lost meanwhile keep the place; the next build has another one."""
    monkeypatch.setattr("headrace_cluster.ray.rank_group.CREATE_SECONDS", 0.05)
    actors: list[Any] = [_Created(answers=True), _Created(answers=False)]
    with pytest.raises(StartFailedError, match="m-0 has a place, but Ray created no process for a rank") as raised:
        asyncio.run(asyncio.wait_for(RankGroup(ReplicaName("m-0", 1), "c", actors).locate(), 5))
    assert not raised.value.final


class _Replica:
    def __init__(self, result: ProfileReport | Exception) -> None:
        self._result = result

    def profile(self, steps: int, seconds: float) -> ProfileReport:
        if isinstance(self._result, Exception):
            raise self._result
        return msgspec.structs.replace(self._result, steps=steps, seconds=seconds)


class _Profiled:
    """The handle of a real RankActor around such a replica, or of one that was killed."""

    def __init__(self, result: ProfileReport | Exception) -> None:
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
    actors: Any = [_Profiled(report), _Profiled(refused), _Profiled(ray.exceptions.RayActorError())]
    outcomes = asyncio.run(_group(*actors).profile(7, 2.5))
    assert outcomes == [
        ProfileOutcome(ProfileReport("/p/r0.gz", 7, 2.5, [])),
        ProfileOutcome(error="serve with --profile DIR"),
        ProfileOutcome(error="rank 2 of m-0 (process 102) was killed while it was profiled"),
    ]


class _Rank0:
    """A handle that accepts a role, does not reply, or is dead."""

    def __init__(self, error: Exception | None = None, *, unresponsive: bool = False) -> None:
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
    monkeypatch.setattr("headrace_cluster.ray.rank_group.ROLE_SECONDS", 0.05)
    ranks: list[Any] = [_Rank0(), _Rank0()]
    asyncio.run(_group(*ranks).set_role(Role.PREFILL, 4))
    assert [rank.roles for rank in ranks] == [[("prefill", 4)], []]
    for rank, words in (
        (_Rank0(unresponsive=True), "does not answer"),
        (_Rank0(ray.exceptions.RayActorError()), "just ended"),
    ):
        handle: Any = rank
        with pytest.raises(RoleError, match=rf"rank 0 of m-0 \(process 100\).*{words}"):
            asyncio.run(_group(handle).set_role(Role.DECODE, 5))


class _Draining:
    """A rank whose call of `drain` has this outcome."""

    def __init__(self, outcome: Exception | None = None) -> None:
        self.calls: list[bool] = []
        self._outcome = outcome
        self.drain = _Method(self._drain)

    async def _drain(self, held: bool) -> None:
        self.calls.append(held)
        if self._outcome is not None:
            raise self._outcome


def test_every_rank_that_is_alive_drains_or_the_call_fails() -> None:
    """The message may be lost: a replica that nothing told to drain would wait for the end of the drain's time."""
    ranks = [_Draining(), _Draining(ray.exceptions.ActorDiedError())]
    asyncio.run(RankGroup(ReplicaName("m-0", 1), "cluster", ranks).drain(True))
    assert [rank.calls for rank in ranks] == [[True], [True]]
    lost = _Draining(ray.exceptions.ActorUnavailableError("the network", None))
    with pytest.raises(ray.exceptions.ActorUnavailableError):
        asyncio.run(RankGroup(ReplicaName("m-0", 1), "cluster", [_Draining(), lost]).drain(False))


class _Watched:
    """An actor's handle whose calls of `wait` have these outcomes, one after the other."""

    def __init__(self, *outcomes: Exception | str | None) -> None:
        self.wait = _Method(self._wait)
        self._outcomes = list(outcomes)

    async def _wait(self, seconds: float) -> str | None:
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_a_rank_that_cannot_be_reached_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network may be down, or Ray's GCS: only a death that Ray reports is one."""
    monkeypatch.setattr("headrace_cluster.ray.rank_group.UNAVAILABLE_SECONDS", 0)
    away = ray.exceptions.ActorUnavailableError("no connection", None)
    watched: Any = _Watched(away, None, away, "the step loop failed")
    assert asyncio.run(_group(watched).wait_for_death()).endswith("ended: the step loop failed")
    killed: Any = _Watched(away, ray.exceptions.ActorDiedError())
    assert asyncio.run(_group(killed).wait_for_death()) == "rank 0 of m-0 (process 100) was killed"
    unknown: Any = _Watched(ray.exceptions.RaySystemError("no GCS"))
    with pytest.raises(ray.exceptions.RaySystemError):
        asyncio.run(_group(unknown).wait_for_death())
