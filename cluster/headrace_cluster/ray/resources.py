"""Ray resources of an earlier controller: finds ranks and placement groups by name, adopts or ends them."""

import asyncio
import contextlib
from collections.abc import Collection, Mapping

from headrace_cluster.core.adoption import choose_builds, plan_adoption
from headrace_cluster.core.driver import REPORT_SECONDS, AdoptedBuild, AdoptedState
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import RankReport
from headrace_cluster.core.snapshot import ControllerSnapshot
from headrace_cluster.errors import AdoptionError
from headrace_cluster.ray import names as ray_names
from headrace_cluster.ray.calls import RayCalls
from headrace_cluster.ray.rank_group import RankGroup


async def adopt(
    calls: RayCalls,
    cluster: str,
    expected: Mapping[str, bytes],
    secrets: Collection[bytes],
    snapshot: ControllerSnapshot | None,
) -> tuple[AdoptedState, list[RankGroup]]:
    """Takes over the builds that start or are up, and ends every other rank and placement group of the cluster.

    expected, secrets, snapshot: see `plan_adoption`. Raises AdoptionError, RayHangsError.
    """
    actors = await calls.run(ray_names.rank_actors, cluster)
    ranks: dict[ReplicaName, list[int]] = {}
    for name, rank in sorted(actors):
        ranks.setdefault(name, []).append(rank)
    watched = {name: RankGroup(name, cluster, [actors[name, rank] for rank in found]) for name, found in ranks.items()}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REPORT_SECONDS):
            await asyncio.gather(*(group.replied() for group in watched.values()))
    if any(group.is_foreign for group in watched.values()):
        raise AdoptionError(
            "ranks of another version of Headrace run in this Ray and cannot be taken over; stop them with that version"
        )
    reports: dict[tuple[ReplicaName, int], RankReport | None] = {
        (name, rank): report
        for name, group in watched.items()
        for place, (rank, report) in enumerate(zip(ranks[name], group.reports, strict=True))
        if place not in group.killed
    }
    groups = await calls.run(ray_names.groups, cluster)
    plan = plan_adoption(reports, groups, expected, secrets, snapshot)
    for name, rank in plan.ended_ranks:
        await calls.run(ray_names.kill_actor, name.rank(rank), cluster)
    for name in plan.ended_groups:
        await calls.run(ray_names.remove_group, name.group(cluster))
    kept = {build.name for build in plan.state.builds} | set(plan.state.silent) | set(plan.state.starting)
    for name in watched.keys() - kept:
        watched.pop(name).close()
    return plan.state, list(watched.values())


async def ask(group: RankGroup, expected: Mapping[str, bytes], secrets: Collection[bytes]) -> AdoptedBuild | None:
    """See `ReplicaDriver.report`. expected, secrets: see `plan_adoption`."""
    await group.replied()
    if group.killed:
        return None
    builds = choose_builds({(group.name, rank): report for rank, report in enumerate(group.reports)}, expected, secrets)
    return builds[0] if builds else None
