"""Runs ranks as Ray actors: a placement group per replica with a bundle per stage, a named detached actor per rank."""

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace_cluster.core import naming
from headrace_cluster.core.driver import (
    LATE_POLL_SECONDS,
    NOTE_SECONDS,
    PLACE_POLL_SECONDS,
    STOP_SECONDS,
    AdoptedBuild,
    AdoptedState,
    Progress,
    RankFacts,
)
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.placement import rank_gpus, threads_per_rank, waiting_sentence
from headrace_cluster.core.rank_config import (
    REPLICA_CLASS,
    ProfileOutcome,
    fingerprint,
    replica_config,
)
from headrace_cluster.core.record import DesiredReplica
from headrace_cluster.core.snapshot import ControllerSnapshot
from headrace_cluster.errors import PlacementError, RoleError
from headrace_cluster.local.run_logs import rank_log_path
from headrace_cluster.ray import names as ray_names
from headrace_cluster.ray import resources as ray_resources
from headrace_cluster.ray.calls import RayCalls, RayHangsError
from headrace_cluster.ray.rank_actor import RankActor
from headrace_cluster.ray.rank_group import RankGroup
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_proto.cluster_member import ClusterSecret
from headrace_proto.logs import LogConfig
from headrace_proto.role import Role
from headrace_worker.core.config import ReplicaConfig, ReplicaStarted

_CALLS = 8  # of a rank at a time: a report that is waited for, a profile, and short ones


class RayDriver:
    """A `ReplicaDriver` on the Ray that this process is connected to."""

    def __init__(
        self,
        spec: ClusterSpec,
        secret: ClusterSecret,
        calls: RayCalls,
        host: str,
        replica_class: str = REPLICA_CLASS,
        log_folder: str = "",
    ) -> None:
        self._spec = spec
        self._secret = secret
        self._calls = calls
        self._host = host
        self._replica_class = replica_class
        self._log_folder = log_folder
        self._on_gpus: set[str] = set()  # models with a replica on GPUs
        self._groups: dict[ReplicaName, RankGroup] = {}
        self._expected: dict[str, bytes] = {}  # fingerprint of each replica of the spec

    async def launch(
        self,
        name: ReplicaName,
        model: ModelSpec,
        role: Role,
        on_wait: Callable[[str], None],
        seconds: float | None = None,
    ) -> list[RankFacts]:
        """See ReplicaDriver. The placement group waits in Ray, where an autoscaler sees what is needed."""
        gpus = await self._rank_gpus(model)
        # A bundle is a stage, on one node, since its ranks communicate in every layer. Stages may span nodes.
        share = {"CPU": model.cpu_share} | ({"GPU": gpus} if gpus else {})
        stage = {kind: amount * model.tp for kind, amount in share.items()}
        place = await self._calls.run(
            placement_group,
            [stage] * model.pp,
            strategy="PACK",
            name=name.group(self._spec.cluster),
            lifetime="detached",
            bundle_label_selector=[dict(model.node_labels)] * model.pp if model.node_labels else None,
        )
        began = time.monotonic()
        while not await self._is_placed(place):
            waited = time.monotonic() - began
            if waited > NOTE_SECONDS or (seconds is not None and waited > seconds):
                reason = await self._waiting_reason(model, gpus)
                if seconds is not None and waited > seconds:
                    await self._calls.run(ray_names.remove_group, name.group(self._spec.cluster))
                    raise PlacementError(f"{name.replica_id}: {reason}")
                on_wait(reason)
            await asyncio.sleep(PLACE_POLL_SECONDS if waited < NOTE_SECONDS else LATE_POLL_SECONDS)
        on_wait("")
        threads = model.cpu_threads
        if threads is None:
            threads = await self._calls.run(self._threads_per_rank, place)
        config = msgspec.msgpack.encode(self._config(name, model, role, threads))
        actor_class = ray.remote(RankActor)
        space = naming.namespace(self._spec.cluster)

        def create(rank: int) -> Any:
            options = actor_class.options(
                name=name.rank(rank),
                namespace=space,
                lifetime="detached",
                num_cpus=model.cpu_share,
                num_gpus=gpus,
                max_restarts=0,
                max_concurrency=_CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(place, rank // model.tp),
                runtime_env={"env_vars": self._rank_environment(threads)},
            )
            return options.remote(config, rank, space, self._replica_class, self._logs(name, rank))

        actors = [await self._calls.run(create, rank) for rank in range(model.ranks)]
        group = self._groups[name] = RankGroup(name, self._spec.cluster, actors, self._log_folder)
        return await group.locate()

    async def _is_placed(self, place: Any) -> bool:
        """Not while Ray does not answer: it keeps the request meanwhile."""
        try:
            table: dict[str, Any] = await self._calls.run(placement_group_table, place)
        except RayHangsError:
            return False
        return str(table.get("state", "")) == "CREATED"

    async def _waiting_reason(self, model: ModelSpec, gpus: int) -> str:
        try:
            return waiting_sentence(model, gpus, await self._calls.run(ray.available_resources))
        except RayHangsError as error:
            return f"waiting for a place: {error}"

    async def _rank_gpus(self, model: ModelSpec) -> int:
        """With the device `auto`, a model that once ran on GPUs waits for one: a node of them may be lost."""
        have = int((await self._calls.run(ray.cluster_resources)).get("GPU", 0))
        if rank_gpus(model, have or (model.name in self._on_gpus)):
            self._on_gpus.add(model.name)
            return 1
        return 0

    async def adopt(self, replicas: Iterable[DesiredReplica], snapshot: ControllerSnapshot | None) -> AdoptedState:
        """See ReplicaDriver."""
        for replica in replicas:
            config = self._config(ReplicaName(replica.replica_id, 0), replica.model, replica.role, 0)
            self._expected[replica.replica_id] = fingerprint(config)
        adopted_state, groups = await ray_resources.adopt(
            self._calls, self._spec.cluster, self._expected, self._secret.fingerprints, snapshot
        )
        self._note_gpus(adopted_state.builds)
        self._groups |= {group.name: group for group in groups}
        return adopted_state

    async def report(self, name: ReplicaName) -> AdoptedBuild | None:
        """See ReplicaDriver."""
        build = await ray_resources.ask(self._groups[name], self._expected, self._secret.fingerprints)
        self._note_gpus([build] if build is not None else [])
        return build

    def _note_gpus(self, builds: Iterable[AdoptedBuild]) -> None:
        self._on_gpus |= {build.model for build in builds if build.ranks[0].device.startswith("cuda")}

    async def start(self, name: ReplicaName) -> ReplicaStarted:
        """See ReplicaDriver."""
        await self._groups[name].set_secret(self._secret.values)
        return await self._groups[name].started()

    async def send_secret(self, name: ReplicaName) -> None:
        """See ReplicaDriver."""
        await self._groups[name].set_secret(self._secret.values)

    async def progress(self, name: ReplicaName) -> Progress | None:
        """See ReplicaDriver."""
        group = self._groups.get(name)
        return group.progress if group is not None else None

    async def wait_for_death(self, name: ReplicaName) -> str:
        """See ReplicaDriver."""
        return await self._groups[name].ended()

    async def profile(self, name: ReplicaName, steps: int, seconds: float) -> list[ProfileOutcome]:
        """See ReplicaDriver."""
        group = self._groups.get(name)
        return await group.profile(steps, seconds) if group is not None else []

    async def set_role(self, name: ReplicaName, role: Role, number: int) -> None:
        """See ReplicaDriver."""
        group = self._groups.get(name)
        if group is None:
            raise RoleError(f"{name.replica_id} has just ended: ask again when it is ready")
        await group.set_role(role, number)

    async def drain(self, name: ReplicaName, *, held: bool) -> None:
        """See ReplicaDriver."""
        group = self._groups.get(name)
        if group is not None:
            await group.drain(held)

    async def stop(self, name: ReplicaName, seconds: float = STOP_SECONDS) -> None:
        """See ReplicaDriver."""
        group = self._groups.get(name)
        if group is not None:
            await group.stop(seconds)
            await self._calls.run(group.kill)
            group.close()
        await self._calls.run(ray_names.remove_group, name.group(self._spec.cluster))
        self._groups.pop(name, None)

    # -- configuration of a rank ------------------------------------------------------------------------------

    def _threads_per_rank(self, place: Any) -> int:
        cores = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]}
        placed = placement_group_table(place).get("bundles_to_node_id", {}).values()
        return threads_per_rank(cores, placed, sum(pool.ranks for model in self._spec.models for pool in model.pools))

    def _rank_environment(self, threads: int) -> dict[str, str]:
        # Libraries read these when they load, so they are set before the process starts; Ray would set one thread.
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        # By default waiting OpenMP threads spin for milliseconds, which blocks the router and other ranks on a shared
        # machine; a short spin keeps most of its gain. The operator's own setting has precedence.
        waiting = {name: os.environ[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in os.environ}
        return (
            {name: str(threads) for name in names}
            | {"TOKENIZERS_PARALLELISM": "false"}
            | (waiting or {"GOMP_SPINCOUNT": "2000"})
        )

    def _logs(self, name: ReplicaName, rank: int) -> bytes:
        """An encoded LogConfig. Generations of a replica append to the same file; without a folder they use stderr."""
        path = str(rank_log_path(Path(self._log_folder), name.replica_id, rank)) if self._log_folder else ""
        logs = LogConfig(f"rank {rank}", name.replica_id, path, self._spec.logs.format)
        return msgspec.msgpack.encode(logs)

    def _config(self, name: ReplicaName, model: ModelSpec, role: Role, threads: int) -> ReplicaConfig:
        return replica_config(
            model,
            replica_id=name.replica_id,
            generation=name.generation,
            source=_absolute(model.source),
            role=role,
            chat_template=_absolute(model.chat_template) if model.chat_template is not None else None,
            profile_dir=str(model.profile.expanduser().resolve()) if model.profile is not None else None,
            cpu_threads=threads,
            host=self._host,
            internal_tls=self._spec.internal.tls_files,
        )


def _absolute(path: str) -> str:
    """A path that exists here, for ranks, which have another working directory; others unchanged."""
    found = Path(path).expanduser()
    return str(found.resolve()) if found.exists() else path
