"""Silence of many at once is the observer's own: what the controller ends when it hears nothing."""

from typing import Any

import pytest

from headrace_cluster.core.backoff import Pauses
from headrace_cluster.core.health_judge import ALL_SILENT_FACTOR
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.replica_build import State
from headrace_cluster.core.router_reports import FRESH_SECONDS, RouterReports
from headrace_cluster.spec.process_specs import HealthSpec
from support.cluster.planner_bench import STEP, Bench

FIRST, OTHER = ReplicaName("smollm2-0", 1), ReplicaName("smollm2-1", 1)
HEALTH = HealthSpec()
MINUTE = 60.0


def _bench(replicas: int, **model: Any) -> tuple[Bench, list[ReplicaName]]:
    """All are ready; with their names."""
    bench = Bench(replicas=replicas, **model)
    bench.run(10, until=lambda: bench.planner.ready)
    bench.run(1)
    return bench, [ReplicaName(f"smollm2-{number}", 1) for number in range(replicas)]


@pytest.mark.parametrize("replicas", [100, 1])
def test_silence_of_all_ends_nothing(replicas: int) -> None:
    """Seen before: a controller that was cut off stopped all of them after 18 s, undrained."""
    bench, names = _bench(replicas)
    bench.mute = set(names)
    assert bench.run(5 * MINUTE) == []
    assert set(bench.states.values()) == {State.READY}
    assert "no health message for more than 2 s" in bench.build().cause
    assert "the controller may be cut off" in bench.build().cause
    bench.mute = set()
    assert bench.run(1) == [] and bench.build().cause == ""


@pytest.mark.parametrize("replicas", [1, 2, 50])
def test_the_word_of_routers_that_hear_decides(replicas: int) -> None:
    bench, names = _bench(replicas)
    bench.mute = set(names)
    bench.router_words = [dict.fromkeys(names, False), dict.fromkeys(names, True)]
    assert bench.run(3 * MINUTE) == [] and set(bench.states.values()) == {State.READY}
    assert "routers receive from it" in bench.build().cause


def test_a_replica_that_alone_is_silent_is_replaced() -> None:
    bench, names = _bench(20)
    lost = names[3]
    bench.mute = {lost}
    assert bench.ends(HEALTH.silence_seconds + HEALTH.replace_seconds - STEP) == []
    assert bench.states[lost] is State.UNHEALTHY
    bench.router_words = [{lost: True}]
    bench.run(1)
    assert bench.states[lost] is State.READY, "a router receives from it"
    bench.router_words = [{lost: False, names[0]: True}]
    assert bench.ends(HEALTH.silence_seconds + HEALTH.replace_seconds + 3) == [lost]
    bench.run(3)
    assert bench.states[ReplicaName(lost.replica_id, 2)] is State.READY


def test_the_only_replica_is_replaced_once_routers_report_its_silence_for_a_minute() -> None:
    """It may hang; or routers are cut off from its machine together with the controller."""
    bench, (name,) = _bench(1)
    bench.mute, bench.router_words = {name}, [{name: True}]
    assert bench.ends(MINUTE / 2) == []
    bench.router_words = [{name: False}]
    assert bench.ends(ALL_SILENT_FACTOR * HEALTH.replace_seconds) == [] and bench.states == {name: State.UNHEALTHY}
    assert bench.ends(2) == [name]


def test_a_build_that_came_up_later_does_not_prove_that_a_silent_one_is_lost() -> None:
    """The controller is cut off from both; one is built again where it reaches it. Routers decide as always."""
    bench, (cut, killed) = _bench(2)
    bench.mute = {cut, killed}
    bench.run(4)
    bench.kill(killed)
    bench.run(3)
    following = ReplicaName(killed.replica_id, 2)
    assert bench.run(5 * MINUTE) == [] and set(bench.states) == {cut, following}
    bench.router_words = [{cut: False, following: True}]
    assert cut in bench.ends(HEALTH.replace_seconds + 2)


def test_many_are_replaced_when_routers_agree_and_only_a_few_in_a_minute() -> None:
    """A rack of 24 of 40 is lost: routers receive from the others."""
    bench, names = _bench(40)
    lost, heard = names[:24], names[24:]
    bench.mute = set(lost)
    bench.router_words = [dict.fromkeys(lost, False) | dict.fromkeys(heard, True)]
    ended = bench.ends(5 * MINUTE)
    assert 4 * HEALTH.stops_per_minute <= len(ended) <= 5 * HEALTH.stops_per_minute
    waiting = [build.cause for build in bench.planner.builds.values() if build.state is State.UNHEALTHY]
    assert len(waiting) == len(lost) - len(ended) and all(cause.count("so it waits") == 1 for cause in waiting)


def test_routers_that_hear_nothing_at_all_are_weak_witnesses() -> None:
    """They may be on the machine of the controller, which is cut off; or every replica hangs, and nothing is served."""
    bench, names = _bench(10)
    bench.mute, bench.router_words = set(names), [dict.fromkeys(names, False)]
    assert bench.ends(HEALTH.silence_seconds + ALL_SILENT_FACTOR * HEALTH.replace_seconds) == []
    assert "neither the controller nor any router receives from any" in bench.build().cause
    assert len(bench.ends(MINUTE - 1)) == HEALTH.stops_per_minute


def test_one_replica_whose_path_is_broken_does_not_delay_the_replacement_of_others() -> None:
    """Routers receive from it, so that it stays as it is; this may last."""
    bench, (rolled, cut) = _bench(2)
    bench.mute, bench.router_words = {cut}, [{rolled: True, cut: True, ReplicaName(rolled.replica_id, 2): True}]
    bench.run(10)
    assert "routers receive from it" in bench.planner.builds[cut].cause
    bench.kill(rolled)
    bench.run(10)
    assert bench.planner.ready and ReplicaName(rolled.replica_id, 2) in bench.states


def test_an_old_report_does_not_count() -> None:
    router_reports, name = RouterReports(), ReplicaName("m-0", 1)
    router_reports.report("router", {name: True}, 10.0)
    assert router_reports.receives(name, 10.0 + FRESH_SECONDS) is True
    assert router_reports.receives(name, 10.1 + FRESH_SECONDS) is None
    assert router_reports.receives(ReplicaName("m-0", 2), 10.0) is None, "another build"


@pytest.mark.parametrize("state", [State.READY, State.UNHEALTHY])
def test_a_pause_of_the_controller_does_not_count(state: State) -> None:
    """SIGSTOP for ten minutes: nobody was silent, and nobody was unhealthy for ten minutes."""
    bench, (name,) = _bench(1)
    bench.mute = {name}
    bench.router_words = [{name: False}] if state is State.UNHEALTHY else []
    bench.run(4 if state is State.UNHEALTHY else 0)
    bench.now += 10 * MINUTE
    bench.planner.resume(10 * MINUTE, bench.now)
    bench.router_words = []
    assert bench.run(1) == [] and bench.states == {name: state}
    bench.mute = set()
    assert bench.run(5) == [] and bench.states == {name: State.READY}


@pytest.mark.parametrize("gaps", [[1.1], [5.0], [0.2, 3.0]])
def test_a_controller_that_is_always_slow_judges_silence(gaps: list[float]) -> None:
    """It receives messages between its turns. Before, no silence was ever judged then."""
    bench, names = _bench(3)
    pauses, began = Pauses(), bench.now
    ended: list[ReplicaName] = []
    bench.mute = {names[0]}
    while not ended and bench.now < began + MINUTE:
        for gap in gaps:
            bench.now += gap - STEP
            if pause := pauses.pause(gap):
                bench.planner.resume(pause, bench.now)
            ended += bench.ends(STEP)
    assert ended == [names[0]]


def test_a_pause_is_what_exceeds_the_usual_time_between_two_turns() -> None:
    pauses = Pauses()
    assert [pauses.pause(gap) for gap in (0.25, 600.25, 0.25)] == [0.0, 600.0, 0.0]


def test_a_replica_that_has_not_replied_to_this_controller_drains_as_one_that_serves() -> None:
    bench = Bench(replicas=2)
    bench.run()
    bench.mute, bench.requests = {FIRST}, {FIRST: 5}
    bench.words.drained["smollm2-0"] = 30.0
    bench.router_words = [{FIRST: True, OTHER: True}]
    bench.control()
    assert bench.ends(20) == []
    assert bench.ends(20)[:1] == [FIRST]


@pytest.mark.parametrize(
    ("replicas", "words", "ended"),
    [
        (2, [{FIRST: False, OTHER: True}], MINUTE),
        (2, [{FIRST: True, OTHER: True}], None),
        (1, [{FIRST: False}], ALL_SILENT_FACTOR * HEALTH.replace_seconds),
        (1, [], None),
    ],
)
def test_ranks_that_do_not_reply_to_this_controller(
    replicas: int, words: list[dict[ReplicaName, bool]], ended: float | None
) -> None:
    """Where others reply, they end after a minute unless a router receives from them; else only if routers agree."""
    bench = Bench(replicas=replicas)
    bench.run()
    bench.mute, bench.router_words = {FIRST}, words
    bench.control()
    assert bench.ends((ended or 5 * MINUTE) - 5) == [] and bench.build().silent
    assert bench.ends(20)[:1] == ([FIRST] if ended is not None else [])
