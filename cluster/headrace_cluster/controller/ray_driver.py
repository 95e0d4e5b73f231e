"""Runs ranks as Ray actors: a placement group per replica, one named detached actor per rank."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
import ray
import ray.util
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace_cluster import naming, ray_names
from headrace_cluster.controller.driver import Progress, RankFacts, StartFailedError
from headrace_cluster.errors import PlacementError
from headrace_cluster.naming import ReplicaName
from headrace_cluster.processes import ProcessId
from headrace_cluster.rank_actor import RankActor
from headrace_cluster.rank_config import REPLICA_CLASS, StartOutcome
from headrace_cluster.spec import ClusterSpec, ModelSpec
from headrace_worker.config import ReplicaConfig, ReplicaStarted

PLACE_SECONDS = 30.0
STOP_SECONDS = 5.0
_CALLS = 8  # of a rank at a time: start, wait, and the short ones beside them


@dataclass(slots=True)
class _Group:
    actors: list[Any]
    pids: list[int]
    processes: list[ProcessId]  # of ranks on this node


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
        self._groups: dict[ReplicaName, _Group] = {}

    async def launch(self, name: ReplicaName, model: ModelSpec) -> list[RankFacts]:
        """See ReplicaDriver. GPUs are counted first: too few is an error at once, not a wait."""
        gpus = self._gpus_per_rank(model)
        share = {"CPU": model.cpu_share} | ({"GPU": gpus} if gpus else {})
        place = placement_group(
            [share] * model.ranks,
            # The ranks of one stage talk in every layer: one node. Stages may span nodes.
            strategy="STRICT_PACK" if model.pp == 1 else "PACK",
            name=name.group(self._spec.cluster),
            lifetime="detached",
        )
        if not await asyncio.to_thread(place.wait, PLACE_SECONDS):
            ray_names.remove_group(name.group(self._spec.cluster))
            free = ray.available_resources()
            raise PlacementError(
                f"{name.replica_id} needs {model.ranks} x {_words(share)} "
                f"{'on one node' if model.pp == 1 else ''} but Ray has free: {_words(free)}; "
                "lower --replicas, --tp or --pp, or add nodes".replace("  ", " ")
            )
        threads = model.cpu_threads or self._threads_per_rank(place)
        config = self._config(name, model, threads)
        actor_class = ray.remote(RankActor)
        group = _Group([], [], [])
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
                scheduling_strategy=PlacementGroupSchedulingStrategy(place, rank),
                runtime_env={"env_vars": self._rank_environment(threads)},
            )
            group.actors.append(options.remote(config, rank, self._replica_class))
        try:
            facts = await asyncio.gather(*(actor.facts.remote() for actor in group.actors))
        except ray.exceptions.RayError as error:
            raise StartFailedError(f"a rank of {name.replica_id} could not be created: {error}", final=False) from error
        group.pids = [pid for pid, _ in facts]
        here = str(ray.util.get_node_ip_address())
        processes = [ProcessId.of(pid) for pid, node in facts if node == here]
        group.processes = [process for process in processes if process is not None]
        return [RankFacts(rank, pid, node) for rank, (pid, node) in enumerate(facts)]

    async def start(self, name: ReplicaName) -> ReplicaStarted:
        """See ReplicaDriver. Rank 0 speaks for the replica; the first error of any rank ends the start."""
        group = self._groups[name]
        calls = [asyncio.ensure_future(self._start_rank(name, rank)) for rank in range(len(group.actors))]
        try:
            return (await asyncio.gather(*calls))[0]
        finally:
            for call in calls:
                call.cancel()

    async def _start_rank(self, name: ReplicaName, rank: int) -> ReplicaStarted:
        group = self._groups[name]
        try:
            encoded = await group.actors[rank].start.remote()
        except ray.exceptions.RayActorError as error:
            raise StartFailedError(
                f"{_rank(name, rank, group)} was killed while it started; if memory is short, lower --kv-cache-memory, "
                "--replicas, or take a smaller model",
                final=False,
            ) from error
        except ray.exceptions.RayError as error:
            raise StartFailedError(f"{_rank(name, rank, group)} failed to start: {error}", final=False) from error
        outcome = msgspec.msgpack.decode(encoded, type=StartOutcome)
        if outcome.started is None:
            raise StartFailedError(outcome.error, final=outcome.final)
        return outcome.started

    async def progress(self, name: ReplicaName) -> Progress | None:
        """See ReplicaDriver."""
        group = self._groups.get(name)
        if group is None or not group.actors:
            return None
        try:
            async with asyncio.timeout(2):
                reports = await asyncio.gather(*(actor.progress.remote() for actor in group.actors))
        except (TimeoutError, ray.exceptions.RayError):
            return None
        return Progress(*min(reports, key=lambda report: report[1]))

    async def died(self, name: ReplicaName) -> str:
        """See ReplicaDriver."""
        group = self._groups[name]
        waits = [asyncio.ensure_future(self._rank_died(name, rank)) for rank in range(len(group.actors))]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for wait in waits:
                wait.cancel()

    async def _rank_died(self, name: ReplicaName, rank: int) -> str:
        group = self._groups[name]
        try:
            return f"{_rank(name, rank, group)} ended: {await group.actors[rank].wait.remote()}"
        except ray.exceptions.RayError:
            return f"{_rank(name, rank, group)} was killed"

    async def drain(self, name: ReplicaName) -> None:
        """See ReplicaDriver."""
        group = self._groups.get(name)
        if group is not None:
            await self._call_all(group, "drain")

    async def stop(self, name: ReplicaName) -> None:
        """See ReplicaDriver."""
        group = self._groups.pop(name, None)
        if group is not None:
            await self._call_all(group, "stop")
            for rank in range(len(group.actors)):
                ray_names.kill_actor(name.rank(rank), self._spec.cluster)
            for process in group.processes:
                process.signal(signal.SIGKILL)  # a stopped process does not hear Ray
        ray_names.remove_group(name.group(self._spec.cluster))

    async def _call_all(self, group: _Group, method: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                calls = (getattr(actor, method).remote() for actor in group.actors)
                await asyncio.gather(*calls, return_exceptions=True)  # a dead rank has nothing left to stop

    # -- what a rank gets -------------------------------------------------------------------------------------

    def _gpus_per_rank(self, model: ModelSpec) -> int:
        if model.device == "cpu":
            return 0
        have = int(ray.cluster_resources().get("GPU", 0))
        if have == 0 and model.device == "auto":
            return 0
        need = sum(entry.replicas * entry.ranks for entry in self._spec.models if entry.device != "cpu")
        if need > have:
            raise PlacementError(
                f"{need} GPUs are needed ({model.name}: {model.replicas} replicas x {model.ranks} ranks), but Ray has "
                f"{have}; lower --replicas, --tp or --pp, or pass --device cpu"
            )
        return 1

    def _threads_per_rank(self, place: Any) -> int:
        """Cores of the node, shared among the ranks that this spec puts on it."""
        nodes = {node["NodeID"]: node["Resources"].get("CPU", 1.0) for node in ray.nodes() if node["Alive"]}
        homes = placement_group_table(place).get("bundles_to_node_id", {}).values()
        cores = min((nodes.get(home, 1.0) for home in homes), default=1.0)
        ranks = sum(model.replicas * model.ranks for model in self._spec.models)
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

    def _config(self, name: ReplicaName, model: ModelSpec, threads: int) -> bytes:
        source = Path(model.source).expanduser()
        config = ReplicaConfig(
            replica_id=name.replica_id,
            generation=name.generation,
            model=model.name,
            # Ranks run in another folder.
            source=str(source.resolve()) if source.exists() else model.source,
            revision=model.revision,
            tp=model.tp,
            pp=model.pp,
            device=model.device,
            dtype=model.dtype,
            load_format=model.load_format,
            max_model_len=model.max_model_len,
            kv_cache_memory=model.kv_cache_memory,
            block_size=model.block_size,
            max_num_seqs=model.max_num_seqs,
            max_num_batched_tokens=model.max_num_batched_tokens,
            max_waiting=model.max_waiting,
            cpu_threads=threads,
            host=self._host,
            secret=self._secret,
            trust_remote_code=model.trust_remote_code,
        )
        return msgspec.msgpack.encode(config)


def _rank(name: ReplicaName, rank: int, group: _Group) -> str:
    pid = f" (process {group.pids[rank]})" if rank < len(group.pids) else ""
    return f"rank {rank} of {name.replica_id}{pid}"


def _words(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources[key]:g} {key}" for key in ("CPU", "GPU") if key in resources) or "nothing"
