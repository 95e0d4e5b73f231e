"""The fleet's decisions, call by call: stalls, revisions, readiness, moves, pacing, choices that run alone."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from headrace_proto.control_pb2 import Member, MemberList, ModelEntry
from headrace_proto.replica_pb2 import (
    REPLICA_STATE_DRAINING,
    REPLICA_STATE_READY,
    Load,
    ModelFacts,
    ReplicaFrame,
    ReplicaIdentity,
    Sampling,
    StepModel,
    Submit,
)
from headrace_router.core.attempt import Attempt, Outcome
from headrace_router.core.errors import NoReplicaError, RevisionReplacedError
from headrace_router.core.fleet import ARRIVALS, Fleet
from headrace_router.core.placement import FleetPlacement, MustWaitError
from headrace_router.core.policy import LeastLoad
from headrace_router.core.policy.interface import ChoiceRequest
from headrace_router.core.policy.rebalance import AFTER_LOSS_SECONDS, PAUSE_SECONDS
from headrace_router.core.replica_state import ReplicaState
from headrace_router.core.step_speed import LONGEST_PROBE_PAUSE, PROBE_SHARE

STEP = 0.1


class Link:
    """A replica that is connected at once; tests write its frames."""

    def __init__(self, cluster: "Cluster", member: Member) -> None:
        ids = itertools.count()
        self.state: ReplicaState[str] = ReplicaState(
            member,
            clock=lambda: cluster.now,
            new_id=lambda: f"{member.address}#{next(ids)}".encode(),
            on_send=lambda: None,
        )
        identity = member.identity
        self.state.describe(ModelFacts(identity=identity), f"card of {identity.revision}")
        self.state.receive(ReplicaFrame(hello=identity))
        self.step = 0
        self.silence: list[float] = []  # seconds without a step, at each check

    def report(self, **load: Any) -> None:
        self.step += 1
        self.state.receive(ReplicaFrame(step=self.step, load=Load(**load)))

    def close(self) -> None:
        self.state.disconnect()

    def check_stall(self) -> None:
        self.silence.append(self.state.heartbeat.seconds)


class Cluster:
    """A fleet in virtual time."""

    def __init__(self, *revisions: str, named: str = "", jitter: float = 0.0, models: Sequence[str] = ("m",)) -> None:
        """Replica `rN` has the Nth revision and generation 1; `rev:G` = generation G."""
        self.now = 100.0
        self.links: list[Link] = []
        self.fleet: Fleet[str] = Fleet(self._open, 0, clock=lambda: self.now, jitter=lambda: jitter)
        self.placement = FleetPlacement(self.fleet, LeastLoad(), clock=lambda: self.now)
        members = []
        for number, entry in enumerate(revisions):
            revision, _, generation = entry.partition(":")
            identity = ReplicaIdentity(
                replica_id=f"r{number}", model=models[0], revision=revision, generation=int(generation or 1)
            )
            members.append(Member(identity=identity, address=f"a{number}", state=REPLICA_STATE_READY))
        entries = [ModelEntry(name=name, revision=named) for name in models]
        self.fleet.update(MemberList(members=members, models=entries))

    def _open(self, member: Member) -> Link:
        self.links.append(Link(self, member))
        return self.links[-1]

    def run(self, seconds: float, **loads: dict[str, Any]) -> None:
        """Every replica that is in `loads` reports once a STEP."""
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            for link in self.links:
                if link.state.replica_id in loads:
                    link.report(**loads[link.state.replica_id])
            self.fleet.maintain()

    def place(self, output_tokens: int = 0, **options: Any) -> str:
        placed = self.placement.place(REQUEST, output_tokens, (), **options)
        assert placed is not None
        return placed.replica.replica_id

    def start(self, number: int, output_tokens: int = 0) -> Attempt:
        submit = Submit(prompt_token_ids=[1, 2], output_token_ids=[5] * output_tokens)
        return self.links[number].state.submit(submit, lambda *_: None, lambda _: None)


REQUEST = ChoiceRequest("label", "m", "x", b"", [1, 2, 3], Sampling(max_tokens=4))
IDLE: dict[str, Any] = {}


def test_a_fleet_is_joined_once_a_replica_that_serves_elsewhere_is_ready_here() -> None:
    cluster = Cluster()
    assert not cluster.fleet.joined, "no list of a controller"
    cluster.fleet.update(MemberList(epoch=b"e", version=1))
    assert cluster.fleet.joined, "no replica serves anywhere"
    later = Cluster()
    identity = ReplicaIdentity(replica_id="r0", model="m", revision="x", generation=1)
    member = Member(identity=identity, state=REPLICA_STATE_READY)
    later.fleet.update(MemberList(epoch=b"e", version=1, members=[member]))
    assert not later.fleet.joined, "the controller knows it by name only"
    member.address = "a0"
    later.fleet.update(MemberList(epoch=b"e", version=2, members=[member]))
    later.run(STEP, r0=IDLE)
    assert later.fleet.joined
    later.links[0].state.disconnect()
    assert later.fleet.joined and not later.fleet.ready, "clients get 503 when all are lost"


def test_a_stall_is_counted_by_the_clock_and_not_by_calls() -> None:
    """Ended attempts call `sweep`; four of them in one turn of the event loop moved a healthy replica's streams."""
    cluster = Cluster("x", "x")
    attempt = cluster.start(0)
    cluster.run(1.0, r0=IDLE, r1=IDLE)
    cluster.now += 2.5  # this process was paused
    cluster.links[1].report()
    for _ in range(10):
        cluster.fleet.sweep()
    cluster.fleet.maintain()
    assert attempt.open and cluster.links[0].state.ready, "its frames of that time are not read yet"
    cluster.run(1.0, r0=IDLE, r1=IDLE)
    assert attempt.open
    cluster.run(3.0, r1=IDLE)
    assert attempt.outcome is Outcome.LOST


def test_a_stalled_replica_keeps_its_attempts_if_none_of_its_revision_can_take_them() -> None:
    """The drained build of a changed spec made a step of 2.3 s: all of its streams failed."""
    cluster = Cluster("x", "y:2", named="y")
    listing = cluster.links[0].state.listing
    assert listing is not None
    listing.state = REPLICA_STATE_DRAINING
    attempt = cluster.start(0)
    cluster.run(1.0, r0=IDLE, r1=IDLE)
    cluster.run(2.3, r1=IDLE)
    assert attempt.open and cluster.links[0].state.stalled
    cluster.run(1.0, r0=IDLE, r1=IDLE)
    assert attempt.open and not cluster.links[0].state.stalled


def test_one_rebuilt_replica_does_not_take_all_requests() -> None:
    assert Cluster(*["x"] * 9, "y:2").fleet.card("m") == "card of x"
    assert Cluster(*["x"] * 9, "y:2", named="y").fleet.card("m") == "card of y", "as the spec names it"
    assert Cluster("x", "y:2", named="z").fleet.card("m") == "card of y", "none of the named one is ready"
    with pytest.raises(NoReplicaError):
        Cluster(named="x").fleet.card("m")


def test_a_stream_of_a_replaced_revision_ends_at_once() -> None:
    """It waited a minute for a replica that could not come."""
    cluster = Cluster("x", "y", named="y")
    old, new = cluster.links
    assert cluster.place(5) == "r0"
    old.state.disconnect()
    assert cluster.placement.place(REQUEST, 5, ()) is None, "it may connect again"
    assert cluster.placement.place(REQUEST, 0, ()) is None
    assert old.state.listing is not None and new.state.listing is not None
    old.state.listing.state = REPLICA_STATE_DRAINING
    with pytest.raises(RevisionReplacedError, match="another revision"):
        cluster.placement.place(REQUEST, 5, ())
    new.state.listing = None
    assert cluster.placement.place(REQUEST, 5, ()) is None, "no replica has shown that it has the named one"


@pytest.mark.parametrize("named", ["", "x", "main"])
def test_a_stream_waits_for_a_revision_that_may_be_built_again(named: str) -> None:
    cluster = Cluster("y", named=named)
    assert cluster.placement.place(REQUEST, 5, ()) is None


def test_a_model_without_replicas_is_not_ready_alone() -> None:
    fleet = Cluster("x", models=("m", "other")).fleet
    assert fleet.ready and fleet.model_ready("m") and not fleet.model_ready("other") and not fleet.model_ready("no")
    with pytest.raises(NoReplicaError):
        fleet.card("other")
    assert not Cluster(models=("m",)).fleet.ready


def test_a_stream_moves_to_the_replica_that_was_chosen() -> None:
    cluster = Cluster("x", "x", "x")
    hot, attempt = cluster.links[0], cluster.start(0)
    attempt._next_index += 1
    cluster.links[1].report(running=3, kv_usage=0.1)
    cluster.links[2].report(running=2, kv_usage=0.3)
    hot.report(running=8, waiting=2, kv_usage=0.9)
    cluster.fleet.rebalance(cluster.now)
    assert attempt.outcome is Outcome.MOVED and attempt.target is cluster.links[2].state
    cluster.links[2].report(running=9, kv_usage=0.3)  # meanwhile it has more requests
    assert cluster.place(1, preferred=attempt.target) == "r2"


def test_a_router_waits_its_own_time_before_it_moves_a_stream() -> None:
    """So that several routers do not move one each before the loads show the first move."""

    def moved_after(jitter: float) -> float:
        cluster = Cluster("x", "x", jitter=jitter)
        attempt = cluster.start(0)
        attempt._next_index += 1
        start = cluster.now
        while attempt.open:
            cluster.run(STEP, r0={"running": 8, "waiting": 2, "kv_usage": 0.9}, r1={"kv_usage": 0.1})
            cluster.fleet.rebalance(cluster.now)
        return cluster.now - start

    first, second = moved_after(0.0), moved_after(0.9)
    assert first <= STEP + 1e-6 and 0.8 * PAUSE_SECONDS < second - first <= PAUSE_SECONDS

    cluster = Cluster("x", "x", jitter=0.9)
    attempt = cluster.start(0)
    attempt._next_index += 1
    cluster.run(STEP, r0={"running": 8, "waiting": 2, "kv_usage": 0.9}, r1={"kv_usage": 0.1})
    cluster.fleet.rebalance(cluster.now)
    for _ in range(10):  # the move of another router was enough
        cluster.run(STEP, r0={"running": 7, "kv_usage": 0.7}, r1={"running": 1, "kv_usage": 0.2})
        cluster.fleet.rebalance(cluster.now)
    assert attempt.open


def test_nothing_is_rebalanced_shortly_after_a_loss() -> None:
    cluster = Cluster("x", "x", "x")
    attempt = cluster.start(0)
    attempt._next_index += 1
    busy = {"running": 8, "waiting": 2, "kv_usage": 0.9}
    cluster.fleet.rebalance(cluster.now)
    cluster.links[2].close()
    for _ in range(round(AFTER_LOSS_SECONDS / STEP) - 1):
        cluster.run(STEP, r0=busy, r1={"kv_usage": 0.1})
        cluster.fleet.rebalance(cluster.now)
        assert attempt.open
    cluster.run(3 * STEP, r0=busy, r1={"kv_usage": 0.1})
    cluster.fleet.rebalance(cluster.now)
    assert not attempt.open


def test_few_streams_at_a_time_continue_on_one_replica() -> None:
    cluster = Cluster("x", "x")
    for number in [0, 1] * ARRIVALS:
        cluster.start(number, output_tokens=3)
    with pytest.raises(MustWaitError):
        cluster.place(3)
    assert cluster.place(0), "new requests are not affected"
    assert cluster.place(3, urgent=True)
    state = cluster.links[1].state
    state.arriving.pop()  # it has tokens
    state.set_changed()
    assert cluster.place(3) == "r1"
    next(iter(state.attempts.values())).cancel()
    assert len(state.arriving) < ARRIVALS


def _busy(step_ms: float, model_ms: float) -> dict[str, Any]:
    return {"running": 4, "predicted_step_ms": step_ms, "step_model": StepModel(base_ms=model_ms)}


def test_a_slow_replica_is_tried_again_with_few_requests() -> None:
    """Its model has adapted to its slow steps: only the comparison with its peers shows them."""
    cluster = Cluster("x", "x", "x")
    normal = _busy(100, 100)
    cluster.run(3.0, r0=normal, r1=normal, r2=normal)
    slow = cluster.links[2].state
    assert not slow.speed.slow
    cluster.run(5.0, r0=normal, r1=normal, r2=_busy(100, 500))
    assert slow.speed.slow and slow.ready
    cluster.run(3.0, r0=IDLE, r1=IDLE, r2=IDLE)  # nothing runs there any more
    placed = [cluster.place() for _ in range(100)]
    assert placed.count("r2") == 1
    cluster.run(1.2, r0=IDLE, r1=IDLE, r2=IDLE)
    placed = [cluster.place() for _ in range(PROBE_SHARE)]
    assert placed.count("r2") == 1
    cluster.run(LONGEST_PROBE_PAUSE, r0=IDLE, r1=IDLE, r2=IDLE)
    assert cluster.place() == "r2", "one in any case: few requests arrive"
    cluster.run(1.0, r0=normal, r1=normal, r2=normal)
    assert not slow.speed.slow


def test_a_single_pause_is_not_slow_and_the_slow_replica_is_used_if_it_is_the_only_one() -> None:
    cluster = Cluster("x", "x")
    normal = _busy(100, 100)
    cluster.run(3.0, r0=normal, r1=normal)
    cluster.run(1.5, r0=normal)
    cluster.run(3.0, r0=normal, r1=normal)
    assert not cluster.links[1].state.speed.slow
    cluster.run(5.0, r0=normal, r1=_busy(100, 500))
    assert cluster.links[1].state.speed.slow
    cluster.links[0].close()
    assert cluster.place() == "r1"
