"""What a controller takes over from a killed one: which builds, which records, and when routers are notified."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from headrace_cluster.controller.health import watch_health
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.core.adoption import AdoptionPlan, choose_builds, plan_adoption, restore_records, take_snapshot
from headrace_cluster.core.desired import desired_replicas
from headrace_cluster.core.driver import AdoptedBuild, AdoptedState, RankFacts
from headrace_cluster.core.health_judge import SILENT_SECONDS
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import RankReport, Stage, fingerprint
from headrace_cluster.core.reconciler import ROUTERS_SECONDS, Reconciler
from headrace_cluster.core.record import Launch, State, Stop
from headrace_cluster.core.snapshot import BuildSnapshot, ControllerSnapshot, ReplicaSnapshot
from headrace_cluster.errors import AdoptionError
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_cluster.spec.process_specs import HealthSpec
from headrace_proto import control_pb2, replica_pb2
from headrace_proto.role import Role
from headrace_worker.core.config import ReplicaConfig, ReplicaStarted
from support.cluster.fake_driver import FakeDriver
from support.members import MEMBER

Eventually = Callable[..., Awaitable[Any]]

HEALTH = {"interval_seconds": 0.05, "silence_seconds": 0.3, "replace_seconds": 0.4, "drain_seconds": 2}
FIRST, SECOND = ReplicaName("smollm2-0", 3), ReplicaName("smollm2-1", 1)
FINGERPRINT, OURS = b"expected", (b"our secret", b"our last secret")


def _started(address: str = "127.0.0.1:1") -> ReplicaStarted:
    names = "pid threads max_model_len max_num_seqs max_num_batched_tokens kv_blocks kv_bytes block_size weight_bytes"
    numbers: dict[str, Any] = dict.fromkeys(names.split(), 1)
    others: dict[str, Any] = {"boot_id": b"", "device": "cpu", "dtype": "float32", "notes": []}
    return ReplicaStarted(address=address, revision="", **numbers, **others)


def _report(pid: int = 7, **changed: Any) -> RankReport:
    report = RankReport(
        pid=pid,
        node="here",
        gpus=[],
        fingerprint=FINGERPRINT,
        secrets=OURS[1:],
        model="m",
        tp=1,
        pp=1,
        role="both",
        stage=Stage.READY,
        started=_started(),
    )
    return msgspec.structs.replace(report, **changed)


def _up(draining: bool) -> Stage:
    return Stage.DRAINING if draining else Stage.READY


# -- which builds ---------------------------------------------------------------------------------------------------

Reports = dict[tuple[ReplicaName, int], RankReport | None]


def _pair(name: ReplicaName, pid: int, **changed: Any) -> Reports:
    """The reports of a build of two ranks."""
    return {(name, rank): _report(pid + rank, tp=2, **changed) for rank in (0, 1)}


def _chosen(reports: Reports) -> list[AdoptedBuild]:
    return choose_builds(reports, {"m-0": FINGERPRINT, "m-1": FINGERPRINT}, OURS)


def test_the_newest_complete_build_is_adopted() -> None:
    reports: Reports = {}
    for generation in (2, 9, 10):  # numbers, not text
        reports |= _pair(ReplicaName("m-0", generation), 10 * generation, stage=_up(generation == 2))
    del reports[ReplicaName("m-0", 10), 1]
    build, leaving = _chosen(reports)
    assert build.name == ReplicaName("m-0", 9) and build.same and not build.leaving
    assert leaving.name == ReplicaName("m-0", 2) and leaving.leaving
    assert build.ranks == [RankFacts(0, 90, "here", "cpu"), RankFacts(1, 91, "here", "cpu")]


@pytest.mark.parametrize("second", [None, _report(stage=Stage.STARTING, tp=2), _report(stage=Stage.ENDED, tp=2)])
def test_a_build_with_one_rank_down_is_not_adopted(second: RankReport | None) -> None:
    reports = _pair(ReplicaName("m-1", 1), 5)
    assert _chosen({(ReplicaName("m-0", 1), 0): _report(tp=2), (ReplicaName("m-0", 1), 1): second} | reports) == (
        _chosen(reports)
    )


def test_a_role_of_another_version_ends_no_rank() -> None:
    with pytest.raises(AdoptionError, match="m-0 has a role of another version of Headrace: 'encode'"):
        _chosen(_pair(ReplicaName("m-0", 1), 5, role="encode"))


def test_a_build_that_the_spec_describes_differently_is_adopted_to_be_replaced() -> None:
    """Also one with another shape, and one that the spec does not name at all."""
    reports = _pair(ReplicaName("m-0", 1), 5, fingerprint=b"another model") | _pair(ReplicaName("n-0", 4), 9)
    found = {build.name: build for build in _chosen(reports)}
    assert [(name, build.same, build.tp) for name, build in found.items()] == [
        (ReplicaName("m-0", 1), False, 2),
        (ReplicaName("n-0", 4), False, 2),
    ]


def test_silence_of_many_ranks_ends_none_of_them() -> None:
    """The network between controller and ranks may be down, or Ray's GCS; one silent rank of many has failed."""
    names = [ReplicaName(f"m-{number}", 1) for number in range(4)]
    reports: Reports = {(name, 0): _report() for name in names}
    assert len(choose_builds(reports | {(names[0], 0): None}, {}, OURS)) == 3
    with pytest.raises(AdoptionError, match=r"2 of 4 builds did not reply; nothing is ended"):
        choose_builds(reports | {(names[0], 0): None, (names[1], 0): None}, {}, OURS)


def test_one_replica_of_two_that_does_not_reply_stops_no_new_controller() -> None:
    """Its two ranks are half of all ranks; it is judged as one replica, like every other one."""
    stopped, other = ReplicaName("m-0", 1), ReplicaName("m-1", 1)
    reports: Reports = {(stopped, 0): None, (stopped, 1): None, **_pair(other, 9)}
    assert _plan(reports, None).state.silent == [stopped], "it may be up"
    ranks = [_report(5, tp=2), _report(6, tp=2)]
    recorded = BuildSnapshot(replica_id="m-0", generation=1, ranks=ranks)
    plan = _plan(reports, ControllerSnapshot(created=5, builds=[recorded]))
    assert [build.name for build in plan.state.builds] == [stopped, other]
    assert not (plan.state.silent or plan.ended_ranks or plan.ended_groups)


def test_silence_of_everyone_ends_nothing() -> None:
    """What is in the record is adopted; with a build that is not, the controller is started again later."""
    names = [ReplicaName(f"m-{number}", 1) for number in range(3)]
    reports: Reports = {(name, 0): None for name in names}
    plan = _plan(reports, _recorded(*names))
    assert [build.name for build in plan.state.builds] == names
    assert not (plan.state.silent or plan.ended_ranks or plan.ended_groups)
    with pytest.raises(AdoptionError, match="3 of 3 builds did not reply"):
        _plan(reports, _recorded(*names[:2]))
    alone = ReplicaName("m-0", 1)
    with pytest.raises(AdoptionError, match="1 of 1 build did not reply"):
        _plan({(alone, 0): None, (alone, 1): None}, None)


def _recorded(*names: ReplicaName, **changed: Any) -> ControllerSnapshot:
    builds = [
        BuildSnapshot(replica_id=name.replica_id, generation=name.generation, ranks=[_report(**changed)])
        for name in names
    ]
    return ControllerSnapshot(created=5, builds=builds)


def _plan(reports: Reports, snapshot: ControllerSnapshot | None) -> AdoptionPlan:
    names = {name for name, _ in reports}
    return plan_adoption(reports, names, {name.replica_id: FINGERPRINT for name in names}, OURS, snapshot)


def test_a_minority_that_does_not_reply_is_adopted_as_it_was_recorded() -> None:
    """A node may be stopped for a minute. Whether they are lost is the health judge's decision."""
    names = [ReplicaName(f"m-{number}", 1) for number in range(11)]
    reports: Reports = {(name, 0): _report() if number > 4 else None for number, name in enumerate(names)}
    recorded = _recorded(*names[:5], secrets=(b"of a secret that was replaced",), pid=70, role="decode")
    plan = _plan(reports, recorded)
    assert sorted(build.name for build in plan.state.builds) == sorted(names)
    assert not (plan.ended_ranks or plan.ended_groups or plan.state.silent)
    first = next(build for build in plan.state.builds if build.name == names[0])
    assert (first.ranks[0].pid, first.role, first.same) == (70, Role.DECODE, True)
    assert [report.pid for report in first.reports] == [70], "for the record of this controller"


def test_a_build_that_does_not_reply_and_is_not_recorded_is_neither_adopted_nor_ended() -> None:
    """It may have come up after the record. Others are adopted meanwhile."""
    other, silent = ReplicaName("m-1", 1), ReplicaName("m-0", 2)
    reports: Reports = {(other, rank): _report(tp=4) for rank in range(4)}
    for ranks in ({0: None}, {0: _report(tp=2), 1: None}):
        plan = _plan(reports | {(silent, rank): report for rank, report in ranks.items()}, _recorded(other))
        assert [build.name for build in plan.state.builds] == [other] and plan.state.silent == [silent]
        assert not (plan.ended_ranks or plan.ended_groups)


def test_a_build_of_which_one_rank_is_down_is_ended_whether_the_others_reply_or_not() -> None:
    other, silent = ReplicaName("m-1", 1), ReplicaName("m-0", 2)
    reports: Reports = {(other, rank): _report(tp=4) for rank in range(4)}
    for down in (_report(stage=Stage.FAILED, tp=2), _report(stage=Stage.ENDED, tp=2)):
        plan = _plan(reports | {(silent, 0): None, (silent, 1): down}, None)
        assert plan.ended_groups == [silent] and not plan.state.silent


def test_a_next_build_that_does_not_reply_and_was_not_up_is_ended() -> None:
    """The build before serves on; two of one replica would be kept without end."""
    old, new, other = ReplicaName("m-0", 1), ReplicaName("m-0", 2), ReplicaName("m-1", 1)
    reports: Reports = {(old, 0): _report(), (new, 0): None, (other, 0): _report()}
    plan = _plan(reports, _recorded(old, other))
    assert plan.ended_groups == [new] and not plan.state.silent and plan.state.generations["m-0"] == 2


def test_what_is_not_adopted_is_ended_by_name() -> None:
    """Ranks of older and incomplete builds, builds whose placement group is gone, and groups without ranks."""
    older, leaving, kept = (ReplicaName("m-0", generation) for generation in (1, 2, 3))
    without_group, without_ranks = ReplicaName("m-1", 1), ReplicaName("m-1", 7)
    reports: Reports = {
        (name, 0): _report(stage=_up(name == leaving)) for name in (kept, leaving, older, without_group)
    }
    groups = {kept, leaving, older, without_ranks}
    plan = plan_adoption(reports, groups, {"m-0": FINGERPRINT, "m-1": FINGERPRINT}, OURS, None)
    assert [(build.name, build.leaving) for build in plan.state.builds] == [(kept, False), (leaving, True)]
    assert plan.state.generations == {"m-0": 3, "m-1": 7}, "numbers are not used again"
    assert plan.ended_ranks == [(older, 0), (without_group, 0)]
    assert plan.ended_groups == [older, without_ranks]


@pytest.mark.parametrize("changed", [{"secrets": (b"another",)}, {"role": "encode"}])
def test_a_foreign_build_beside_others_is_neither_adopted_nor_ended(changed: dict[str, Any]) -> None:
    """Before, it left all others without a controller."""
    foreign, *ours = (ReplicaName(f"m-{number}", 1) for number in range(3))
    reports: Reports = {(foreign, 0): _report(**changed), **{(name, 0): _report() for name in ours}}
    plan = _plan(reports, None)
    assert [build.name for build in plan.state.builds] == ours and plan.state.generations["m-0"] == 1
    assert not (plan.ended_ranks or plan.ended_groups or plan.state.silent)
    (problem,) = plan.state.problems
    assert problem.startswith("m-0 ") and "build 1 is left as it is" in problem
    with pytest.raises(AdoptionError, match="m-0 "):
        _plan({(foreign, 0): _report(**changed), (ours[0], 0): _report(stage=Stage.ENDED)}, None)


def test_a_foreign_build_is_a_problem_in_the_status(driver: FakeDriver) -> None:
    async def scenario() -> None:
        driver.adopted_state = AdoptedState(problems=["m-0 runs in this Ray with another secret"])
        supervisor = Supervisor(parse_spec({}), driver, Membership(), partial(watch_health, MEMBER))
        await supervisor.adopt(None)
        assert supervisor.status()["problems"] == ["m-0 runs in this Ray with another secret"]

    asyncio.run(scenario())


def test_replicas_with_another_secret_are_left_alone() -> None:
    with pytest.raises(AdoptionError, match=r"m-0 runs in this Ray with another secret.*--secret-file"):
        _chosen(_pair(ReplicaName("m-0", 1), 5, secrets=(b"another",)))


def test_a_build_whose_next_one_serves_beside_it_continues_until_that_one_takes_over() -> None:
    """Found by the simulation: routers were not connected to the next build when the old one was ended by name."""
    older, newer = ReplicaName("smollm2-0", 3), ReplicaName("smollm2-0", 4)
    reports: Reports = {(name, 0): _report() for name in (ReplicaName("smollm2-0", 1), older, newer)}
    builds = choose_builds(reports, {"smollm2-0": FINGERPRINT}, OURS)
    assert [build.name for build in builds] == [older, newer], "of three serving builds, two"
    reconciler = Reconciler(desired_replicas(parse_spec({"models": [{"replicas": 1}]})), HealthSpec())
    restore_records(reconciler, None, AdoptedState(builds, {"smollm2-0": 4}), 100.0)
    assert reconciler.surges.failed == {}

    def receive(now: float) -> None:
        for name in (older, newer):
            reconciler.health_received(name, State.READY, 0.01, now)

    receive(100.5)
    assert reconciler.actions(102.0) == [], "no router is registered yet: that they are connected means nothing"
    receive(100.0 + ROUTERS_SECONDS)
    assert reconciler.actions(100.1 + ROUTERS_SECONDS) == []
    receive(101.0 + ROUTERS_SECONDS)
    assert reconciler.actions(101.0 + ROUTERS_SECONDS) == [Stop(older, drain=True)]
    assert reconciler.records["smollm2-0"].name == newer


@pytest.mark.parametrize("drains", [{3}, {4}, {3, 4}])
def test_a_build_that_drains_beside_its_next_one_drains_on(drains: set[int]) -> None:
    """Its streams would be cut if it ended; its next build serves, or drains for an operator."""
    names = [ReplicaName("smollm2-0", 3), ReplicaName("smollm2-0", 4)]
    reports: Reports = {(name, 0): _report(stage=_up(name.generation in drains)) for name in names}
    builds = choose_builds(reports, {"smollm2-0": FINGERPRINT}, OURS)
    reconciler = Reconciler(desired_replicas(parse_spec({"models": [{"replicas": 1}]})), HealthSpec())
    snapshot = ControllerSnapshot(
        created=5, replicas={"smollm2-0": _snapshot(generation=4, drain_seconds=7.0, leaving_seconds=12.5)}
    )
    seconds = restore_records(reconciler, snapshot, AdoptedState(builds, {"smollm2-0": 4}), 100.0)
    assert seconds == {names[0]: 12.5, names[1]: 7.0}
    stops = reconciler.actions(100.1)
    assert Stop(names[0], drain=True) in stops
    assert (Stop(names[1], drain=True, held=True) in stops) is (4 in drains)
    assert reconciler.surges.leaving["smollm2-0"].name == names[0] and reconciler.actions(100.2) == []
    assert take_snapshot(reconciler, 5, seconds).replicas["smollm2-0"].leaving_seconds == 12.5
    reconciler.stopped(names[0], 101.0)
    assert reconciler.records["smollm2-0"].name == names[1] and not reconciler.surges.leaving


def test_the_remaining_time_of_a_drain_is_that_of_its_build() -> None:
    """The snapshot is from before the next build took over: the seconds are those of the rollout, still to begin."""
    builds = [_build(ReplicaName("smollm2-0", 4)), dataclasses.replace(_build(FIRST, draining=True), leaving=True)]
    for generation, found in ((3, 12.5), (4, 1.0)):
        snapshot = ControllerSnapshot(
            created=5,
            replicas={"smollm2-0": _snapshot(generation=generation, drain_seconds=12.5, leaving_seconds=1.0)},
        )
        assert restore_records(_reconciler(), snapshot, AdoptedState(builds), 100.0)[FIRST] == found


def test_no_replica_is_built_again_before_the_routers_of_the_last_controller_are_registered() -> None:
    """Found by the simulation: with no router registered, every router seemed connected to a replica just built."""
    reconciler = _reconciler()
    builds = [_build(FIRST), dataclasses.replace(_build(SECOND), same=False)]
    restore_records(reconciler, None, AdoptedState(builds), 100.0)
    for now in (100.5, 100.0 + ROUTERS_SECONDS):
        assert reconciler.actions(now) == []
        for name in (FIRST, SECOND):
            reconciler.health_received(name, State.READY, 0.01, now)
    assert reconciler.actions(100.1 + ROUTERS_SECONDS) == [Stop(SECOND, drain=True)]


def test_role_and_draining_are_taken_from_rank_0() -> None:
    name = ReplicaName("m-0", 1)
    reports: Reports = {
        (name, 1): _report(role="both", tp=2),
        (name, 0): _report(role="prefill", stage=Stage.DRAINING, started=_started("10.0.0.1:5"), tp=2),
    }
    (build,) = _chosen(reports)
    assert (build.role, build.draining, build.started.address) == (Role.PREFILL, True, "10.0.0.1:5")


def test_a_fingerprint_covers_what_cannot_change_at_run_time() -> None:
    config = ReplicaConfig(replica_id="m-0", model="m", source="m")
    same: dict[str, Any] = {"generation": 7, "role": "decode", "cpu_threads": 3}
    assert fingerprint(dataclasses.replace(config, **same)) == fingerprint(config)
    others: list[dict[str, Any]] = [
        {"tp": 2}, {"source": "n"}, {"replica_id": "m-1"}, {"kv_cache_memory": 1}
    ]  # fmt: skip
    for change in others:
        assert fingerprint(dataclasses.replace(config, **change)) != fingerprint(config)


@pytest.mark.parametrize("stages", [[Stage.WAITING, Stage.STARTING], [Stage.STARTING, Stage.READY]])
def test_a_build_that_starts_goes_on_and_one_that_has_failed_is_ended(stages: list[Stage]) -> None:
    """Its ranks need no controller to become ready; one that the spec describes differently is no longer wanted."""
    name, other = ReplicaName("m-0", 2), ReplicaName("m-1", 1)
    for changed, starts in (({}, True), ({"fingerprint": b"another"}, False)):
        reports: Reports = {
            (name, rank): _report(tp=2, stage=stage, secrets=(), **changed) for rank, stage in enumerate(stages)
        }
        plan = _plan(reports | {(other, 0): _report(stage=Stage.FAILED)}, None)
        assert plan.state.starting == ([name] if starts else []) and not plan.state.builds
        assert plan.ended_groups == ([other] if starts else [name, other])
    reconciler = _reconciler()
    restore_records(reconciler, None, AdoptedState(starting=[FIRST], generations={"smollm2-0": 3}), 100.0)
    record = reconciler.records["smollm2-0"]
    assert (record.name, record.state) == (FIRST, State.STARTING)
    assert [action.name for action in reconciler.actions(100.1)] == [ReplicaName("smollm2-1", 1)]
    reconciler.started(FIRST, 101.0)
    reconciler.health_received(FIRST, State.READY, 0.01, 101.1)
    assert record.state is State.READY


# -- which records --------------------------------------------------------------------------------------------------


def _reconciler() -> Reconciler:
    return Reconciler(desired_replicas(parse_spec({"models": [{"replicas": 2}]})), HealthSpec())


def _build(
    name: ReplicaName, role: Role = Role.BOTH, *, draining: bool = False, held: bool | None = None
) -> AdoptedBuild:
    return AdoptedBuild(name, [RankFacts(0, 7, "here")], _started(), role, draining, held)


def test_adopted_builds_are_kept_and_other_generations_continue() -> None:
    reconciler = _reconciler()
    snapshot = ControllerSnapshot(created=5, replicas={"smollm2-1": _snapshot(generation=4)})
    adopted_state = AdoptedState([_build(FIRST)], {"smollm2-0": 6, "smollm2-1": 2})
    restore_records(reconciler, snapshot, adopted_state, 100.0)
    assert reconciler.records["smollm2-0"].state is State.READY
    assert reconciler.actions(100.1) == [
        Launch(ReplicaName("smollm2-1", 5), reconciler.records["smollm2-1"].model, Role.BOTH)
    ]
    # A rebuild of the adopted one gets the next number after all that were found: those up to 6 were ended by name.
    reconciler.died(FIRST, "rank 0 was killed", 101.0)
    (launch,) = reconciler.actions(101.0)
    assert launch.name == ReplicaName("smollm2-0", 7)


def test_a_build_that_was_starting_beside_an_adopted_one_keeps_its_number() -> None:
    before = Reconciler(desired_replicas(parse_spec({"models": [{"replicas": 1}]})), HealthSpec())
    restore_records(before, None, AdoptedState([_build(FIRST)]), 100.0)
    before.roll("smollm2-0", allow_gap=False)
    (launch,) = before.actions(100.1)
    assert launch.name == ReplicaName("smollm2-0", 4)
    for snapshot, seen in ((take_snapshot(before, 5, {}), 3), (None, 4)):  # from the last view, or from Ray
        after = Reconciler(before.desired, HealthSpec())
        restore_records(after, snapshot, AdoptedState([_build(FIRST)], {"smollm2-0": seen}), 101.0)
        assert after.records["smollm2-0"].name == FIRST
        assert "controller was lost" in after.surges.failed["smollm2-0"], "the ended build is reported"
        after.roll("smollm2-0", allow_gap=False)
        assert after.surges.failed == {}
        (launch,) = after.actions(101.1)
        assert launch.name == ReplicaName("smollm2-0", 5)


def _snapshot(**given: Any) -> ReplicaSnapshot:
    return ReplicaSnapshot(**{"generation": 1, "role": "both", "held": False, **given})


def test_a_replica_that_was_being_rolled_is_built_again() -> None:
    """Its ranks report draining, like those of a replica that an operator drained."""
    before = _reconciler()
    restore_records(before, None, AdoptedState([_build(FIRST), _build(SECOND)]), 90.0)
    for name in (FIRST, SECOND):
        before.health_received(name, State.READY, 0.0, 100.0)
    before.roll("smollm2-0", allow_gap=False)
    assert before.actions(100.1) == [Stop(FIRST, drain=True)]
    after = _reconciler()
    restore_records(
        after, take_snapshot(before, 5, {}), AdoptedState([_build(FIRST, draining=True), _build(SECOND)]), 101.0
    )
    assert not after.records["smollm2-0"].held
    assert after.actions(101.1) == [Stop(FIRST, drain=True)]
    after.stopped(FIRST, 102.0)
    (launch,) = after.actions(102.0)
    assert launch.name == ReplicaName("smollm2-0", 4)


@pytest.mark.parametrize("held", [False, True, None])
def test_a_rank_reports_why_it_drains(held: bool | None) -> None:
    """The snapshot may be older than the drain: a replica that was being rolled stayed down."""
    reconciler = _reconciler()
    snapshot = ControllerSnapshot(created=5, replicas={"smollm2-0": _snapshot(generation=3)})
    adopted_state = AdoptedState([_build(FIRST, draining=True, held=held), _build(SECOND)])
    restore_records(reconciler, snapshot, adopted_state, 101.0)
    assert reconciler.actions(101.1) == [Stop(FIRST, drain=True, held=held is not False)]
    reconciler.stopped(FIRST, 102.0)
    launched = [action.name for action in reconciler.actions(102.0)]
    assert launched == ([ReplicaName("smollm2-0", 4)] if held is False else [])


def test_a_drained_build_is_not_left_for_its_next_one() -> None:
    """An operator drained it while the next build started beside it, which is not needed then."""
    older, newer = ReplicaName("m-0", 3), ReplicaName("m-0", 4)
    reports: Reports = {(older, 0): _report(stage=Stage.DRAINING, held=True), (newer, 0): _report()}
    assert [(build.name, build.leaving) for build in _chosen(reports)] == [(older, False)]


@pytest.mark.parametrize("change", ["held", "rolling"])
def test_a_drain_or_rollout_is_not_repeated_with_a_newer_build(change: str) -> None:
    """The snapshot could not be saved for a while; meanwhile the replica was built again."""
    reconciler = _reconciler()
    snapshot = ControllerSnapshot(
        created=5, replicas={"smollm2-0": _snapshot(generation=3, **{"held": False} | {change: True})}
    )
    newer = ReplicaName("smollm2-0", 4)
    builds = [_build(newer), _build(SECOND)]
    restore_records(reconciler, snapshot, AdoptedState(builds), 100.0)
    assert reconciler.actions(100.1) == []
    silent = _reconciler()
    restore_records(silent, snapshot, AdoptedState([_build(SECOND)], {"smollm2-0": 4}, [newer]), 100.0)
    assert silent.actions(100.1) == [], "nor if the newer build does not reply"


def test_a_replica_that_was_brought_back_while_it_drained_is_built_again() -> None:
    """Its rank still reports the drain of the operator."""
    before, after = _reconciler(), _reconciler()
    restore_records(before, None, AdoptedState([_build(FIRST), _build(SECOND)]), 100.0)
    before.hold("smollm2-0")
    assert before.actions(100.1) == [Stop(FIRST, drain=True, held=True)]
    before.release("smollm2-0")
    builds = [_build(FIRST, draining=True, held=True), _build(SECOND)]
    restore_records(after, take_snapshot(before, 5, {}), AdoptedState(builds), 101.0)
    for reconciler in (before, after):
        reconciler.actions(101.1)
        reconciler.stopped(FIRST, 102.0)
        (launch,) = reconciler.actions(102.0)
        assert launch.name == ReplicaName("smollm2-0", 4)


def test_a_rollout_whose_next_build_was_not_started_has_failed() -> None:
    before = Reconciler(desired_replicas(parse_spec({"models": [{"replicas": 1}]})), HealthSpec())
    restore_records(before, None, AdoptedState([_build(FIRST)], {"smollm2-0": 3}), 100.0)
    before.roll("smollm2-0", allow_gap=False)
    after = Reconciler(before.desired, HealthSpec())
    restore_records(after, take_snapshot(before, 5, {}), AdoptedState([_build(FIRST)], {"smollm2-0": 3}), 101.0)
    assert after.surges.failed and after.actions(101.1) == []


def test_a_rollout_that_failed_before_the_loss_is_not_reported_as_lost() -> None:
    before = Reconciler(desired_replicas(parse_spec({"models": [{"replicas": 1}]})), HealthSpec())
    restore_records(before, None, AdoptedState([_build(FIRST)], {"smollm2-0": 3}), 100.0)
    before.roll("smollm2-0", allow_gap=False)
    (launch,) = before.actions(100.1)
    before.start_failed(launch.name, "a bad file", 100.2, final=True)
    after = Reconciler(before.desired, HealthSpec())
    restore_records(after, take_snapshot(before, 5, {}), AdoptedState([_build(FIRST)], {"smollm2-0": 3}), 101.0)
    assert after.surges.failed == {}


def test_a_rollout_whose_next_build_is_adopted_has_succeeded() -> None:
    before = Reconciler(desired_replicas(parse_spec({"models": [{"replicas": 1}]})), HealthSpec())
    restore_records(before, None, AdoptedState([_build(FIRST)], {"smollm2-0": 3}), 100.0)
    before.roll("smollm2-0", allow_gap=False)
    before.actions(100.1)
    after, newer = Reconciler(before.desired, HealthSpec()), ReplicaName("smollm2-0", 4)
    restore_records(after, take_snapshot(before, 5, {}), AdoptedState([_build(newer)], {"smollm2-0": 4}), 101.0)
    assert after.surges.failed == {} and after.records["smollm2-0"].name == newer


def test_an_adopted_build_without_health_is_replaced() -> None:
    reconciler = _reconciler()
    restore_records(reconciler, None, AdoptedState([_build(FIRST), _build(SECOND)]), 100.0)
    assert reconciler.actions(101.9) == []
    reconciler.health_received(SECOND, State.READY, 0.01, 102.0)
    reconciler.actions(102.1)
    assert reconciler.records["smollm2-0"].state is State.UNHEALTHY
    reconciler.health_received(SECOND, State.READY, 0.01, 117.9)
    assert Stop(FIRST, drain=False) in reconciler.actions(118.0)


def test_a_rebuild_that_fails_after_adoption_does_not_end_the_cluster() -> None:
    reconciler = _reconciler()
    snapshot = ControllerSnapshot(created=5, replicas={"smollm2-0": _snapshot(ever_ready=True)})
    restore_records(reconciler, snapshot, AdoptedState([_build(SECOND)]), 0.0)
    (launch,) = reconciler.actions(0.1)
    reconciler.start_failed(launch.name, "no place for it just now", 0.2, final=True)
    assert reconciler.fatal == ""


def test_changes_of_operators_are_in_the_snapshot() -> None:
    before, after = _reconciler(), _reconciler()
    for record, (generation, role, held, ready) in zip(
        before.records.values(), ((3, Role.PREFILL, False, True), (2, Role.DECODE, True, False)), strict=True
    ):
        record.generation, record.role, record.held, record.ever_ready = generation, role, held, ready
    snapshot = take_snapshot(before, 77, {ReplicaName("smollm2-1", 2): 12.5})
    snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=ControllerSnapshot)
    drains = restore_records(after, snapshot, AdoptedState([_build(FIRST, Role.PREFILL)]), 0.0)
    assert snapshot.created == 77 and drains == {ReplicaName("smollm2-1", 2): 12.5}
    for key in ("generation", "role", "held"):
        assert [getattr(r, key) for r in after.records.values()] == [getattr(r, key) for r in before.records.values()]
    assert after.actions(0.1) == [] and after.records["smollm2-1"].state is State.DRAINED


def test_the_report_of_a_rank_is_newer_than_the_snapshot() -> None:
    """Role and drain may have changed after the last view."""
    reconciler = _reconciler()
    snapshot = ControllerSnapshot(created=5, replicas={"smollm2-0": _snapshot(generation=3), "smollm2-1": _snapshot()})
    adopted_state = AdoptedState([_build(FIRST, Role.DECODE), _build(SECOND, draining=True)])
    restore_records(reconciler, snapshot, adopted_state, 0.0)
    assert reconciler.records["smollm2-0"].role is Role.DECODE
    assert reconciler.actions(0.1) == [Stop(SECOND, drain=True, held=True)]
    reconciler.stopped(SECOND, 1.0)
    assert reconciler.actions(1.1) == [] and reconciler.records["smollm2-1"].state is State.DRAINED


def test_the_record_has_what_ranks_report_with_what_changed_since() -> None:
    """For a controller to which they do not reply."""
    reconciler = _reconciler()
    restore_records(reconciler, None, AdoptedState([_build(FIRST), _build(SECOND)]), 100.0)
    reconciler.records["smollm2-0"].role = Role.DECODE
    reconciler.hold("smollm2-1")
    reconciler.actions(100.1)
    snapshot = take_snapshot(reconciler, 5, {}, {FIRST: [_report(1)], SECOND: [_report(2)]})
    snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=ControllerSnapshot)
    first, second = snapshot.reports[FIRST, 0], snapshot.reports[SECOND, 0]
    assert (first.pid, first.role, first.stage, first.held) == (1, "decode", Stage.READY, None)
    assert (second.pid, second.stage, second.held) == (2, Stage.DRAINING, True)
    reconciler.died(FIRST, "rank 0 was killed", 101.0)
    assert set(take_snapshot(reconciler, 5, {}, {FIRST: [_report(1)]}).reports) == set()


def test_builds_that_do_not_reply_for_a_minute_are_ended_a_few_at_a_time() -> None:
    reconciler = Reconciler(desired_replicas(parse_spec({"models": [{"replicas": 8}]})), HealthSpec(stops_per_minute=2))
    names = [ReplicaName(f"smollm2-{number}", 4) for number in range(8)]
    generations = {name.replica_id: name.generation for name in names}
    restore_records(reconciler, None, AdoptedState([_build(n) for n in names[3:]], generations, names[:3]), 100.0)
    stopped: list[tuple[float, Any]] = []
    for second in range(200):
        now = 100.0 + second
        for name in names[3:]:
            reconciler.health_received(name, State.READY, 0.01, now)
        stopped += [(now, action.name) for action in reconciler.actions(now) if isinstance(action, Stop)]
        if second == SILENT_SECONDS:
            assert stopped == [] and "do not reply" in reconciler.records["smollm2-0"].cause
    assert [name for _, name in stopped] == names[:3]
    assert [now - 100 for now, _ in stopped] == [SILENT_SECONDS + 1, SILENT_SECONDS + 1, SILENT_SECONDS + 61]
    assert not any(reconciler.records[name.replica_id].silent for name in names), "the next builds have been launched"


def test_a_role_that_arrived_late_is_older_than_the_snapshot() -> None:
    """Its call failed, and the operator was told that the role stays."""
    name = ReplicaName("m-0", 1)
    (late,) = choose_builds({(name, 0): _report(role="prefill", role_number=1)}, {"m-0": FINGERPRINT}, OURS)
    assert late.role_number == 1
    for number, expected in ((2, Role.BOTH), (1, Role.PREFILL), (0, Role.PREFILL)):
        reconciler = _reconciler()
        snapshot = ControllerSnapshot(created=5, replicas={"smollm2-0": _snapshot(generation=3, role_number=number)})
        found = dataclasses.replace(_build(FIRST, Role.PREFILL), role_number=late.role_number)
        restore_records(reconciler, snapshot, AdoptedState([found, _build(SECOND)]), 0.0)
        record = reconciler.records["smollm2-0"]
        assert (record.role, record.role_number) == (expected, max(number, 1))
        assert take_snapshot(reconciler, 5, {}).replicas["smollm2-0"].role_number == record.role_number


@pytest.mark.parametrize("known", [True, False])
def test_an_adoption_leaves_a_replica_that_decodes(known: bool) -> None:
    """The role of one may have arrived late."""
    reconciler = _reconciler()
    replicas = {"smollm2-0": _snapshot(generation=3), "smollm2-1": _snapshot(generation=2, role="prefill")}
    snapshot = ControllerSnapshot(created=5, replicas=replicas) if known else None
    builds = [_build(FIRST, Role.PREFILL), _build(SECOND, Role.PREFILL)]
    restore_records(reconciler, snapshot, AdoptedState(builds), 0.0)
    expected = [Role.BOTH, Role.PREFILL] if known else [Role.BOTH, Role.BOTH]  # of the snapshot; of the spec
    assert [record.role for record in reconciler.records.values()] == expected


def test_roles_stay_while_the_replica_that_decodes_is_built_again() -> None:
    reconciler = _reconciler()
    snapshot = ControllerSnapshot(created=5, replicas={"smollm2-1": _snapshot(generation=2, role="prefill")})
    restore_records(reconciler, snapshot, AdoptedState([_build(SECOND, Role.PREFILL)]), 0.0)
    assert [record.role for record in reconciler.records.values()] == [Role.BOTH, Role.PREFILL]


# -- a spec that has changed ----------------------------------------------------------------------------------------


def _outdated(reconciler: Reconciler) -> list[ReplicaName]:
    """Two builds of an earlier spec, adopted at 100 s and heard when routers are registered."""
    builds = [dataclasses.replace(_build(name), same=False) for name in (FIRST, SECOND)]
    restore_records(reconciler, None, AdoptedState(builds), 100.0)
    for name in (FIRST, SECOND):
        reconciler.health_received(name, State.READY, 0.01, 100.0 + ROUTERS_SECONDS)
    return [FIRST, SECOND]


def test_builds_of_an_earlier_spec_are_replaced_one_by_one_and_drained() -> None:
    reconciler = _reconciler()
    now, ended = 100.0 + ROUTERS_SECONDS, []
    for old in _outdated(reconciler):
        (stop,) = reconciler.actions(now)
        assert stop == Stop(old, drain=True)
        other = next(record for record in reconciler.records.values() if record.replica_id != old.replica_id)
        for _ in range(3):  # while it drains, and while the next one starts
            now += 0.5
            reconciler.health_received(other.name, State.READY, 0.01, now)
            assert reconciler.actions(now) == [] and other.state is State.READY
        reconciler.stopped(old, now)
        (launch,) = reconciler.actions(now)
        assert launch.name == ReplicaName(old.replica_id, old.generation + 1)
        assert reconciler.actions(now) == []
        reconciler.health_received(launch.name, State.READY, 0.01, now, connected=False)
        assert reconciler.actions(now) == [], "not every router is connected to it yet"
        reconciler.health_received(launch.name, State.READY, 0.01, now)
        ended.append(old)
    assert reconciler.actions(now) == [] and ended == [FIRST, SECOND]


def test_the_only_replica_of_an_earlier_spec_serves_until_the_next_one_does() -> None:
    reconciler = Reconciler(desired_replicas(parse_spec({"models": [{"replicas": 1}]})), HealthSpec())
    restore_records(reconciler, None, AdoptedState([dataclasses.replace(_build(FIRST), same=False)]), 100.0)
    now = 100.0 + ROUTERS_SECONDS
    reconciler.health_received(FIRST, State.READY, 0.01, now)
    (launch,) = reconciler.actions(now)
    assert launch == Launch(ReplicaName("smollm2-0", 4), reconciler.records["smollm2-0"].model, Role.BOTH, beside=True)
    reconciler.start_failed(launch.name, "a bad file", now + 0.1, final=True)
    assert reconciler.actions(now + 0.2) == [], "a spec that cannot run replaces nothing"
    assert reconciler.records["smollm2-0"].state is State.READY


def test_a_replica_that_the_spec_no_longer_names_drains() -> None:
    reconciler = _reconciler()
    extra = ReplicaName("smollm2-2", 1)
    builds = [_build(FIRST), _build(SECOND), dataclasses.replace(_build(extra), same=False)]
    restore_records(reconciler, None, AdoptedState(builds), 100.0)
    assert reconciler.actions(100.1) == [Stop(extra, drain=True)]
    reconciler.stopped(extra, 101.0)
    assert reconciler.actions(101.1) == [] and set(reconciler.records) == {"smollm2-0", "smollm2-1"}


# -- the supervisor -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _adopting_supervisor(
    driver: FakeDriver, snapshot: ControllerSnapshot | None = None
) -> AsyncIterator[tuple[Supervisor, Membership]]:
    spec = parse_spec({"models": [{"replicas": 2}], "health": HEALTH})
    membership = Membership()
    supervisor = Supervisor(spec, driver, membership, partial(watch_health, MEMBER))
    await supervisor.adopt(snapshot)
    supervisor.start()
    try:
        yield supervisor, membership
    finally:
        await supervisor.stop()


def _lists(membership: Membership) -> tuple[list[control_pb2.MemberList], "asyncio.Task[None]"]:
    received: list[control_pb2.MemberList] = []

    async def receive() -> None:
        async for members in membership.watch():
            received.append(members)

    return received, asyncio.create_task(receive())


def test_a_new_controller_publishes_every_adopted_replica_at_once(driver: FakeDriver, eventually: Eventually) -> None:
    """An incomplete list would remove replicas from the routers, and the controller may hear none of them."""

    async def scenario() -> None:
        for name in (FIRST, SECOND):
            driver.add_earlier_build(name).health_paused.set()
        async with _adopting_supervisor(driver, ControllerSnapshot(created=77)) as (supervisor, membership):
            received, receiver = _lists(membership)
            assert driver.adopt_request == ["smollm2-0", "smollm2-1"]
            await eventually(lambda: received)
            states = [(m.identity.replica_id, m.identity.generation, m.state) for m in received[0].members]
            ready = replica_pb2.REPLICA_STATE_READY
            assert states == [("smollm2-0", 3, ready), ("smollm2-1", 1, ready)]
            first = received[0].members[0]
            replica = driver.replicas[FIRST]
            assert (first.identity.boot_id, first.identity.role) == (replica.boot_id, replica_pb2.ROLE_BOTH)
            assert received[0].models[0].created == 77
            assert [call for call in driver.calls if call[0] != "stop"] == []
            assert set(supervisor.overview.started()) == {"smollm2-0", "smollm2-1"}
            assert [rank["pid"] for rank in supervisor.status()["replicas"][0]["ranks"]] == [1003]
            assert supervisor.snapshot().replicas["smollm2-0"].generation == 3
            await asyncio.sleep(1)
            assert all(len(members.members) == 2 for members in received) and driver.calls == []
            for replica in driver.replicas.values():
                replica.health_paused.clear()
            await eventually(lambda: supervisor.status()["replicas"][0]["revision"] == "r1")  # its health was received
            receiver.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("up", [True, False])
def test_a_build_whose_ranks_reply_late_continues_if_it_is_up(
    driver: FakeDriver, eventually: Eventually, up: bool
) -> None:
    async def scenario() -> None:
        for name in (FIRST, SECOND):
            driver.add_earlier_build(name)
        late = driver.adopted_state.builds.pop(0)
        driver.adopted_state.silent.append(FIRST)
        driver.reports = {FIRST: dataclasses.replace(late, reports=[_report()])} if up else {}
        driver.errors["report"] += [AdoptionError("a rank does not reply")] * 6  # SECOND is asked, too
        async with _adopting_supervisor(driver) as (supervisor, _):
            record = supervisor.reconciler.records["smollm2-0"]
            assert record.state is State.STARTING
            await eventually(lambda: any("report of smollm2-0" in each for each in supervisor.status()["problems"]))
            assert "do not reply" in supervisor.status()["replicas"][0]["note"]
            assert ("stop", FIRST) not in driver.calls
            await eventually(lambda: supervisor.reconciler.ready and not record.cause)
            assert record.generation == (3 if up else 4)
            assert (("stop", FIRST) in driver.calls) is (not up)
            if up:
                assert supervisor.snapshot().reports.keys() == {(FIRST, 0)}

    asyncio.run(scenario())


def test_an_adopted_replica_that_dies_is_rebuilt(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        driver.add_earlier_build(FIRST)
        async with _adopting_supervisor(driver) as (supervisor, _):
            await eventually(lambda: supervisor.reconciler.ready)
            assert ("launch", ReplicaName("smollm2-1", 1)) in driver.calls, "the missing one is built"
            driver.kill(FIRST)
            again = ReplicaName("smollm2-0", 4)
            await eventually(lambda: again in driver.replicas and supervisor.reconciler.ready)
            calls = [call for call in driver.calls if call[1].replica_id == "smollm2-0"]
            assert calls[:2] == [("stop", FIRST), ("launch", again)]

    asyncio.run(scenario())


def test_a_drain_continues_with_its_remaining_time(driver: FakeDriver, eventually: Eventually) -> None:
    snapshot = ControllerSnapshot(
        created=1, replicas={"smollm2-0": _snapshot(generation=3, held=True, drain_seconds=0.4, ever_ready=True)}
    )

    async def scenario() -> None:
        driver.add_earlier_build(FIRST, draining=True).running = 1
        driver.add_earlier_build(SECOND)
        async with _adopting_supervisor(driver, snapshot) as (supervisor, _):
            record = supervisor.reconciler.records["smollm2-0"]
            loop = asyncio.get_running_loop()
            began = loop.time()
            await eventually(lambda: record.state is State.DRAINED)
            assert 0.2 < loop.time() - began < 1.5, "not the two seconds of a new drain"
            assert supervisor.reconciler.ready

    asyncio.run(scenario())


def test_streams_of_a_build_that_drains_beside_its_next_one_may_finish(
    driver: FakeDriver, eventually: Eventually
) -> None:
    newer = ReplicaName("smollm2-0", 4)
    snapshot = ControllerSnapshot(
        created=1, replicas={"smollm2-0": _snapshot(generation=4, leaving_seconds=30.0, ever_ready=True)}
    )

    async def scenario() -> None:
        for name in (newer, SECOND):
            driver.add_earlier_build(name)
        old = driver.add_earlier_build(FIRST, draining=True)
        old.running = 1
        driver.adopted_state.builds[-1] = dataclasses.replace(driver.adopted_state.builds[-1], leaving=True)
        async with _adopting_supervisor(driver, snapshot) as (supervisor, _):
            await eventually(lambda: supervisor.overview.in_flight == 1)
            await asyncio.sleep(0.3)
            assert ("drain", FIRST) in driver.calls and ("stop", FIRST) not in driver.calls
            assert 25 < (supervisor.snapshot().replicas["smollm2-0"].leaving_seconds or 0) < 30
            old.running = 0
            await eventually(lambda: ("stop", FIRST) in driver.calls, 1)
            await eventually(lambda: not supervisor.reconciler.surges.leaving)
            assert supervisor.reconciler.ready and ("stop", newer) not in driver.calls

    asyncio.run(scenario())


def test_a_first_controller_publishes_at_once(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _adopting_supervisor(driver) as (supervisor, membership):
            received, receiver = _lists(membership)
            await eventually(lambda: received)
            await eventually(lambda: supervisor.reconciler.ready)
            receiver.cancel()

    asyncio.run(scenario())
