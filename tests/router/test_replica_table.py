"""The columns that decisions read are always those of the replicas, whatever happened to these."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace_proto.control_pb2 import Member
from headrace_proto.replica_pb2 import (
    REPLICA_STATE_DRAINING,
    REPLICA_STATE_READY,
    ROLE_BOTH,
    ROLE_PREFILL,
    CacheFrame,
    Counters,
    Load,
    ModelFacts,
    ReplicaFrame,
    ReplicaIdentity,
    StepModel,
    Submit,
)
from headrace_router.core.attempt import Outcome
from headrace_router.core.placement import KvSource
from headrace_router.core.prefix_index import PrefixIndex
from headrace_router.core.replica_blocks import ReplicaBlocks
from headrace_router.core.replica_state import ReplicaState
from headrace_router.core.replica_table import SPARE_NAMES, ReplicaTable

State = ReplicaState[None]


class Fleet:
    """Three replicas, and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ids = iter(range(10_000))
        index = PrefixIndex(4096)
        self.replicas = [self._replica(number, index) for number in range(3)]
        self.table: ReplicaTable[None] = ReplicaTable()
        self.table.set_replicas(self.replicas)

    def _replica(self, number: int, index: PrefixIndex) -> State:
        identity = ReplicaIdentity(replica_id=f"r{number}", boot_id=b"b", model="m", revision="x", role=ROLE_BOTH)
        identity.kv_layout.block_size = 4
        state: State = ReplicaState(
            Member(address=f"a{number}", state=REPLICA_STATE_READY, identity=identity),
            clock=lambda: self.now,
            new_id=lambda: next(self.ids).to_bytes(16, "big"),
            on_send=lambda: None,
            blocks=ReplicaBlocks(index),
        )
        state.describe(ModelFacts(identity=identity, kv_blocks=4, max_num_seqs=8, cache_key=b"k" * 32), None)
        state.receive(ReplicaFrame(hello=identity, step=1))
        return state

    def check(self) -> None:
        """What is kept current equals what is read anew."""
        self.table.refresh()
        fresh = np.array([self.table._row(replica) for replica in self.replicas]).T
        np.testing.assert_array_equal(self.table._data, fresh)


def describe(state: State, model: str, revision: str) -> None:
    facts = ModelFacts()
    assert state.facts is not None
    facts.CopyFrom(state.facts)
    facts.identity.model, facts.identity.revision = model, revision
    state.describe(facts, None)


def submit(state: State) -> None:
    state.submit(Submit(prompt_token_ids=[1] * 9, output_token_ids=[2]), lambda *_: None, lambda _: None, 4)


def end_one(state: State) -> None:
    for attempt in list(state.attempts.values())[:1]:
        attempt.end(Outcome.LOST)


def report(state: State) -> None:
    load = Load(
        running=3,
        waiting_tokens=50,
        kv_usage=0.5,
        free_blocks=2,
        predicted_step_ms=7,
        step_model=StepModel(base_ms=1, per_prefill_token_ms=2, error_ms=3),
        counters=Counters(prefix_cache_queries=100 * state.heartbeat.step, prefix_cache_hits=50 * state.heartbeat.step),
    )
    state.receive(ReplicaFrame(step=state.heartbeat.step + 1, load=load))


def cache(state: State) -> None:
    frame = CacheFrame(boot_id=b"b", sequence=1, snapshot=True, snapshot_end=True)
    frame.events.add(stored=[bytes([number]) * 16 for number in range(1, 6)], cleared=True)
    assert state.blocks is not None
    state.blocks.receive(frame)
    state.set_changed()  # as the replica's link does


def drain(state: State) -> None:
    state.list_as(Member(address="a", state=REPLICA_STATE_DRAINING, identity=state.identity))


def compute_for_others(state: State) -> None:
    source: KvSource[None] = KvSource(state, cached_only=False)
    source.expect(b"elsewhere", 700, state)


def compute_no_more(state: State) -> None:
    KvSource(state, cached_only=False).remove(b"elsewhere")


def to_prefill(state: State) -> None:
    identity = ReplicaIdentity()
    identity.CopyFrom(state.identity)
    identity.role = ROLE_PREFILL
    state.list_as(Member(address="a", state=REPLICA_STATE_READY, identity=identity))


EVENTS: list[Callable[[State], Any]] = [
    submit,
    end_one,
    report,
    cache,
    drain,
    compute_for_others,
    compute_no_more,
    to_prefill,
    State.disconnect,
    State.end_attempts,
]


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 2)), max_size=40))
def test_the_columns_follow_every_event(events: list[tuple[Callable[[State], Any], int]]) -> None:
    fleet = Fleet()
    for event, number in events:
        event(fleet.replicas[number])
        fleet.now += 0.1
        fleet.check()


def test_usable_replicas_are_those_that_are_ready() -> None:
    fleet = Fleet()
    to_prefill(fleet.replicas[2])
    fleet.table.refresh()
    assert fleet.table.usable("m", "x", fleet.now, prefill=False).tolist() == [0, 1]
    assert fleet.table.usable("m", "x", fleet.now, prefill=True).tolist() == [2]
    assert fleet.table.usable("m", "y", fleet.now, prefill=False).tolist() == []
    fleet.now = 100.0
    assert not len(fleet.table.usable("m", "x", fleet.now, prefill=False)), "their step loops do not move"
    for state in fleet.replicas:
        assert state.takes_work and state.stalled and not state.ready


def test_ready_replicas_by_model_and_revision() -> None:
    fleet = Fleet()
    for state, model, revision in zip(fleet.replicas, "mnm", "yxx", strict=True):
        describe(state, model, revision)
    fleet.table.refresh()

    def ids(replicas: Any) -> list[str]:
        return [replica.replica_id for replica in replicas]

    ready = fleet.table.ready(fleet.now)
    assert {key: ids(replicas) for key, replicas in ready.items()} == {
        ("m", "y"): ["r0"],
        ("n", "x"): ["r1"],
        ("m", "x"): ["r2"],
    }
    of_model = fleet.table.ready_of("m", fleet.now)
    assert {revision: ids(replicas) for revision, replicas in of_model.items()} == {"y": ["r0"], "x": ["r2"]}
    fleet.now = 100.0
    assert not fleet.table.ready(fleet.now) and not fleet.table.ready_of("m", fleet.now)


def test_names_that_no_replica_has_any_more_are_forgotten() -> None:
    """A replica may describe itself as another revision whenever it connects."""
    fleet = Fleet()
    for number in range(500):
        describe(fleet.replicas[1], "m", f"revision-{number}")
        fleet.table.refresh()
        assert len(fleet.table.models) <= 2 * 3 + SPARE_NAMES + 1
    assert fleet.table.usable("m", "revision-499", fleet.now, prefill=False).tolist() == [1]
    assert fleet.table.usable("m", "x", fleet.now, prefill=False).tolist() == [0, 2]
