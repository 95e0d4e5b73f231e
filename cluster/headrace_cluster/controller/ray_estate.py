"""What a cluster has in Ray, found by name: asked, adopted, or ended."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import ray
import ray.util

from headrace_cluster import ray_names
from headrace_cluster.controller.adoption import Wanted, choose
from headrace_cluster.controller.driver import AdoptedBuild, Inheritance
from headrace_cluster.controller.rank_group import RankGroup
from headrace_cluster.naming import ReplicaName
from headrace_cluster.processes import ProcessId
from headrace_cluster.rank_config import RankReport

ANSWER_SECONDS = 5.0  # for a rank to say what it is: it answers beside its step loop


async def adopt(cluster: str, wanted: Mapping[str, Wanted]) -> tuple[Inheritance, list[RankGroup]]:
    """Takes over the builds that are up and wanted, and ends every other rank and place of the cluster."""
    actors = ray_names.rank_actors(cluster)
    answers = await asyncio.gather(*(_report(actor) for actor in actors.values()))
    reports = dict(zip(actors, answers, strict=True))
    places = ray_names.groups(cluster)
    builds = choose(reports, wanted)
    builds = [build for build in builds if build.name in places]  # without its place a rank is about to end
    kept = {build.name for build in builds}
    for name, rank in actors:
        if name not in kept:
            ray_names.kill_actor(name.rank(rank), cluster)
    for name in places - kept:
        ray_names.remove_group(name.group(cluster))
    generations: dict[str, int] = {}
    for name in sorted({name for name, _ in actors} | places):
        generations[name.replica_id] = name.generation
    return Inheritance(builds, generations), [_group(cluster, build, actors, reports) for build in builds]


async def _report(actor: Any) -> RankReport | None:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return msgspec.msgpack.decode(await actor.report.remote(), type=RankReport)
    except (TimeoutError, ray.exceptions.RayError):
        return None


def _group(
    cluster: str,
    build: AdoptedBuild,
    actors: Mapping[tuple[ReplicaName, int], Any],
    reports: Mapping[tuple[ReplicaName, int], RankReport | None],
) -> RankGroup:
    group = RankGroup(build.name, cluster)
    here = str(ray.util.get_node_ip_address())
    for facts in build.ranks:
        report = reports[build.name, facts.rank]
        group.actors.append(actors[build.name, facts.rank])
        group.pids.append(facts.pid)
        group.gpus.append((facts.node, report.gpus if report is not None else []))
        process = ProcessId.of(facts.pid) if facts.node == here else None
        if process is not None:
            group.processes.append(process)
    return group
