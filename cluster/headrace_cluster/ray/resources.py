"""Ray resources of an earlier controller: finds ranks and placement groups by name, adopts or ends them."""

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import ray

from headrace_cluster.core.adoption import plan_adoption
from headrace_cluster.core.driver import REPORT_SECONDS, REPORT_TRIES, RETRY_SECONDS, AdoptedBuild, AdoptedState
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import RankReport
from headrace_cluster.errors import AdoptionError
from headrace_cluster.ray import names as ray_names
from headrace_cluster.ray.rank_group import RankGroup, RankPlace


class RankEndedError(Exception):
    """Ray reports that a rank has ended."""


async def adopt(
    cluster: str, expected: Mapping[str, bytes], authorities: Collection[bytes], most_silent: int
) -> tuple[AdoptedState, list[RankGroup]]:
    """Takes over the builds that are up, and ends every other rank and placement group of the cluster.

    expected, authorities, most_silent: see `plan_adoption`. Raises AdoptionError.
    """
    actors = ray_names.rank_actors(cluster)
    reports: dict[tuple[ReplicaName, int], RankReport | None] = dict.fromkeys(actors)

    async def ask(rank: tuple[ReplicaName, int]) -> None:
        try:
            reports[rank] = await _report(actors[rank])
        except RankEndedError:
            del reports[rank]

    for _ in range(REPORT_TRIES):
        await asyncio.gather(*(ask(rank) for rank, report in list(reports.items()) if report is None))
    groups = ray_names.groups(cluster)
    plan = plan_adoption(reports, groups, expected, authorities, most_silent)
    for name, rank in plan.ended_ranks:
        ray_names.kill_actor(name.rank(rank), cluster)
    for name in plan.ended_groups:
        ray_names.remove_group(name.group(cluster))
    if plan.waits:
        raise AdoptionError(plan.waits)
    return plan.state, [_group(cluster, build, actors, reports) for build in plan.state.builds]


async def _report(actor: Any) -> RankReport | None:
    """None: it has not replied. Raises AdoptionError, RankEndedError."""
    try:
        async with asyncio.timeout(REPORT_SECONDS):
            return msgspec.msgpack.decode(await _reachable_report(actor), type=RankReport)
    except TimeoutError:
        return None
    except msgspec.ValidationError as error:
        raise AdoptionError(
            "ranks of another version of Headrace run in this Ray and cannot be taken over; stop them with that version"
        ) from error
    except ray.exceptions.RayActorError as error:
        raise RankEndedError from error
    except ray.exceptions.RayError:
        await asyncio.sleep(RETRY_SECONDS)
        return None


async def _reachable_report(actor: Any) -> bytes:
    """Repeated while the network fails: that is no evidence that the rank has ended."""
    while True:
        try:
            encoded: bytes = await actor.report.remote()
        except ray.exceptions.ActorUnavailableError:
            await asyncio.sleep(RETRY_SECONDS)
        else:
            return encoded


def _group(
    cluster: str,
    build: AdoptedBuild,
    actors: Mapping[tuple[ReplicaName, int], Any],
    reports: Mapping[tuple[ReplicaName, int], RankReport | None],
) -> RankGroup:
    places, log_folder = [], ""
    for facts in build.ranks:
        report = reports[build.name, facts.rank]
        places.append(RankPlace.of(facts.pid, facts.node, report.gpus if report is not None else ()))
        if report is not None and report.log_path:
            log_folder = str(Path(report.log_path).parent)
    handles = [actors[build.name, facts.rank] for facts in build.ranks]
    return RankGroup(build.name, cluster, handles, places, log_folder)
