"""What a controller does about what it sees: pure, in a small world where its orders are carried out."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_cluster.core.actions import CreateRanks, DrainBuild, EndBuild, PlaceBuild, Seen, SendSecret, SetRole
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.planner import CONNECT_SECONDS, ROUTERS_SECONDS
from headrace_cluster.core.rank_config import Stage
from headrace_cluster.core.replica_build import BACKOFF_LIMIT_SECONDS, State
from headrace_cluster.core.wanted import lost_to, wanted_replicas
from headrace_cluster.core.words import Changed, RoleWord, UsedSpec, Words
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_proto.role import Role
from support.cluster.fake_driver import FakeDriver
from support.cluster.planner_bench import OURS, Bench, digest, started

FIRST, SECOND, THIRD = (ReplicaName("smollm2-0", generation) for generation in (1, 2, 3))
OTHER = ReplicaName("smollm2-1", 1)
MINUTE = 60.0


def _ready(**model: Any) -> Bench:
    bench = Bench(**model)
    bench.run()
    assert bench.planner.ready
    return bench


def _kinds(actions: list[Any]) -> list[tuple[str, ReplicaName]]:
    return [(type(action).__name__, action.name) for action in actions]


# -- starts and losses ----------------------------------------------------------------------------------------------


def test_a_replica_gets_a_place_then_ranks_then_the_secret() -> None:
    bench = Bench(tp=2)
    steps = _kinds(bench.run())
    assert steps == [("PlaceBuild", FIRST), ("CreateRanks", FIRST), ("SendSecret", FIRST), ("SendSecret", FIRST)]
    assert bench.states == {FIRST: State.READY} and bench.planner.ready and bench.words.served
    assert bench.run(MINUTE) == [], "nothing is left to do"


def test_without_a_place_it_is_pending_and_its_start_is_not_limited() -> None:
    bench = Bench(room=0)
    assert _kinds(bench.run(2000)) == [("PlaceBuild", FIRST)]
    bench.planner.waits_for_place(FIRST, "waiting for a place: it needs 1 GPU")
    assert (bench.build().state, bench.build().cause) == (State.PENDING, "waiting for a place: it needs 1 GPU")
    bench.room = 1
    bench.run()
    assert (bench.build().state, bench.build().cause) == (State.READY, "")


def test_a_lost_rank_ends_its_build_and_the_next_one_gets_its_place() -> None:
    bench = _ready(tp=2)
    bench.kill(FIRST, 1)
    assert _kinds(bench.run())[:3] == [("EndBuild", FIRST), ("PlaceBuild", SECOND), ("CreateRanks", SECOND)]
    assert bench.states == {SECOND: State.READY}
    assert bench.planner.slots["smollm2-0"].cause == "rank 1 of smollm2-0 (process 7) was killed"


def test_the_rank_with_the_cause_is_reported() -> None:
    """Rank 0 has lost rank 1, which says why a moment later."""
    bench = Bench(tp=2)
    bench.run(1.5)
    bench.note(FIRST, 0, stage=Stage.FAILED, error="another rank was lost", secondary=True)
    assert bench.ends(0.5) == []
    bench.note(FIRST, 1, stage=Stage.FAILED, error="the second shard is corrupt", final=True)
    assert bench.ends(0.5) == [FIRST]
    assert bench.planner.fatal == "the second shard is corrupt"


@pytest.mark.parametrize("final", [True, False])
def test_a_replica_that_never_starts_is_given_up_if_none_serves(final: bool) -> None:
    bench = Bench(replicas=1)
    bench.failing = {"stage": Stage.FAILED, "error": "too little memory", "final": final}
    bench.run(30)
    assert bench.planner.fatal and "smollm2-0" in bench.planner.unable
    assert len(bench.planner.slots["smollm2-0"].failures) == (1 if final else 3)
    assert bench.run(10 * MINUTE) == [], "it is not built again"


def test_once_it_has_served_it_is_built_again_after_growing_pauses() -> None:
    bench = _ready()
    bench.failing = {"stage": Stage.FAILED, "error": "too little memory", "final": True}
    bench.kill(FIRST)
    places = [action for action in bench.run(10 * MINUTE) if isinstance(action, PlaceBuild)]
    assert 8 <= len(places) <= 20 and not bench.planner.fatal
    assert "crash loop: failed" in bench.planner.slots["smollm2-0"].crash_loop(bench.now)
    bench.failing = {}
    bench.run(BACKOFF_LIMIT_SECONDS + 5)
    assert bench.planner.ready


def test_a_start_that_takes_too_long_is_replaced() -> None:
    bench = Bench(replicas=1)
    bench.failing = {"stage": Stage.STARTING}
    assert bench.ends(1790) == []
    assert bench.ends(30) == [FIRST]


def test_secret_and_role_are_sent_until_the_ranks_have_them() -> None:
    bench = _ready(tp=2)
    bench.note(FIRST, secrets=(b"our secret", b"our last secret"))
    assert _kinds(bench.run()) == [("SendSecret", FIRST)] * 2
    bench.words.roles["smollm2-0"] = RoleWord("decode", "both")
    bench.want()
    assert bench.run() == [SetRole(FIRST, Role.DECODE)]
    bench.note(FIRST, role="both")
    assert bench.run() == [SetRole(FIRST, Role.DECODE)], "a call of an earlier controller arrived late"
    bench.kill(FIRST)
    assert [action.role for action in bench.run() if isinstance(action, CreateRanks)] == [Role.DECODE]


# -- what an earlier controller has left ----------------------------------------------------------------------------


def test_a_new_controller_takes_up_what_runs_and_what_starts() -> None:
    bench = _ready(replicas=2)
    bench.failing = {"stage": Stage.STARTING}
    bench.kill(OTHER)
    bench.run()
    bench.control()
    assert bench.run() == [] and set(bench.states.values()) == {State.READY, State.STARTING}
    bench.note(ReplicaName("smollm2-1", 2), stage=Stage.READY, started=started())
    assert bench.run() == [] and bench.planner.ready


def test_what_is_incomplete_is_ended_and_no_number_is_used_again() -> None:
    """Of a controller that was killed between two steps."""
    for left in ({"ranks": ()}, {"ranks": (0,)}, {"stage": Stage.FAILED, "error": "a bad file"}):
        bench = Bench(tp=2)
        bench.add(ReplicaName("smollm2-0", 7), tp=2, **left)
        bench.control()
        assert _kinds(bench.run())[:2] == [
            ("EndBuild", ReplicaName("smollm2-0", 7)),
            ("PlaceBuild", ReplicaName("smollm2-0", 8)),
        ]
    bench = Bench(replicas=1)
    bench.add(FIRST)
    del bench.groups[FIRST]
    bench.control()
    assert bench.ends(3) == [FIRST], "Ray ends ranks without a placement group"


def test_a_build_of_another_secret_is_left_alone_and_named() -> None:
    bench = Bench(replicas=2)
    bench.add(FIRST, secrets=(b"another",))
    bench.control()
    assert "smollm2-0" not in {action.name.replica_id for action in bench.run(MINUTE)}
    assert "runs in this Ray with another secret" in bench.planner.builds[FIRST].foreign
    assert bench.states[OTHER] is State.READY
    bench.note(FIRST, secrets=OURS)
    bench.run(1)
    assert bench.planner.ready and not bench.planner.builds[FIRST].foreign, "an operator has sent it ours"


def test_a_build_that_drains_for_an_earlier_controller_has_the_rest_of_its_time() -> None:
    bench = Bench(replicas=2)
    bench.add(FIRST, stage=Stage.DRAINING, drain_seconds=20.0)
    bench.requests[FIRST] = 1
    bench.control()
    assert FIRST not in bench.ends(19)
    assert FIRST in bench.ends(3)
    bench.run()
    assert bench.states[SECOND] is State.READY


# -- replacements ---------------------------------------------------------------------------------------------------


def test_a_changed_spec_replaces_one_replica_at_a_time_the_new_build_first() -> None:
    bench = _ready(replicas=2)
    bench.want(replicas=2, revision="next")
    bench.run(1)
    assert set(bench.states) == {FIRST, SECOND, OTHER}
    steps = _kinds([action for action in bench.run(30) if isinstance(action, PlaceBuild | DrainBuild)])
    assert steps == [("DrainBuild", FIRST), ("PlaceBuild", ReplicaName("smollm2-1", 2)), ("DrainBuild", OTHER)]
    assert set(bench.states) == {SECOND, ReplicaName("smollm2-1", 2)} and bench.planner.ready
    assert bench.run(MINUTE) == []


def test_the_old_build_serves_until_every_router_has_the_next_one() -> None:
    bench = _ready()
    bench.unconnected = {SECOND}
    bench.want(revision="next")
    assert bench.ends(CONNECT_SECONDS / 2) == [] and bench.states == {FIRST: State.READY, SECOND: State.READY}
    bench.unconnected = set()
    assert bench.ends(10) == [FIRST]
    bench = _ready()
    bench.unconnected = {SECOND}
    bench.want(revision="next")
    assert bench.ends(2 * CONNECT_SECONDS) == [SECOND], "one router never connects: the old build stays"
    assert "not every router was connected" in bench.planner.slots["smollm2-0"].refusal
    assert bench.states == {FIRST: State.READY}


def test_a_build_that_fails_stops_the_change_and_the_old_ones_serve() -> None:
    bench = _ready(replicas=2)
    bench.failing = {"stage": Stage.FAILED, "error": "no such model", "final": True}
    bench.want(replicas=2, revision="broken")
    assert bench.ends(10 * MINUTE) == [SECOND], "it is tried once"
    assert bench.states == {FIRST: State.READY, OTHER: State.READY} and not bench.planner.fatal
    assert "no such model" in bench.planner.slots["smollm2-0"].refusal
    bench.failing = {}
    bench.want(replicas=2, revision="repaired")
    bench.run(30)
    assert bench.states == {THIRD: State.READY, ReplicaName("smollm2-1", 2): State.READY}


def test_a_spec_with_a_wrong_model_ends_nothing_that_serves() -> None:
    """What the spec does not name any more goes on until what it names serves."""
    bench = _ready(replicas=2)
    bench.failing = {"stage": Stage.FAILED, "error": "there is no model", "final": True}
    bench.want(source="typo", name="typo")
    assert not {FIRST, OTHER} & set(bench.ends(MINUTE)) and not bench.planner.fatal
    assert bench.states[FIRST] is bench.states[OTHER] is State.READY
    bench.failing = {}
    bench.want(source="right", name="right")
    bench.run(30)
    assert set(bench.states) == {ReplicaName("right-0", 1)} and bench.planner.ready
    bench = Bench(replicas=2, room=2)
    bench.run()
    bench.want(source="right", name="right")
    bench.run(30)
    assert set(bench.states) == {ReplicaName("right-0", 1)}, "there is no room for both"


@pytest.mark.parametrize(("replicas", "allow_gap"), [(2, False), (1, True), (1, False)])
def test_without_room_for_two_the_old_build_ends_first_if_another_serves(replicas: int, allow_gap: bool) -> None:
    bench = Bench(replicas=replicas, room=replicas)
    bench.run()
    bench.roll("smollm2-0", allow_gap=allow_gap)
    bench.run(30)
    if replicas == 1 and not allow_gap:
        assert bench.states == {FIRST: State.READY}
        assert "pass --allow-gap" in bench.planner.slots["smollm2-0"].refusal
    else:
        assert bench.planner.ready and THIRD in bench.states and FIRST not in bench.states


def test_replicas_whose_builds_may_end_first_end_one_at_a_time() -> None:
    bench = _ready(room=3, replicas=3)
    for index in range(3):
        bench.roll(f"smollm2-{index}", allow_gap=True)
    least = _least_serving(bench, MINUTE)
    assert least == 2 and bench.planner.ready
    bench.want(replicas=3, revision="next")
    bench.failing = {"stage": Stage.STARTING}
    assert _least_serving(bench, 30) == 2, "the word was for the model as it was"


def _least_serving(bench: Bench, seconds: float) -> int:
    return min(
        sum(b.serves for b in bench.planner.builds.values()) for _ in range(int(2 * seconds)) if bench.run(0.5) or True
    )


def test_a_build_whose_place_could_not_be_requested_is_requested_later_or_forgotten() -> None:
    bench = _ready(replicas=2)
    bench.gcs_lost = True
    bench.roll("smollm2-0")
    bench.run(20)
    bench.want(replicas=2, revision="next")  # the build that waits is outdated by now
    bench.run(20)
    bench.gcs_lost = False
    bench.run(MINUTE)
    assert bench.planner.ready and len(bench.groups) == 2 and not bench.planner.slots["smollm2-0"].refusal


def test_what_could_not_start_starts_when_the_spec_is_corrected() -> None:
    bench = Bench(source="typo")
    bench.failing = {"stage": Stage.FAILED, "error": "there is no model", "final": True}
    bench.run()
    assert bench.planner.fatal == "there is no model"
    bench.failing = {}
    bench.want(revision="right")
    bench.run()
    assert bench.planner.ready and not bench.planner.unable


def test_a_replica_without_a_place_does_not_delay_a_change_of_the_others() -> None:
    bench = _ready(room=2, replicas=2)
    bench.want(replicas=3)
    bench.run(10)
    bench.room = 3
    bench.groups[ReplicaName("other", 1)] = True  # of someone else
    bench.want(replicas=3, revision="next")
    bench.run(MINUTE)
    assert [build.digest for build in bench.planner.builds.values() if build.serves].count(
        bench.planner.wanted["smollm2-0"].digest
    ), bench.states


def test_ranks_that_are_not_created_yet_are_not_missing() -> None:
    bench = Bench(tp=2)
    bench.failing = {"stage": Stage.STARTING}
    bench.run(2)
    build = bench.build()
    build.filled = False  # the second rank is being created
    del bench.ranks[build.name, 1]
    bench.planner.observe(Seen(bench.groups, set(bench.ranks)), bench.now, bench.now)
    assert not build.killed
    build.filled = True
    bench.planner.observe(Seen(bench.groups, set(bench.ranks)), bench.now, bench.now)
    assert set(build.killed) == {1}


def test_too_little_memory_for_two_is_no_room() -> None:
    bench = _ready(replicas=2)
    bench.failing = {"stage": Stage.FAILED, "error": "too little memory", "final": True, "lacks_resources": True}
    bench.roll("smollm2-0")
    bench.run(until=lambda: isinstance(bench.done[-1], DrainBuild))
    bench.failing = {}
    bench.run(30)
    assert bench.planner.ready and not {FIRST, SECOND} & bench.states.keys()


def test_no_replacement_begins_while_another_replica_is_down_or_before_routers_are_known() -> None:
    bench = _ready(replicas=2)
    bench.failing = {"stage": Stage.STARTING}
    bench.kill(OTHER)
    bench.run(1)
    bench.want(replicas=2, revision="next")
    assert FIRST not in bench.ends(MINUTE), "the one that starts is replaced at once, the one that serves is not"
    bench = _ready(replicas=2)
    bench.want(replicas=2, revision="next")
    bench.control()
    assert [action for action in bench.run(ROUTERS_SECONDS - 0.5) if isinstance(action, PlaceBuild)] == []
    assert [action for action in bench.run(1.5) if isinstance(action, PlaceBuild)]


def test_a_lost_controller_leaves_a_replacement_to_the_next_one() -> None:
    """At each step of it."""
    for steps in range(1, 14):
        bench = _ready()
        bench.requests[FIRST] = 1
        bench.want(revision="next")
        bench.run(steps * 0.5)
        bench.control()
        bench.run(2)
        bench.requests.clear()
        bench.run(30)
        assert bench.planner.ready and bench.build().digest == digest("smollm2-0", bench.spec.models[0], 0)
        assert len(bench.groups) == 1 and SendSecret(FIRST, 0) in bench.done


@pytest.mark.parametrize("drain_seconds", [5, 600])
@pytest.mark.parametrize("room", [10, 2])
def test_a_node_that_ray_drains_is_left_in_time(room: int, drain_seconds: float) -> None:
    """All replicas on it at once, the new builds first; without a place for them, shortly before it ends."""
    bench = Bench(room=room, replicas=2)
    bench.spec = parse_spec({"models": [{"replicas": 2}], "health": {"drain_seconds": drain_seconds}})
    bench.control()
    bench.run()
    bench.requests = {FIRST: 1, OTHER: 1}
    bench.draining = {"here": bench.now + 60}
    steps = bench.run(20)
    if room == 10:
        assert {action.name for action in steps if isinstance(action, DrainBuild)} == {FIRST, OTHER}
        bench.requests.clear()
        bench.run(5)
        assert set(bench.states) == {SECOND, ReplicaName("smollm2-1", 2)} and bench.planner.ready
    else:
        assert not [action for action in steps if isinstance(action, DrainBuild)], "they serve as long as they can"
        steps = bench.run(35)
        assert {action.name for action in steps if isinstance(action, DrainBuild)} == {FIRST, OTHER}
        bench.requests.clear()
        bench.run(20)
        assert bench.planner.ready and not {FIRST, OTHER} & bench.states.keys()
    bench.draining = {}
    assert bench.run(MINUTE) == []


# -- words of operators ---------------------------------------------------------------------------------------------


def test_a_drained_replica_ends_when_it_is_empty_or_its_time_is_over() -> None:
    bench = _ready(replicas=2)
    bench.requests[FIRST] = 3
    bench.words.drained["smollm2-0"] = 40.0
    bench.want()
    assert [action.seconds for action in bench.run(30) if isinstance(action, DrainBuild)] == [40.0]
    ends = [(action.name, action.gently) for action in bench.run(15) if isinstance(action, EndBuild)]
    assert ends == [(FIRST, True)] and bench.run(MINUTE) == [], "its engine can stop in order"
    assert set(bench.states) == {OTHER} and bench.planner.ready, "it does not count"
    del bench.words.drained["smollm2-0"]
    bench.want()
    bench.run()
    assert bench.states[SECOND] is State.READY
    bench.requests[SECOND] = 5
    for seconds in (3600.0, 4.0):
        bench.words.drained["smollm2-0"] = seconds
        bench.want()
        bench.run(2)
    assert bench.ends(5) == [SECOND], "a second drain shortens the time"
    del bench.words.drained["smollm2-0"]
    bench.want()
    bench.run()
    bench.words.drained["smollm2-0"] = 40.0
    bench.want()
    assert bench.ends(2) == [THIRD], "it has no requests"


def test_fewer_replicas_drain_and_more_are_built() -> None:
    bench = _ready(replicas=2)
    bench.requests[OTHER] = 1
    bench.want(replicas=1)
    assert bench.ends(3) == [] and bench.states[OTHER] is State.DRAINING
    bench.requests.clear()
    assert bench.ends(3) == [OTHER]
    bench.want(replicas=3)
    bench.run()
    assert len(bench.states) == 3 and bench.planner.ready


def test_a_stop_ends_everything_and_cuts_drains_short() -> None:
    bench = _ready(replicas=2)
    bench.requests = {FIRST: 1, OTHER: 1}
    bench.words.drained["smollm2-0"] = 600.0
    bench.want()
    bench.run(1)
    bench.planner.wanted = {}
    bench.planner.hurry(5.0, bench.now)
    assert sorted(set(bench.ends(8))) == [FIRST, OTHER] and bench.planner.idle


def test_words_override_the_spec_until_it_says_something_else() -> None:
    bench = Bench(prefill={}, decode={})
    bench.words.roles["smollm2-1"] = RoleWord("decode", "prefill")
    assert wanted_replicas(bench.spec, bench.words, digest)["smollm2-1"].role is Role.DECODE
    plain = parse_spec({"models": [{"replicas": 2}]})
    assert wanted_replicas(plain, bench.words, digest)["smollm2-1"].role is Role.BOTH


@pytest.mark.parametrize(
    ("models", "lost"),
    [
        ([{"replicas": 2}, {"name": "other", "source": "smollm2"}], []),
        ([{"replicas": 3}, {"name": "other", "source": "smollm2"}, {"name": "new", "source": "smollm2"}], []),
        ([{"replicas": 2, "aliases": ["small"]}, {"name": "other", "source": "smollm2"}], []),
        ([{"replicas": 1}, {"name": "other", "source": "smollm2"}], ["smollm2: replicas 2 → 1"]),
        ([{"replicas": 2, "max_num_seqs": 4}], ["other: ends", "smollm2: max_num_seqs none → 4"]),
    ],
)
def test_what_another_spec_would_end_or_build_again(models: list[dict[str, Any]], lost: list[str]) -> None:
    before = parse_spec({"models": [{"replicas": 2}, {"name": "other", "source": "smollm2"}]}).models
    words = Words(spec=UsedSpec([model.model_dump(mode="json") for model in before], "another"))
    digest = FakeDriver().digest
    assert lost_to(parse_spec({"models": models}), words, digest) == lost
    assert lost_to(parse_spec({"models": models}), Words(), digest) == []
    words.scales = {"smollm2": Changed(1, 2)}  # by an operator
    shown = [line for line in lost if "replicas" not in line]
    assert lost_to(parse_spec({"models": models}), words, digest) == shown
    words.spec = UsedSpec([{"a key of another version": 1}], "another")
    assert lost_to(parse_spec({"models": models}), words, digest) != []


def test_ids_are_unique_even_if_two_names_end_alike() -> None:
    spec = parse_spec({"models": [{"name": "a/m", "replicas": 2}, {"name": "b/m", "source": "b"}]})
    assert list(wanted_replicas(spec, Bench().words, digest)) == ["m-0", "m-1", "m-2"]


# -- any sequence ---------------------------------------------------------------------------------------------------

EVENTS = st.sampled_from(["kill", "control", "change", "drain", "undrain", "roll", "scale", "mute", "lose"])


@settings(max_examples=60)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 3), st.sampled_from([0.5, 1.0, 3.0, 10.0])), max_size=12))
def test_whatever_happens_it_ends_as_the_spec_wants_it(events: list[tuple[str, int, float]]) -> None:
    bench = _ready(replicas=2)
    count = 2
    for number, (event, chosen, seconds) in enumerate(events):
        names = sorted(bench.groups)
        match event:
            case "kill" if bench.ranks:
                bench.kill(*sorted(bench.ranks)[chosen % len(bench.ranks)])
            case "control":
                bench.control()
            case "change" | "scale":
                count = 1 + chosen if event == "scale" else count
                bench.want(
                    replicas=count, revision=f"r{number}" if event == "change" else bench.spec.models[0].revision
                )
            case "drain":
                bench.words.drained[f"smollm2-{chosen % 2}"] = 5.0
                bench.want()
            case "undrain":
                bench.words.drained.clear()
                bench.want()
            case "roll":
                bench.roll("smollm2-0", number)
            case "mute" if names:
                bench.mute = {names[chosen % len(names)]}
            case "lose" if names:  # someone else removes it from Ray
                lost = names[chosen % len(names)]
                bench.groups.pop(lost)
                bench.ranks = {key: report for key, report in bench.ranks.items() if key[0] != lost}
        bench.run(seconds)
    bench.mute.clear()
    bench.words.drained.clear()
    for name in bench.planner.wanted:
        bench.planner.forgive(name)  # builds that were killed three times beside an old one
    bench.want()
    bench.run(10 * MINUTE, until=lambda: _settled(bench))
    assert _settled(bench), bench.states
    assert bench.run(MINUTE) == [], "and stays so"
    assert all(set(report.secrets) == set(OURS) for report in bench.ranks.values())


def _settled(bench: Bench) -> bool:
    builds = {build.replica_id: build for build in bench.planner.builds.values() if build.serves}
    wanted = bench.planner.wanted
    return (
        len(bench.groups) == len(bench.planner.builds) == len(wanted)
        and builds.keys() == wanted.keys()
        and all(builds[name].digest == wanted[name].digest for name in wanted)
    )
