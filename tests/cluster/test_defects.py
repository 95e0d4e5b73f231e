"""A replica whose output was not finite where another's was is replaced: its device may be defective."""

from collections.abc import Sequence

import pytest

from headrace_cluster.core.defects import LEAST_PROMPTS, NotFinite
from headrace_cluster.core.desired import desired_replicas
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.reconciler import Reconciler
from headrace_cluster.core.record import Action, State, Stop
from headrace_cluster.core.router_reports import RouterReports
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_cluster.spec.process_specs import HealthSpec

HEALTH = HealthSpec()
A, B, C = (ReplicaName(f"smollm2-{number}", 1) for number in range(3))


class Bench:
    """Three ready replicas that have ended so many attempts each."""

    def __init__(self, **ended: int) -> None:
        self.now = 0.0
        self.router_reports = RouterReports()
        spec = parse_spec({"models": [{"replicas": 3}]})
        self.reconciler = Reconciler(desired_replicas(spec), HEALTH, self.router_reports)
        self.reconciler.actions(0.0)
        self.ended = {A: ended.get("a", 100), B: ended.get("b", 100), C: ended.get("c", 100)}
        self.run()

    def run(self, *routers: Sequence[NotFinite]) -> list[Action]:
        """What one pass does after a report of each router."""
        self.now += 0.5
        for name, count in self.ended.items():
            self.reconciler.count_not_finite(name, count)
            self.reconciler.health_received(name, State.READY, 0.01, self.now)
        for number, found in enumerate(routers):
            self.router_reports.report(f"router-{number}", dict.fromkeys(self.ended, True), self.now, found)
        return self.reconciler.actions(self.now)

    def cause(self, name: ReplicaName) -> str:
        return self.reconciler.records[name.replica_id].cause


def _found(name: ReplicaName, prompts: int, source: ReplicaName | None = None) -> NotFinite:
    return NotFinite(name, source, prompts)


def test_it_is_replaced_with_a_reason() -> None:
    bench = Bench()
    assert bench.run([_found(A, LEAST_PROMPTS - 1)]) == []
    assert bench.run([_found(A, LEAST_PROMPTS)]) == [Stop(A, drain=False)]
    assert "not finite for 3 prompts" in bench.cause(A) and "device may be defective" in bench.cause(A)


def test_the_reports_of_all_routers_count() -> None:
    bench = Bench()
    assert bench.run([_found(A, 1)], [_found(A, 1)]) == []
    assert bench.run([_found(A, 1)], [_found(A, 1)], [_found(A, 1)]) == [Stop(A, drain=False)]


def test_what_all_replicas_do_is_the_fault_of_none() -> None:
    bench = Bench()
    assert bench.run([_found(A, 10), _found(B, 10)]) == []
    assert bench.run([_found(A, 10), _found(B, 6), _found(C, 6)]) == []
    assert bench.run([_found(A, 10), _found(B, 4)]) == []
    assert {record.state for record in bench.reconciler.records.values()} == {State.READY}


def test_a_router_alone_cannot_have_a_replica_replaced() -> None:
    bench = Bench(a=2)
    assert bench.run([_found(A, 2**32 - 1)], [_found(A, 2**32 - 1)]) == []


def test_one_of_several_routers_cannot_have_a_source_replaced() -> None:
    """A source reports nothing of itself: two routers must have found it, or there is only one."""
    bench = Bench(b=0)
    assert bench.run([_found(A, 50, B), _found(C, 50, B)], []) == []
    assert bench.run([_found(A, 3, B)], [_found(C, 3, B)]) == [Stop(B, drain=False)]


@pytest.mark.parametrize("source", [B, C])
def test_the_source_of_the_blocks_may_be_the_cause(source: ReplicaName) -> None:
    other = C if source == B else B
    bench = Bench()
    assert bench.run([_found(A, 2, source), _found(other, 2, source)]) == [Stop(source, drain=False)]


def test_the_older_one_of_a_pair_is_replaced_first_then_the_other_one() -> None:
    bench = Bench()
    bench.reconciler.died(A, "killed", bench.now)
    bench.reconciler.actions(bench.now)
    new = ReplicaName(A.replica_id, 2)
    bench.ended[new] = bench.ended.pop(A)
    bench.now = 100.0
    assert bench.run([_found(new, 3, B)]) == [Stop(B, drain=False)]
    assert State.READY is bench.reconciler.records[new.replica_id].state
    bench.ended.pop(B)
    assert Stop(new, drain=False) not in bench.run([_found(new, 3, B)]), "what B took part in counts no more"
    assert bench.run([_found(new, 3, C)]) == [Stop(C, drain=False)]


def test_the_only_one_that_answers_serves_on() -> None:
    """Most of its answers are right: without another replica, its end would be an outage."""
    bench = Bench()
    for name in (B, C):
        bench.reconciler.died(name, "killed", bench.now)
        del bench.ended[name]
    assert Stop(A, drain=False) not in bench.run([_found(A, 5)])
    assert bench.reconciler.records[A.replica_id].state is State.READY
    bench.ended[ReplicaName(B.replica_id, 2)] = 0
    assert Stop(A, drain=False) in bench.run([_found(A, 5)]), "the next build of another one answers"


def test_it_stays_unhealthy_until_the_budget_allows_a_stop() -> None:
    bench = Bench()
    for stop in range(HEALTH.stops_per_minute):
        assert bench.reconciler._health_judge.may_stop(bench.now), stop
    assert bench.run([_found(A, 3)]) == []
    assert bench.run([]) == [] and bench.reconciler.records[A.replica_id].state is State.UNHEALTHY
    assert "so it waits" in bench.cause(A)
    bench.now += 60.0
    assert bench.run([]) == [Stop(A, drain=False)]


def test_the_next_build_begins_without_a_count() -> None:
    bench = Bench()
    assert bench.run([_found(A, 3)]) == [Stop(A, drain=False)]
    bench.reconciler.stopped(A, bench.now)
    bench.ended[ReplicaName(A.replica_id, 2)] = 0
    del bench.ended[A]
    bench.run([_found(A, 3)])
    assert bench.run([_found(A, 3)]) == []
    assert bench.reconciler.records[A.replica_id].state is State.READY


def test_a_defect_is_of_a_build_alone() -> None:
    """An operator ended the build meanwhile: the next one is healthy."""
    bench = Bench()
    record = bench.reconciler.records[A.replica_id]
    record.defect, record.not_finite = "its device may be defective", 9  # found while no further build may be stopped
    bench.reconciler.hold(A.replica_id)
    bench.run()
    bench.reconciler.stopped(A, bench.now)
    bench.reconciler.release(A.replica_id)
    for _ in range(3):
        bench.run()
    assert record.generation == 2 and not record.defect and not record.not_finite
    following = ReplicaName(A.replica_id, 2)
    bench.reconciler.health_received(following, State.READY, 0.01, bench.now)
    assert not any(isinstance(action, Stop) and action.name == following for action in bench.run())
