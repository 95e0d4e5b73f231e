"""Silence of many at once is the observer's own: what the controller stops when it hears nothing."""

from collections.abc import Iterable

import pytest

from headrace_cluster.core.desired import desired_replicas
from headrace_cluster.core.health_judge import ALL_SILENT_FACTOR
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.pauses import Pauses
from headrace_cluster.core.reconciler import Reconciler
from headrace_cluster.core.record import Action, Launch, State, Stop
from headrace_cluster.core.router_reports import FRESH_SECONDS, RouterReports
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_cluster.spec.process_specs import HealthSpec

HEALTH = HealthSpec()
MINUTE = 60.0


class Bench:
    """A reconciler with ready replicas, its routers, and a clock."""

    def __init__(self, replicas: int, up: int | None = None) -> None:
        """up: of these replicas; None: all."""
        self.now = 0.0
        self.router_reports = RouterReports()
        spec = parse_spec({"models": [{"replicas": replicas}]})
        self.reconciler = Reconciler(desired_replicas(spec), HEALTH, self.router_reports)
        self.names = [action.name for action in self.reconciler.actions(0.0)]
        self.hear(self.names[:up])

    def hear(self, names: Iterable[ReplicaName]) -> None:
        for name in names:
            self.reconciler.health_received(name, State.READY, 0.01, self.now)

    def run(
        self,
        seconds: float,
        *,
        heard: Iterable[ReplicaName] = (),
        routers: Iterable[dict[ReplicaName, bool]] = (),
    ) -> list[Action]:
        """What is done meanwhile. heard: by the controller. routers: what each of them says."""
        done: list[Action] = []
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            self.hear(heard)
            for number, words in enumerate(routers):
                self.router_reports.report(f"router-{number}", words, self.now)
            done += self.reconciler.actions(self.now)
        return done

    @property
    def states(self) -> set[State]:
        return {record.state for record in self.reconciler.records.values()}


def test_silence_of_all_stops_nothing() -> None:
    """Seen before: 100 of 100 replicas stopped after 17 s, undrained."""
    bench = Bench(100)
    assert bench.run(10 * MINUTE) == []
    assert bench.states == {State.READY}
    cause = bench.reconciler.records["smollm2-0"].cause
    assert "no health message for more than 2 s" in cause and "the controller may be cut off" in cause
    bench.hear(bench.names)
    assert bench.run(1, heard=bench.names) == [] and bench.reconciler.records["smollm2-0"].cause == ""


def test_the_word_of_routers_that_hear_decides() -> None:
    for replicas in (1, 2, 100):
        bench = Bench(replicas)
        one_hears = [dict.fromkeys(bench.names, False), dict.fromkeys(bench.names, True)]
        assert bench.run(10 * MINUTE, routers=one_hears) == []
        assert bench.states == {State.READY}
        assert "routers receive from it" in bench.reconciler.records["smollm2-0"].cause


def test_a_replica_that_alone_is_silent_is_replaced() -> None:
    bench = Bench(100)
    lost, *others = bench.names
    assert bench.run(HEALTH.silence_seconds + HEALTH.replace_seconds - 0.5, heard=others) == []
    record = bench.reconciler.records[lost.replica_id]
    assert record.state is State.UNHEALTHY
    cause = record.cause
    assert bench.run(0.5, heard=others) == [] and record.cause == cause, "`serve` prints a sentence once"
    done = bench.run(2, heard=others)
    assert done[0] == Stop(lost, drain=False) and isinstance(done[1], Launch) and len(done) == 2


def test_the_only_replica_is_replaced_once_routers_report_its_silence_for_a_minute() -> None:
    """It may hang; or routers are cut off from its machine together with the controller."""
    bench = Bench(1)
    assert bench.run(MINUTE / 2, routers=[{bench.names[0]: True}]) == []
    assert bench.run(ALL_SILENT_FACTOR * HEALTH.replace_seconds, routers=[{bench.names[0]: False}]) == []
    assert bench.states == {State.UNHEALTHY}
    assert bench.run(2, routers=[{bench.names[0]: False}])[0] == Stop(bench.names[0], drain=False)


@pytest.mark.parametrize("starting", [0, 1])
def test_no_silence_of_the_only_replica_that_is_up_stops_it_without_a_report(starting: int) -> None:
    """Seen before: a controller that was cut off stopped it after 18 s."""
    bench = Bench(1 + starting, up=1)
    assert bench.run(5 * MINUTE) == []
    assert bench.reconciler.records["smollm2-0"].state is State.READY
    assert "the controller may be cut off" in bench.reconciler.records["smollm2-0"].cause


def test_a_build_that_came_up_later_does_not_prove_that_a_silent_one_is_lost() -> None:
    """The controller is cut off from both; one is built again where it reaches it. Routers decide as always."""
    bench = Bench(2)
    cut, killed = bench.names
    bench.run(4)
    bench.reconciler.died(killed, "it was killed", bench.now)
    (launch,) = bench.reconciler.actions(bench.now)
    bench.run(3)
    assert bench.run(5 * MINUTE, heard=[launch.name]) == [] and bench.states == {State.READY}
    words = {cut: False, launch.name: True}
    done = bench.run(HEALTH.replace_seconds + 2, heard=[launch.name], routers=[words])
    assert done[0] == Stop(cut, drain=False)


def test_many_are_replaced_when_routers_agree_and_only_a_few_in_a_minute() -> None:
    """A rack of 60 of 100 is lost: routers receive from the others."""
    bench = Bench(100)
    lost, heard = bench.names[:60], bench.names[60:]
    words = dict.fromkeys(lost, False) | dict.fromkeys(heard, True)
    stops = [action for action in bench.run(5 * MINUTE, heard=heard, routers=[words]) if isinstance(action, Stop)]
    assert 4 * HEALTH.stops_per_minute <= len(stops) <= 5 * HEALTH.stops_per_minute
    waiting = [record.cause for record in bench.reconciler.records.values() if record.state is State.UNHEALTHY]
    assert len(waiting) == 60 - len(stops) and all(cause.count("so it waits") == 1 for cause in waiting)


def test_routers_that_hear_nothing_at_all_are_weak_witnesses() -> None:
    """They may be on the machine of the controller, which is cut off; or every replica hangs, and nothing is served."""
    bench = Bench(10)
    words = [dict.fromkeys(bench.names, False)]
    assert bench.run(HEALTH.silence_seconds + ALL_SILENT_FACTOR * HEALTH.replace_seconds, routers=words) == []
    assert "neither the controller nor any router receives from any" in bench.reconciler.records["smollm2-0"].cause
    stops = [action for action in bench.run(MINUTE - 1, routers=words) if isinstance(action, Stop)]
    assert len(stops) == HEALTH.stops_per_minute


def test_silence_of_all_ends_no_next_build_beside_the_only_replica() -> None:
    """Routers may use it already: it is listed as ready."""
    spec = parse_spec({"models": [{"name": "a"}, {"name": "b", "source": "b", "replicas": 3}]})
    reconciler = Reconciler(desired_replicas(spec), HEALTH)
    names = [action.name for action in reconciler.actions(0.0)]
    for name in names:
        reconciler.health_received(name, State.READY, 0.01, 0.0)
    reconciler.roll("a-0", allow_gap=False)
    (launch,) = reconciler.actions(0.1)
    reconciler.health_received(launch.name, State.READY, 0.01, 0.2, connected=False)
    now = 0.2
    while now < 10 * MINUTE:
        now += 0.5
        assert reconciler.actions(now) == []
    for name in (*names, launch.name):
        reconciler.health_received(name, State.READY, 0.01, now)
    reconciler.actions(now)
    for name in (*names, launch.name):
        reconciler.health_received(name, State.READY, 0.01, now + 1)
    assert reconciler.actions(now + 1) == [Stop(names[0], drain=True)]


def test_a_next_build_that_takes_over_is_not_judged_by_the_silence_of_the_last_one() -> None:
    """Both have one id."""
    reconciler = Reconciler(desired_replicas(parse_spec({"models": [{"replicas": 1}]})), HEALTH)
    (first,) = (action.name for action in reconciler.actions(0.0))
    reconciler.health_received(first, State.READY, 0.01, 0.0)
    reconciler.roll(first.replica_id, allow_gap=False)
    (launch,) = reconciler.actions(0.1)
    reconciler.health_received(launch.name, State.READY, 0.01, 2.9)
    assert reconciler.actions(2.95) == [], "the first one is silent, and may not be the only one"
    now = 2.95
    while (record := reconciler.records[first.replica_id]).name == first:
        now += 0.25
        reconciler.health_received(launch.name, State.READY, 0.01, now)
        reconciler.actions(now)
        assert now < MINUTE
    assert (record.name, record.state) == (launch.name, State.READY)


def test_one_replica_whose_path_is_broken_does_not_delay_the_rollout_of_others() -> None:
    """Routers receive from it, so that it stays as it is; this may last."""
    router_reports = RouterReports()
    models = [{"name": "a", "replicas": 1}, {"name": "b", "replicas": 1}]
    reconciler = Reconciler(desired_replicas(parse_spec({"models": models})), HEALTH, router_reports)
    rolled, cut = (action.name for action in reconciler.actions(0.0))
    following = ReplicaName(rolled.replica_id, 2)
    for name in (rolled, cut):
        reconciler.health_received(name, State.READY, 0.01, 0.0)
    done: list[Action] = []
    for half_seconds in range(1, 60):
        now = half_seconds / 2
        for name in (rolled, *(action.name for action in done if isinstance(action, Launch))):
            reconciler.health_received(name, State.READY, 0.01, now)
        router_reports.report("router", {rolled: True, cut: True, following: True}, now)
        if now == 10:
            assert reconciler.roll(rolled.replica_id, allow_gap=False)
        done += reconciler.actions(now)
    assert [type(action) for action in done] == [Launch, Stop] and done[-1].name == rolled
    assert "routers receive from it" in reconciler.records[cut.replica_id].cause


def test_an_old_report_does_not_count() -> None:
    router_reports, name = RouterReports(), ReplicaName("m-0", 1)
    router_reports.report("router", {name: True}, 10.0)
    assert router_reports.receives(name, 10.0 + FRESH_SECONDS) is True
    assert router_reports.receives(name, 10.1 + FRESH_SECONDS) is None
    assert router_reports.receives(ReplicaName("m-0", 2), 10.0) is None, "another build"


def test_a_replica_is_ready_again_when_a_router_hears_it() -> None:
    bench = Bench(3)
    lost, *others = bench.names
    bench.run(5, heard=others)
    assert State.UNHEALTHY in bench.states
    bench.run(1, heard=others, routers=[{lost: True}])
    assert bench.states == {State.READY}


def test_replicas_that_report_themselves_unhealthy_are_replaced_within_the_budget() -> None:
    bench = Bench(10)
    for name in bench.names:
        bench.reconciler.health_received(name, State.UNHEALTHY, 0.01, bench.now)
    stops = 0
    for _ in range(40):
        bench.now += 0.5
        for name in bench.names:
            bench.reconciler.health_received(name, State.UNHEALTHY, 0.01, bench.now)
        stops += sum(isinstance(action, Stop) for action in bench.reconciler.actions(bench.now))
    assert stops == HEALTH.stops_per_minute


@pytest.mark.parametrize("state", [State.READY, State.UNHEALTHY])
def test_a_pause_of_the_controller_does_not_count(state: State) -> None:
    """SIGSTOP for ten minutes: nobody was silent, and nobody was unhealthy for ten minutes."""
    bench = Bench(1)
    if state is State.UNHEALTHY:
        bench.run(4, routers=[{bench.names[0]: False}])
    bench.now += 10 * MINUTE
    bench.reconciler.resume(10 * MINUTE, bench.now)
    assert bench.reconciler.actions(bench.now) == [] and bench.states == {state}
    bench.hear(bench.names)
    assert bench.run(5, heard=bench.names) == [] and bench.states == {State.READY}


@pytest.mark.parametrize("gaps", [[1.1], [5.0], [0.2, 3.0]])
def test_a_controller_that_is_always_slow_judges_silence(gaps: list[float]) -> None:
    """It receives messages between its passes. Before, no silence was ever judged then."""
    bench, pauses = Bench(3), Pauses()
    lost, *others = bench.names
    done: list[Action] = []
    for _ in range(100):
        for gap in gaps:
            bench.now += gap
            bench.hear(others)
            if pause := pauses.pause(gap):
                bench.reconciler.resume(pause, bench.now)
            done += bench.reconciler.actions(bench.now)
        if done:
            break
    assert done[0] == Stop(lost, drain=False) and bench.now < MINUTE


def test_a_pause_is_what_exceeds_the_usual_time_between_two_passes() -> None:
    pauses = Pauses()
    assert [pauses.pause(gap) for gap in (0.25, 600.25, 0.25)] == [0.0, 600.0, 0.0]


def test_a_new_build_that_only_routers_receive_from_is_kept() -> None:
    """They connect to it once it is listed as unhealthy. Before, it was ended after its time to start."""
    bench = Bench(3, up=2)
    *others, new = bench.names
    record = bench.reconciler.records[new.replica_id]
    bench.run(MINUTE, heard=others)
    bench.reconciler.started(new, bench.now)
    assert bench.run(HEALTH.silence_seconds, heard=others) == [] and record.state is State.STARTING
    assert bench.run(1, heard=others) == [] and record.state is State.UNHEALTHY
    words = dict.fromkeys(bench.names, True)
    assert bench.run(HEALTH.start_seconds + MINUTE, heard=others, routers=[words]) == []
    assert bench.reconciler.ready and record.ever_ready and "routers receive from it" in record.cause
    words[new] = False
    done = bench.run(2 * HEALTH.replace_seconds, heard=others, routers=[words])
    assert done[0] == Stop(new, drain=False), "it is judged like every other one"
