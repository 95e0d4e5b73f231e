"""Rolled replicas in the reconciler: the next build of the only replica starts beside it, then takes over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_cluster.core.desired import desired_replicas
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.reconciler import Reconciler
from headrace_cluster.core.record import Action, Launch, Record, State, Stop
from headrace_cluster.core.surges import CONNECT_SECONDS, STABLE_CONNECTION_SECONDS
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_cluster.spec.process_specs import HealthSpec
from headrace_proto.role import Role

HEALTH = HealthSpec(silence_seconds=100)
FIRST, SECOND, THIRD = (ReplicaName("smollm2-0", generation) for generation in (1, 2, 3))


def _ready(**model: object) -> Reconciler:
    reconciler = Reconciler(desired_replicas(parse_spec({"models": [model or {"replicas": 1}]})), HEALTH)
    for action in reconciler.actions(0.0):
        reconciler.health_received(action.name, State.READY, 0.01, 0.0)
    return reconciler


def _record(reconciler: Reconciler) -> Record:
    return reconciler.records["smollm2-0"]


def _starting(reconciler: Reconciler, *, allow_gap: bool = False) -> Reconciler:
    assert reconciler.roll("smollm2-0", allow_gap=allow_gap) is True
    (launch,) = reconciler.actions(1.0)
    assert isinstance(launch, Launch) and (launch.name, launch.beside) == (SECOND, True)
    assert reconciler.actions(1.1) == [] and _record(reconciler).name == FIRST
    return reconciler


def _promoted() -> Reconciler:
    reconciler = _starting(_ready())
    reconciler.health_received(SECOND, State.READY, 0.01, 2.0)
    assert reconciler.actions(2.0 + STABLE_CONNECTION_SECONDS) == [Stop(FIRST, drain=True)]
    return reconciler


def test_the_only_replica_drains_when_the_next_build_has_taken_over() -> None:
    reconciler = _starting(_ready())
    assert reconciler.ready, "requests are served throughout"
    reconciler.health_received(SECOND, State.READY, 0.01, 2.0, connected=False)
    assert reconciler.actions(2.0 + 2 * STABLE_CONNECTION_SECONDS) == [], "a router without it would respond with 503"
    assert [record.name for record in reconciler.builds() if record.state is State.READY] == [FIRST, SECOND]
    reconciler.health_received(SECOND, State.READY, 0.01, 4.0)
    assert reconciler.actions(4.0) == []
    assert reconciler.actions(4.0 + STABLE_CONNECTION_SECONDS) == [Stop(FIRST, drain=True)]
    assert (_record(reconciler).name, _record(reconciler).state) == (SECOND, State.READY)
    assert reconciler.surges.leaving["smollm2-0"].state is State.DRAINING and reconciler.ready
    reconciler.health_received(FIRST, State.READY, 0.01, 5.0)  # a late message does not make it ready
    assert reconciler.actions(5.0) == [] and not reconciler.idle
    reconciler.stopped(FIRST, 6.0)
    assert list(reconciler.builds()) == [_record(reconciler)]


def test_if_another_replica_serves_it_ends_first() -> None:
    reconciler = _ready(replicas=2)
    assert reconciler.roll("smollm2-0", allow_gap=False) is False
    assert reconciler.actions(1.0) == [Stop(FIRST, drain=True)]
    assert reconciler.actions(2.0) == [] and _record(reconciler).state is State.DRAINING
    reconciler.stopped(FIRST, 3.0)
    (launch,) = reconciler.actions(3.0)
    assert isinstance(launch, Launch) and (launch.name, launch.beside) == (SECOND, False)
    reconciler.health_received(SECOND, State.READY, 0.01, 4.0)
    assert reconciler.actions(5.0) == [] and reconciler.ready, "once"


def test_a_prefill_replica_ends_first() -> None:
    reconciler = _ready(prefill={}, decode={})
    assert reconciler.roll("smollm2-1", allow_gap=False) is False
    assert reconciler.roll("smollm2-0", allow_gap=False) is True


def test_after_a_failed_next_build_the_old_one_continues() -> None:
    reconciler = _starting(_ready(), allow_gap=True)
    reconciler.start_failed(SECOND, "a bad file", 2.0, final=True)
    assert "a bad file" in reconciler.surges.failed["smollm2-0"] and not reconciler.fatal
    assert reconciler.actions(3.0) == [], "--allow-gap is for missing resources, not for builds that do not start"
    assert (_record(reconciler).name, _record(reconciler).state) == (FIRST, State.READY)
    reconciler.roll("smollm2-0", allow_gap=False)
    assert reconciler.surges.failed == {}
    (launch,) = reconciler.actions(4.0)
    assert launch.name == THIRD, "no number is reused"


@pytest.mark.parametrize("allow_gap", [False, True])
def test_without_resources_for_two_it_ends_first_if_allowed(allow_gap: bool) -> None:
    reconciler = _starting(_ready(), allow_gap=allow_gap)
    reconciler.start_failed(SECOND, "Ray has free: nothing", 2.0, final=True, lacks_resources=True)
    if not allow_gap:
        assert "--allow-gap" in reconciler.surges.failed["smollm2-0"] and reconciler.actions(3.0) == []
        return
    assert reconciler.actions(3.0) == [Stop(FIRST, drain=True)]
    reconciler.stopped(FIRST, 4.0)
    (launch,) = reconciler.actions(4.0)
    assert isinstance(launch, Launch) and (launch.name, launch.beside) == (THIRD, False)
    assert reconciler.surges.failed == {}


def test_an_unhealthy_next_build_is_ended() -> None:
    slow, silent, sick, unconnected, dead = (_starting(_ready()) for _ in range(5))
    assert slow.actions(1.0 + HEALTH.start_seconds + 1)[0] == Stop(SECOND, drain=False)
    for reconciler in (silent, unconnected):
        reconciler.health_received(SECOND, State.READY, 0.01, 2.0, connected=False)
    assert unconnected.actions(2.1 + CONNECT_SECONDS) == [Stop(SECOND, drain=False)]
    assert "router" in unconnected.surges.failed["smollm2-0"]
    last = 2.0 + HEALTH.silence_seconds + HEALTH.replace_seconds
    silent.health_received(SECOND, State.READY, 0.01, 2.0)
    silent.health_received(FIRST, State.READY, 0.01, last)
    assert silent.actions(last) == [], "it does not take over, and may recover"
    assert silent.actions(last + 1) == [Stop(SECOND, drain=False)]
    sick.health_received(SECOND, State.UNHEALTHY, 0.01, 2.0)
    assert sick.actions(2.0 + HEALTH.replace_seconds) == []
    assert sick.actions(2.1 + HEALTH.replace_seconds) == [Stop(SECOND, drain=False)]
    dead.died(SECOND, "killed", 2.0)
    assert dead.actions(2.0) == []
    for reconciler in (silent, sick, unconnected, dead):
        assert (_record(reconciler).name, _record(reconciler).state) == (FIRST, State.READY)
        reconciler.stopped(SECOND, 200.0)  # a late event changes nothing
        assert reconciler.surges.failed and reconciler.surges.following(_record(reconciler)) is None


def test_when_the_old_build_dies_the_next_one_replaces_it() -> None:
    reconciler = _starting(_ready())
    reconciler.died(FIRST, "killed", 2.0)
    assert reconciler.actions(2.0) == [], "no third build"
    assert (_record(reconciler).name, _record(reconciler).state) == (SECOND, State.STARTING)
    reconciler.start_failed(SECOND, "too little memory", 3.0, final=True)
    assert not reconciler.fatal, "it was ready once"
    (launch,) = reconciler.actions(10.0)
    assert launch.name == THIRD


def test_an_old_build_that_dies_while_it_drains_is_removed() -> None:
    reconciler = _promoted()
    reconciler.died(FIRST, "killed", 3.0)
    assert reconciler.actions(3.0) == [] and list(reconciler.builds()) == [_record(reconciler)]


def test_a_drain_and_a_stop_end_the_next_build() -> None:
    held, stopped = _starting(_ready()), _starting(_ready())
    held.hold("smollm2-0")
    stopped.set_desired(())
    for reconciler in (held, stopped):
        assert reconciler.actions(2.0) == [Stop(SECOND, drain=False), Stop(FIRST, drain=True, held=reconciler is held)]
        reconciler.stopped(FIRST, 3.0)
    assert held.actions(4.0) == stopped.actions(4.0) == []
    assert _record(held).state is State.DRAINED and stopped.idle


def test_the_next_build_has_the_current_role_of_the_old_one() -> None:
    reconciler = _ready()
    _record(reconciler).role = Role.DECODE
    reconciler.roll("smollm2-0", allow_gap=False)
    (launch,) = reconciler.actions(1.0)
    assert isinstance(launch, Launch) and launch.role is Role.DECODE


EVENTS = ("ready", "unready", "die", "fail", "lacks resources", "roll", "gap", "hold", "release", "stopped")


@given(events=st.lists(st.tuples(st.sampled_from(EVENTS), st.booleans(), st.floats(0, 40))))
def test_in_any_event_sequence_the_only_replica_drains_only_for_a_ready_one(
    events: list[tuple[str, bool, float]],
) -> None:
    """At most two builds, no number is reused, no drain of the serving build before the next is ready or a gap is
    allowed."""
    reconciler = _ready()
    alive, ending = {FIRST: State.READY}, set[ReplicaName]()
    newest, now, gap = 1, 0.0, False

    def take(actions: list[Action]) -> None:
        nonlocal newest
        for action in actions:
            if isinstance(action, Launch):
                assert action.name.generation == newest + 1
                newest += 1
                alive[action.name] = State.STARTING
                assert len(alive) <= 2 and action.beside == (len(alive) == 2)
            else:
                was = alive.pop(action.name)
                held = _record(reconciler).held
                if was is State.READY and action.drain and not held and not gap:
                    assert State.READY in alive.values(), "no build serves"
                ending.add(action.name)

    for kind, second, delay in events:
        name = sorted(alive)[-1 if second else 0] if alive else None
        record = _record(reconciler)
        if kind in ("roll", "gap") and record.state is State.READY and not record.held and not record.rolling:
            if reconciler.surges.following(record) is None and not reconciler.surges.leaving:
                gap = kind == "gap"
                reconciler.roll("smollm2-0", allow_gap=gap)
        elif kind == "hold":
            reconciler.hold("smollm2-0")
        elif kind == "release":
            reconciler.release("smollm2-0")
        elif kind == "stopped":
            for ended in ending:
                reconciler.stopped(ended, now)
            ending.clear()
        elif name is not None and kind in ("ready", "unready"):
            alive[name] = State.READY if kind == "ready" else alive[name]
            reconciler.health_received(name, alive[name], 0.01, now, connected=kind == "ready")
        elif name is not None and kind == "die":
            del alive[name]
            reconciler.died(name, "killed", now)
        elif name is not None and kind in ("fail", "lacks resources") and alive[name] is State.STARTING:
            del alive[name]
            reconciler.start_failed(name, "failed", now, final=False, lacks_resources=kind == "lacks resources")
        now += delay
        take(reconciler.actions(now))


@pytest.mark.parametrize("cause", ["it drains", "it is silent", "the old one ended"])
def test_a_next_build_that_drains_is_ended(cause: str) -> None:
    """A call of an earlier controller may arrive late; it never becomes ready again."""
    reconciler = _starting(_ready())
    reconciler.health_received(SECOND, State.DRAINING, 0.01, 2.0)
    assert reconciler.actions(2.0 + HEALTH.replace_seconds) == []
    now = 2.1 + HEALTH.replace_seconds
    if cause == "it drains":
        reconciler.health_received(SECOND, State.DRAINING, 0.01, now)
    elif cause == "the old one ended":
        reconciler.died(FIRST, "it was killed", now)
    assert Stop(SECOND, drain=False) in reconciler.actions(now)
    assert _record(reconciler).name != SECOND and reconciler.surges.following(_record(reconciler)) is None
