"""Runs ranks as Ray actors: a placement group per replica with a bundle per stage, a named detached actor per rank."""

import asyncio
import os
from collections.abc import Iterable, Mapping
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
import ray
import ray.util
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace_cluster import naming, ray_names
from headrace_cluster.controller import ray_estate
from headrace_cluster.controller.adoption import Wanted
from headrace_cluster.controller.driver import STOP_SECONDS, Inheritance, Progress, RankFacts, StartFailedError
from headrace_cluster.controller.rank_group import RankGroup
from headrace_cluster.controller.reconciler import DesiredReplica
from headrace_cluster.errors import PlacementError, RoleError
from headrace_cluster.naming import ReplicaName
from headrace_cluster.pools import Role
from headrace_cluster.processes import ProcessId
from headrace_cluster.rank_actor import RankActor
from headrace_cluster.rank_config import REPLICA_CLASS, ProfileOutcome, fingerprint
from headrace_cluster.spec import ClusterSpec, ModelSpec
from headrace_worker.config import ReplicaConfig, ReplicaStarted

PLACE_SECONDS = 30.0
_CALLS = 8  # of a rank at a time: start, wait, and the short ones beside them


class RayDriver:
    """A `ReplicaDriver` on the Ray that this process is connected to."""

    def __init__(
        self,
        spec: ClusterSpec,
        secret: bytes,
        host: str,
        replica_class: str = REPLICA_CLASS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._spec = spec
        self._secret = secret
        self._host = host
        self._replica_class = replica_class
        self._environment = dict(environment or {})
        self._groups: dict[ReplicaName, RankGroup] = {}

    async def launch(self, name: ReplicaName, model: ModelSpec, role: Role) -> list[RankFacts]:
        """See ReplicaDriver. GPUs are counted first: too few is an error at once, not a wait."""
        gpus = self._gpus_per_rank(model)
        # A bundle is a stage, and lies on one node, since its ranks talk in every layer. Stages may span nodes.
        share = {"CPU": model.cpu_share} | ({"GPU": gpus} if gpus else {})
        stage = {kind: amount * model.tp for kind, amount in share.items()}
        place = placement_group(
            [stage] * model.pp, strategy="PACK", name=name.group(self._spec.cluster), lifetime="detached"
        )
        if not await asyncio.to_thread(place.wait, PLACE_SECONDS):
            ray_names.remove_group(name.group(self._spec.cluster))
            free = ray.available_resources()
            together = f", each {model.tp} on one node," if model.tp > 1 else ","
            raise PlacementError(
                f"{name.replica_id} needs {model.ranks} x {_words(share)}{together} but Ray has free: {_words(free)}; "
                "lower --replicas, --prefill, --decode, --tp or --pp, or add nodes"
            )
        threads = model.cpu_threads or self._threads_per_rank(place)
        config = msgspec.msgpack.encode(self._config(name, model, role, threads))
        actor_class = ray.remote(RankActor)
        group = RankGroup(name, self._spec.cluster)
        self._groups[name] = group
        for rank in range(model.ranks):
            options = actor_class.options(
                name=name.rank(rank),
                namespace=naming.namespace(self._spec.cluster),
                lifetime="detached",
                num_cpus=model.cpu_share,
                num_gpus=gpus,
                max_restarts=0,
                max_concurrency=_CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(place, rank // model.tp),
                runtime_env={"env_vars": self._rank_environment(threads)},
            )
            group.actors.append(options.remote(config, rank, self._replica_class))
        try:
            facts = await asyncio.gather(*(actor.facts.remote() for actor in group.actors))
        except ray.exceptions.RayError as error:
            raise StartFailedError(f"a rank of {name.replica_id} could not be created: {error}", final=False) from error
        group.pids = [pid for pid, _, _ in facts]
        group.gpus = [(node, given) for _, node, given in facts]
        here = str(ray.util.get_node_ip_address())
        processes = [ProcessId.of(pid) for pid, node, _ in facts if node == here]
        group.processes = [process for process in processes if process is not None]
        return [RankFacts(rank, pid, node) for rank, (pid, node, _) in enumerate(facts)]

    async def adopt(self, replicas: Iterable[DesiredReplica]) -> Inheritance:
        """See ReplicaDriver."""
        wanted = {}
        for replica in replicas:
            config = self._config(ReplicaName(replica.replica_id, 0), replica.model, replica.role, 0)
            wanted[replica.replica_id] = Wanted(replica.model.ranks, fingerprint(config))
        inheritance, groups = await ray_estate.adopt(self._spec.cluster, wanted)
        self._groups |= {group.name: group for group in groups}
        return inheritance

    async def start(self, name: ReplicaName) -> ReplicaStarted:
        """See ReplicaDriver."""
        return await self._groups[name].start()

    async def progress(self, name: ReplicaName) -> Progress | None:
        """See ReplicaDriver."""
        group = self._groups.get(name)
        return await group.progress() if group is not None else None

    async def died(self, name: ReplicaName) -> str:
        """See ReplicaDriver."""
        return await self._groups[name].died()

    async def profile(self, name: ReplicaName, steps: int, seconds: float) -> list[ProfileOutcome]:
        """See ReplicaDriver."""
        group = self._groups.get(name)
        return await group.profile(steps, seconds) if group is not None else []

    async def set_role(self, name: ReplicaName, role: Role) -> None:
        """See ReplicaDriver."""
        group = self._groups.get(name)
        if group is None:
            raise RoleError(f"{name.replica_id} has just ended: ask again when it is ready")
        await group.set_role(role)

    async def drain(self, name: ReplicaName) -> None:
        """See ReplicaDriver."""
        group = self._groups.get(name)
        if group is not None:
            await group.call_all("drain")

    async def stop(self, name: ReplicaName, seconds: float = STOP_SECONDS) -> None:
        """See ReplicaDriver."""
        group = self._groups.pop(name, None)
        if group is not None:
            await group.call_all("stop", seconds)
            group.kill()
        ray_names.remove_group(name.group(self._spec.cluster))

    # -- what a rank gets -------------------------------------------------------------------------------------

    def _gpus_per_rank(self, model: ModelSpec) -> int:
        if model.device == "cpu":
            return 0
        have = int(ray.cluster_resources().get("GPU", 0))
        if have == 0 and model.device == "auto":
            return 0
        models = [entry for entry in self._spec.models if entry.device != "cpu"]
        need = sum(pool.ranks for entry in models for pool in entry.pools)
        if need > have:
            pools = next(entry.pools for entry in models if entry.name == model.name)
            parts = " and ".join(f"{pool.replicas} replicas x {pool.tp * pool.pp} ranks" for pool in pools)
            raise PlacementError(
                f"{need} GPUs are needed ({model.name}: {parts}), but Ray has {have}; lower --replicas, --prefill, "
                "--decode, --tp or --pp, or pass --device cpu"
            )
        return 1

    def _threads_per_rank(self, place: Any) -> int:
        """Cores of the node, shared among the ranks that this spec puts on it."""
        nodes = {node["NodeID"]: node["Resources"].get("CPU", 1.0) for node in ray.nodes() if node["Alive"]}
        homes = placement_group_table(place).get("bundles_to_node_id", {}).values()
        cores = min((nodes.get(home, 1.0) for home in homes), default=1.0)
        ranks = sum(pool.ranks for model in self._spec.models for pool in model.pools)
        return max(1, int(cores) // ceil(ranks / max(1, len(nodes))))

    def _rank_environment(self, threads: int) -> dict[str, str]:
        # Read when libraries load, hence before the process starts; Ray would set one thread.
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        # OpenMP threads that wait spin for milliseconds by default, and so take the cores from the router and from
        # other ranks on a shared machine; a short spin keeps most of its gain. The operator's own setting wins.
        waiting = {name: os.environ[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in os.environ}
        return (
            {name: str(threads) for name in names}
            | {"TOKENIZERS_PARALLELISM": "false"}
            | (waiting or {"GOMP_SPINCOUNT": "2000"})
            | self._environment
        )

    def _config(self, name: ReplicaName, model: ModelSpec, role: Role, threads: int) -> ReplicaConfig:
        source = Path(model.source).expanduser()
        return ReplicaConfig(
            replica_id=name.replica_id,
            generation=name.generation,
            model=model.name,
            # Ranks run in another folder.
            source=str(source.resolve()) if source.exists() else model.source,
            revision=model.revision,
            role=str(role),
            tp=model.tp,
            pp=model.pp,
            ep=model.ep,
            device=model.device,
            dtype=model.dtype,
            load_format=model.load_format,
            max_model_len=model.max_model_len,
            kv_cache_memory=model.kv_cache_memory,
            block_size=model.block_size,
            max_num_seqs=model.max_num_seqs,
            max_num_batched_tokens=model.max_num_batched_tokens,
            max_waiting=model.max_waiting,
            async_scheduling=model.async_scheduling,
            cuda_graphs=model.cuda_graphs,
            deterministic=model.deterministic,
            profile_dir=str(model.profile.expanduser().resolve()) if model.profile is not None else None,
            cpu_threads=threads,
            host=self._host,
            secret=self._secret,
            trust_remote_code=model.trust_remote_code,
        )


def _words(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources[key]:g} {key}" for key in ("CPU", "GPU") if key in resources) or "nothing"
