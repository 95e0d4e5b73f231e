"""The reconciler: events in, actions out; the clock is a number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_cluster.core.desired import desired_replicas
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.reconciler import Reconciler
from headrace_cluster.core.record import BACKOFF_LIMIT_SECONDS, Action, Launch, State, Stop
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_cluster.spec.process_specs import HealthSpec
from headrace_proto.role import Role

HEALTH = HealthSpec()
EVENTS = ("ready", "die", "fail", "silence", "stall", "hold", "release", "stopped")


def _reconciler(replicas: int = 1) -> Reconciler:
    return Reconciler(desired_replicas(parse_spec({"models": [{"replicas": replicas}]})), HEALTH)


def _ready(reconciler: Reconciler, now: float = 0.0) -> ReplicaName:
    (launch,) = reconciler.actions(now)
    assert isinstance(launch, Launch)
    reconciler.health_received(launch.name, State.READY, 0.01, now)
    return launch.name


def _pair() -> tuple[Reconciler, ReplicaName, ReplicaName]:
    """Two ready replicas: the silence of one of them is its own."""
    reconciler = _reconciler(2)
    first, second = (action.name for action in reconciler.actions(0.0))
    for name in (first, second):
        reconciler.health_received(name, State.READY, 0.01, 0.0)
    return reconciler, first, second


def test_builds_each_replica_once() -> None:
    reconciler = _reconciler(2)
    names = [action.name for action in reconciler.actions(0.0)]
    assert names == [ReplicaName("smollm2-0", 1), ReplicaName("smollm2-1", 1)]
    assert reconciler.actions(1.0) == []
    assert not reconciler.ready
    for name in names:
        reconciler.health_received(name, State.READY, 0.01, 1.0)
    assert reconciler.ready


def test_a_dead_replica_is_rebuilt_at_once_with_the_next_generation() -> None:
    reconciler = _reconciler()
    name = _ready(reconciler)
    reconciler.died(name, "rank 0 was killed", 5.0)
    assert reconciler.records["smollm2-0"].state is State.DEAD
    (launch,) = reconciler.actions(5.0)
    assert launch.name == ReplicaName("smollm2-0", 2)


def test_repeated_deaths_back_off_and_are_reported_as_a_crash_loop() -> None:
    reconciler = _reconciler()
    now, waits = 0.0, []
    name = _ready(reconciler)
    for _ in range(10):
        reconciler.died(name, "out of memory", now)
        died = now
        while not (actions := reconciler.actions(now)):
            now += 0.25
        waits.append(now - died)
        name = actions[0].name
        reconciler.health_received(name, State.READY, 0.01, now)
    assert waits[:5] == [0, 1, 2, 4, 8]
    assert max(waits) == BACKOFF_LIMIT_SECONDS
    reconciler.died(name, "out of memory", now)
    loop = reconciler.records["smollm2-0"].crash_loop(now)
    assert "crash loop" in loop and "out of memory" in loop and "next try in" in loop
    assert reconciler.fatal == ""  # it was ready once: the cluster continues


def test_old_failures_do_not_count() -> None:
    reconciler = _reconciler()
    name = _ready(reconciler)
    for now in (0.0, 1000.0, 2000.0):
        reconciler.died(name, "x", now)
        (launch,) = reconciler.actions(now)
        name = launch.name
        reconciler.health_received(name, State.READY, 0.01, now)


def test_missing_health_makes_unhealthy_then_replaces() -> None:
    reconciler, name, other = _pair()
    record = reconciler.records["smollm2-0"]

    def actions(now: float) -> list[Action]:
        reconciler.health_received(other, State.READY, 0.01, now)
        return reconciler.actions(now)

    assert actions(HEALTH.silence_seconds) == [] and record.state is State.READY
    assert actions(2.5) == [] and record.state is State.UNHEALTHY
    assert "no health message" in record.cause
    assert actions(2.5 + HEALTH.replace_seconds) == []
    assert actions(2.6 + HEALTH.replace_seconds) == [Stop(name, drain=False)]
    (launch,) = actions(2.7 + HEALTH.replace_seconds)
    assert launch.name.generation == 2


def test_health_that_resumes_in_time_has_no_effect() -> None:
    reconciler = _reconciler()
    name = _ready(reconciler)
    reconciler.actions(10.0)
    reconciler.health_received(name, State.READY, 0.01, 12.0)
    assert reconciler.records["smollm2-0"].state is State.READY
    assert reconciler.records["smollm2-0"].cause == ""
    assert reconciler.actions(13.0) == []


def test_a_long_step_extends_the_limit() -> None:
    reconciler, name, other = _pair()
    reconciler.health_received(name, State.READY, 3.0, 0.0)  # predicted: the next step takes 3 s
    reconciler.health_received(other, State.READY, 0.01, 11.9)
    reconciler.actions(11.9)
    assert reconciler.records["smollm2-0"].state is State.READY
    reconciler.actions(12.1)
    assert reconciler.records["smollm2-0"].state is State.UNHEALTHY


def test_a_named_error_at_the_first_start_is_fatal() -> None:
    reconciler = _reconciler()
    (launch,) = reconciler.actions(0.0)
    reconciler.start_failed(launch.name, "too little memory", 1.0, final=True)
    assert reconciler.fatal == "too little memory"
    assert reconciler.actions(100.0) == []


def test_a_first_start_that_fails_ends_nothing_while_another_replica_serves() -> None:
    reconciler = _reconciler(2)
    first, second = (action.name for action in reconciler.actions(0.0))
    reconciler.health_received(first, State.READY, 0.01, 1.0)
    reconciler.start_failed(second, "too little memory", 1.0, final=True)
    assert reconciler.fatal == "" and reconciler.unable == {"smollm2-1": "too little memory"}
    (launch,) = reconciler.actions(2.0)
    reconciler.health_received(launch.name, State.READY, 0.01, 3.0)
    assert reconciler.unable == {} and reconciler.ready


def test_a_replica_without_a_place_is_pending_and_starts_when_one_comes() -> None:
    reconciler = _reconciler(2)
    first, second = (action.name for action in reconciler.actions(0.0))
    reconciler.health_received(first, State.READY, 0.01, 1.0)
    record, now = reconciler.records["smollm2-1"], 1.0
    for _ in range(3):  # a node may take hours
        now += 2 * HEALTH.start_seconds
        reconciler.health_received(first, State.READY, 0.01, now)
        reconciler.waits_for_place(second, "waiting for a place: it needs 1 GPU", now)
        assert reconciler.actions(now) == [] and reconciler.fatal == "" and reconciler.unable == {}
        assert (record.state, record.cause) == (State.PENDING, "waiting for a place: it needs 1 GPU")
    reconciler.waits_for_place(second, "", now)
    assert (record.state, record.cause, reconciler.actions(now)) == (State.STARTING, "", [])
    now += HEALTH.start_seconds - 1
    reconciler.health_received(first, State.READY, 0.01, now)
    assert reconciler.actions(now) == [], "its time to start began with its place"
    reconciler.health_received(second, State.READY, 0.01, now)
    reconciler.waits_for_place(second, "too late", now)
    assert reconciler.ready


def test_a_replica_that_gets_its_place_at_once_keeps_the_cause_of_its_failure() -> None:
    """`serve` reads it a moment later."""
    reconciler = _reconciler()
    (first,) = reconciler.actions(0.0)
    reconciler.health_received(first.name, State.READY, 0.01, 1.0)
    reconciler.died(first.name, "it was killed", 2.0)
    (second,) = reconciler.actions(2.0)
    reconciler.waits_for_place(second.name, "", 2.0)
    assert reconciler.records["smollm2-0"].cause == "it was killed"


def test_a_replica_without_a_place_can_be_drained_and_removed() -> None:
    for remove in (False, True):
        reconciler = _reconciler()
        (launch,) = reconciler.actions(0.0)
        reconciler.waits_for_place(launch.name, "waiting", 5.0)
        reconciler.set_desired(()) if remove else reconciler.hold("smollm2-0")
        assert reconciler.actions(6.0) == [Stop(launch.name, drain=False, held=not remove)]


def test_an_unnamed_error_is_retried_twice() -> None:
    reconciler = _reconciler()
    now = 0.0
    for generation in (1, 2, 3):
        assert reconciler.fatal == ""
        while not (actions := reconciler.actions(now)):
            now += 0.5
        assert actions[0].name.generation == generation
        reconciler.start_failed(actions[0].name, "killed", now, final=False)
    assert reconciler.fatal == "killed"


def test_a_failed_restart_of_a_replica_that_was_ready_is_not_fatal() -> None:
    reconciler = _reconciler()
    reconciler.died(_ready(reconciler), "killed", 1.0)
    (launch,) = reconciler.actions(1.0)
    reconciler.start_failed(launch.name, "too little memory", 2.0, final=True)
    assert reconciler.fatal == ""
    assert reconciler.actions(2.5) == []
    assert len(reconciler.actions(3.1)) == 1


def test_a_start_that_takes_too_long_is_ended() -> None:
    reconciler = _reconciler()
    (launch,) = reconciler.actions(0.0)
    (stop,) = reconciler.actions(HEALTH.start_seconds + 1)
    assert stop == Stop(launch.name, drain=False)
    assert "not ready after" in reconciler.records["smollm2-0"].cause


def test_late_events_of_an_old_generation_change_nothing() -> None:
    reconciler = _reconciler()
    old = _ready(reconciler)
    reconciler.died(old, "killed", 1.0)
    (launch,) = reconciler.actions(1.0)
    for event in (
        lambda: reconciler.health_received(old, State.READY, 0.01, 2.0),
        lambda: reconciler.died(old, "again", 2.0),
        lambda: reconciler.start_failed(old, "again", 2.0, final=True),
        lambda: reconciler.stopped(old, 2.0),
    ):
        event()
        record = reconciler.records["smollm2-0"]
        assert (record.state, record.generation) == (State.STARTING, launch.name.generation)


def test_a_replica_that_is_no_longer_desired_drains_and_is_removed() -> None:
    reconciler = _reconciler()
    name = _ready(reconciler)
    reconciler.set_desired(())
    assert reconciler.actions(1.0) == [Stop(name, drain=True)]
    reconciler.health_received(name, State.READY, 0.01, 1.1)  # a late message does not make it ready
    assert reconciler.records["smollm2-0"].state is State.DRAINING
    assert reconciler.actions(2.0) == [] and not reconciler.idle
    reconciler.stopped(name, 3.0)
    assert reconciler.actions(3.0) == []
    assert reconciler.idle and reconciler.records == {}


def test_a_held_replica_drains_does_not_count_and_is_released_as_the_next_generation() -> None:
    reconciler = _reconciler(2)
    first, second = (action.name for action in reconciler.actions(0.0))
    for name in (first, second):
        reconciler.health_received(name, State.READY, 0.01, 0.0)
    record = reconciler.records["smollm2-1"]
    assert record.answers
    reconciler.hold("smollm2-1")
    assert not record.answers and reconciler.ready
    model = record.model.name
    assert not reconciler.drained(model), "another one answers"
    reconciler.hold("smollm2-0")
    assert reconciler.drained(model) and not reconciler.drained("another")
    reconciler.release("smollm2-0")
    assert not reconciler.drained(model)
    assert reconciler.actions(1.0) == [Stop(second, drain=True, held=True)]
    reconciler.health_received(second, State.READY, 0.01, 1.1)  # a late message does not make it ready
    assert record.state is State.DRAINING and reconciler.actions(2.0) == []
    reconciler.stopped(second, 3.0)
    assert record.state is State.DRAINED and reconciler.ready and not reconciler.idle
    assert reconciler.actions(500.0) == []
    reconciler.release("smollm2-1")
    assert not reconciler.ready
    (launch,) = reconciler.actions(501.0)
    assert launch.name == ReplicaName("smollm2-1", 2)


def test_a_replica_held_in_any_state_ends_as_drained() -> None:
    for bring, drain in ((State.STARTING, False), (State.UNHEALTHY, False), (State.READY, True)):
        reconciler = _reconciler()
        (launch,) = reconciler.actions(0.0)
        if bring is not State.STARTING:
            reconciler.health_received(launch.name, bring, 0.01, 0.0)
        reconciler.hold("smollm2-0")
        assert reconciler.actions(1.0) == [Stop(launch.name, drain, held=True)]
        reconciler.stopped(launch.name, 2.0)
        assert reconciler.records["smollm2-0"].state is State.DRAINED
    reconciler = _reconciler()
    reconciler.died(_ready(reconciler), "killed", 1.0)
    reconciler.hold("smollm2-0")
    assert reconciler.actions(1.0) == []
    assert reconciler.records["smollm2-0"].state is State.DRAINED


def test_of_two_replicas_only_one_is_rolled_before_the_other_serves_again() -> None:
    reconciler = _reconciler(2)
    for action in reconciler.actions(0.0):
        reconciler.health_received(action.name, State.READY, 0.01, 0.0)
    assert [reconciler.roll(replica, allow_gap=False) for replica in ("smollm2-0", "smollm2-1")] == [False, True]
    assert reconciler.actions(0.1) == [
        Launch(ReplicaName("smollm2-1", 2), reconciler.records["smollm2-1"].model, Role.BOTH, beside=True),
        Stop(ReplicaName("smollm2-0", 1), drain=True),
    ]


def test_a_replica_that_drains_by_a_late_call_is_built_again() -> None:
    """Of a controller that was lost: it takes no requests any more."""
    reconciler = _reconciler()
    name = _ready(reconciler)
    reconciler.health_received(name, State.DRAINING, 0.01, 1.0)
    assert reconciler.actions(1.0) == [Stop(name, drain=True)]
    reconciler.stopped(name, 2.0)
    (launch,) = reconciler.actions(2.0)
    assert launch.name == ReplicaName("smollm2-0", 2)


def test_a_drained_replica_is_removed_with_the_spec() -> None:
    reconciler = _reconciler()
    name = _ready(reconciler)
    reconciler.hold("smollm2-0")
    reconciler.actions(1.0)
    reconciler.stopped(name, 2.0)
    reconciler.set_desired(())
    assert reconciler.actions(3.0) == [] and reconciler.idle and reconciler.records == {}


def test_a_drain_resets_a_crash_loop() -> None:
    reconciler = _reconciler()
    now = 0.0
    name = _ready(reconciler)
    for _ in range(6):
        reconciler.died(name, "killed", now)
        while not (actions := reconciler.actions(now)):
            now += 0.25
        name = actions[0].name
        reconciler.health_received(name, State.READY, 0.01, now)
    reconciler.died(name, "killed", now)
    reconciler.hold("smollm2-0")
    assert reconciler.actions(now) == []
    reconciler.release("smollm2-0")
    assert len(reconciler.actions(now)) == 1, "an undrain is an explicit retry"
    assert reconciler.records["smollm2-0"].crash_loop(now) == ""


def test_pools_are_built_with_their_shapes_and_keep_a_changed_role() -> None:
    pools = {"prefill": {"replicas": 1, "tp": 2, "pp": 3}, "decode": {"replicas": 2}, "tp": 4}
    reconciler = Reconciler(desired_replicas(parse_spec({"models": [pools]})), HEALTH)
    launches = [action for action in reconciler.actions(0.0) if isinstance(action, Launch)]
    assert [(entry.name.replica_id, entry.role, entry.model.tp, entry.model.pp) for entry in launches] == [
        ("smollm2-0", "decode", 4, 1),
        ("smollm2-1", "decode", 4, 1),
        ("smollm2-2", "prefill", 2, 3),
    ]
    for entry in launches:
        reconciler.health_received(entry.name, State.READY, 0.01, 0.0)
    assert [record.answers for record in reconciler.records.values()] == [True, True, False]
    reconciler.records["smollm2-2"].role = Role.DECODE
    reconciler.died(launches[2].name, "killed", 1.0)
    (again,) = reconciler.actions(1.0)
    assert isinstance(again, Launch) and (again.role, again.model.tp) == (Role.DECODE, 2)


def test_ids_stay_unique_where_models_end_alike() -> None:
    spec = parse_spec({"models": [{"source": "a/tiny", "replicas": 2}, {"source": "b/tiny"}]})
    assert [entry.replica_id for entry in desired_replicas(spec)] == ["tiny-0", "tiny-1", "tiny-2"]


@pytest.mark.parametrize("replicas", [1, 3])
@given(events=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(EVENTS), st.floats(0, 40))))
def test_any_event_sequence_has_one_build_per_replica(replicas: int, events: list[tuple[int, str, float]]) -> None:
    """Generations only grow, no build starts before the last one is dead or being stopped, no replica is lost."""
    reconciler = _reconciler(replicas)
    alive: dict[str, ReplicaName] = {}
    ending: dict[str, ReplicaName] = {}
    generations: dict[str, int] = {}
    now = 0.0

    def act() -> None:
        for action in reconciler.actions(now):
            key = action.name.replica_id
            if isinstance(action, Launch):
                assert key not in alive and key not in ending and not reconciler.records[key].held
                assert action.name.generation == generations.get(key, 0) + 1
                generations[key] = action.name.generation
                alive[key] = action.name
            else:
                assert alive.pop(key) == action.name
                if reconciler.records[key].state is State.DRAINING:  # else it failed and may be built again
                    ending[key] = action.name

    act()
    for index, kind, delay in events:
        key = f"smollm2-{index % replicas}"
        name = alive.get(key)
        if kind == "hold":
            reconciler.hold(key)
        elif kind == "release":
            reconciler.release(key)
        elif kind == "stopped" and key in ending:
            reconciler.stopped(ending.pop(key), now)
        elif name is not None and kind == "ready":
            reconciler.health_received(name, State.READY, 0.01, now)
        elif name is not None and kind == "stall":
            reconciler.health_received(name, State.UNHEALTHY, 0.01, now)
        elif name is not None and kind == "die":
            alive.pop(name.replica_id)
            reconciler.died(name, "died", now)
        elif name is not None and kind == "fail":
            alive.pop(name.replica_id)
            reconciler.start_failed(name, "failed", now, final=False)
        now += delay
        act()
    for key in list(reconciler.records):
        if key in ending:
            reconciler.stopped(ending.pop(key), now)
        if reconciler.records[key].held:
            act()
            assert reconciler.records[key].down or key in alive
            reconciler.release(key)
    if not reconciler.fatal:
        now += BACKOFF_LIMIT_SECONDS + HEALTH.replace_seconds + HEALTH.silence_seconds
        act()
        now += BACKOFF_LIMIT_SECONDS + HEALTH.replace_seconds
        act()
        now += BACKOFF_LIMIT_SECONDS
        act()
        assert len(alive) == replicas
