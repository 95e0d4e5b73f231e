"""Runs ranks as Ray actors: a placement group per build with a bundle per stage, a named detached actor per rank."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import ray
import ray.util
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace_base.cluster_member import ClusterSecret
from headrace_base.logs import LogConfig
from headrace_cluster.core import naming
from headrace_cluster.core.actions import Seen
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.placement import rank_gpus, threads_per_rank, waiting_sentence
from headrace_cluster.core.rank_config import (
    REPLICA_CLASS,
    ProfileOutcome,
    RankReport,
    Stage,
    config_digest,
    replica_config,
)
from headrace_cluster.local.processes import ProcessId
from headrace_cluster.local.run_logs import rank_log_path
from headrace_cluster.ray import names as ray_names
from headrace_cluster.ray import private
from headrace_cluster.ray.calls import RayCalls
from headrace_cluster.ray.rank_actor import RankActor
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_proto.role import Role
from headrace_worker.core.config import ReplicaConfig

REPORT_SECONDS = 20.0  # longest wait of one call for another report; then the call is repeated
STARTING_SECONDS = 0.2  # between two reports of a start, whose progress changes often
UNAVAILABLE_SECONDS = 0.1  # until a rank that could not be reached is asked again: Ray may know its end a moment later

NODE_LABEL = "ray.io/node-id"
SPREAD_SECONDS = 1  # for a place on a node without a replica of the model
_VERSION = version("headrace")
_CALLS = 8  # calls to a rank at a time: a report that is waited for, a profile, and short calls
# Other errors of Ray do not show that a rank has ended.
_KILLED = (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError, ray.exceptions.ActorPlacementGroupRemoved)


class RayDriver:
    """A `RankDriver` on the Ray that this process is connected to."""

    def __init__(
        self,
        spec: ClusterSpec,
        secret: ClusterSecret,
        calls: RayCalls,
        host: str,
        replica_class: str = REPLICA_CLASS,
        log_folder: str = "",
    ) -> None:
        self.spec = spec
        self._secret = secret
        self._calls = calls
        self._host = host
        self._replica_class = replica_class
        self._log_folder = log_folder
        self._on_gpus: set[str] = set()  # models with a replica on GPUs
        self._actors: dict[tuple[ReplicaName, int], Any] = {}  # handles
        self._processes: dict[tuple[ReplicaName, int], ProcessId] = {}  # ranks on this node

    def digest(self, replica_id: str, model: ModelSpec, roll: int) -> bytes:
        return config_digest(self._config(ReplicaName(replica_id, 0), model, Role.BOTH, 0), roll, _VERSION)

    async def look(self) -> Seen:
        seen, found = await self._calls.run(self._find, set(self._actors))
        self._actors |= found
        return seen

    def _find(self, known: set[tuple[ReplicaName, int]]) -> tuple[Seen, dict[tuple[ReplicaName, int], Any]]:
        """With the handles of ranks that are not known."""
        cluster = self.spec.cluster
        ranks = ray_names.ranks(cluster)
        handles = {key: ray_names.find_actor(key[0].rank(key[1]), cluster) for key in ranks - known}
        found = {key: actor for key, actor in handles.items() if actor is not None}
        return Seen(ray_names.groups(cluster), ranks & (known | found.keys()), _draining()), found

    async def place(self, name: ReplicaName, model: ModelSpec) -> None:
        """The placement group waits in Ray, where an autoscaler sees what is needed."""
        # A lost node is to take as few replicas of a model as possible: first where there is none, then anywhere.
        if await self._calls.run(self._place_apart, name, model):
            ends = time.monotonic() + SPREAD_SECONDS
            while time.monotonic() < ends:
                await asyncio.sleep(SPREAD_SECONDS / 10)
                if (await self._calls.run(ray_names.groups, self.spec.cluster)).get(name):
                    return
        await self._calls.run(ray_names.remove_group, name.group(self.spec.cluster))
        await self._calls.run(self._request, name, model, {})

    def _place_apart(self, name: ReplicaName, model: ModelSpec) -> bool:
        """Whether a place was requested on a node without another replica of the model; such a node is there.

        The build that this one replaces does not count, since it leaves.
        """
        used = ray_names.nodes_of(self.spec.cluster, model.name, name.replica_id) | private.draining_nodes().keys()
        if not used or not any(self._fits(node, model) for node in ray.nodes() if node["NodeID"] not in used):
            return False
        self._request(name, model, {NODE_LABEL: f"!in({', '.join(sorted(used))})"})
        return True

    def _fits(self, node: dict[str, Any], model: ModelSpec) -> bool:
        """Whether a stage of the model could have a place there. Of labels only plain values are compared."""
        labels = {key: value for key, value in model.node_labels.items() if value[:1] != "!" and value[:3] != "in("}
        stage = self._stage(model)
        return (
            node["Alive"]
            and all(node["Resources"].get(kind, 0) >= amount for kind, amount in stage.items())
            and all(node["Labels"].get(key) == value for key, value in labels.items())
        )

    def _stage(self, model: ModelSpec) -> dict[str, float]:
        """A bundle is a stage, on one node, since its ranks communicate in every layer. Stages may span nodes."""
        share = {"CPU": model.cpu_share} | ({"GPU": 1} if self._uses_gpus(model) else {})
        return {kind: amount * model.tp for kind, amount in share.items()}

    def _request(self, name: ReplicaName, model: ModelSpec, labels: dict[str, str]) -> None:
        if name in ray_names.groups(self.spec.cluster):
            return
        selector = dict(model.node_labels) | labels
        placement_group(
            [self._stage(model)] * model.pp,
            strategy="PACK",
            name=name.group(self.spec.cluster),
            lifetime="detached",
            bundle_label_selector=[selector] * model.pp if selector else None,
        )

    async def waiting_reason(self, model: ModelSpec) -> str:
        return await self._calls.run(
            lambda: waiting_sentence(model, int(self._uses_gpus(model)), ray.available_resources())
        )

    def _uses_gpus(self, model: ModelSpec) -> bool:
        """With the device `auto`, a model that once ran on GPUs waits for one: a node of them may be lost."""
        have = int(ray.cluster_resources().get("GPU", 0))
        if rank_gpus(model, have or (model.name in self._on_gpus)):
            self._on_gpus.add(model.name)
        return model.name in self._on_gpus

    async def fill(self, name: ReplicaName, model: ModelSpec, role: Role, digest: bytes) -> None:
        """Each rank is a call of its own: there may be many."""
        place, threads = await self._calls.run(self._prepare, name, model)
        config = msgspec.msgpack.encode(self._config(name, model, role, threads))
        space, gpus = naming.namespace(self.spec.cluster), int(model.name in self._on_gpus)
        actor_class = ray.remote(RankActor)

        def create(rank: int) -> Any:
            options = actor_class.options(
                name=name.rank(rank),
                namespace=space,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=model.cpu_share,
                num_gpus=gpus,
                max_restarts=0,
                max_concurrency=_CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(place, rank // model.tp),
                runtime_env={"env_vars": _rank_environment()},
            )
            return options.remote(config, rank, digest, space, self._replica_class, self._logs(name, rank))

        for rank in range(model.ranks):
            self._actors[name, rank] = await self._calls.run(create, rank)

    def _prepare(self, name: ReplicaName, model: ModelSpec) -> tuple[Any, int]:
        """The placement group, and the threads of a rank."""
        place = get_placement_group(name.group(self.spec.cluster))
        if model.cpu_threads is not None:
            return place, model.cpu_threads
        cores = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]}
        placed = placement_group_table(place).get("bundles_to_node_id", {}).values()
        ranks = sum(pool.ranks for each in self.spec.models for pool in each.pools)
        return place, threads_per_rank(cores, placed, ranks)

    async def watch(self, name: ReplicaName, rank: int, receive: Callable[[RankReport], None]) -> None:
        actor, seen = self._actors[name, rank], -1
        while True:
            try:
                encoded = await actor.report.remote(seen, REPORT_SECONDS)
            except ray.exceptions.ActorUnavailableError:  # the network, or Ray's GCS: the rank may be alive
                await asyncio.sleep(UNAVAILABLE_SECONDS)
                continue
            except _KILLED:
                return
            report = msgspec.msgpack.decode(encoded, type=RankReport)
            if seen < 0 and report.node == str(ray.util.get_node_ip_address()):
                process = ProcessId.of(report.pid)
                self._processes |= {(name, rank): process} if process is not None else {}
            if report.gpus:
                self._on_gpus.add(report.model)
            seen = report.version
            receive(report)
            if report.stage is Stage.STARTING:
                await asyncio.sleep(STARTING_SECONDS)

    async def send_secret(self, name: ReplicaName, rank: int) -> None:
        await self._check_lease()
        await self._actors[name, rank].set_secret.remote(self._secret.values)

    async def set_role(self, name: ReplicaName, role: Role) -> None:
        """Rank 0 represents the replica."""
        await self._check_lease()
        await self._actors[name, 0].set_role.remote(str(role))

    async def drain(self, name: ReplicaName, seconds: float) -> None:
        """A rank that has ended has no requests."""
        await self._check_lease()
        calls = [actor.drain.remote(seconds) for actor in self._of(name)]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            unavailable = isinstance(error, ray.exceptions.ActorUnavailableError)
            if isinstance(error, BaseException) and (unavailable or not isinstance(error, _KILLED)):
                raise error

    async def profile(self, name: ReplicaName, steps: int, seconds: float) -> list[ProfileOutcome]:
        return await asyncio.gather(*(_profile(actor, steps, seconds) for actor in self._of(name)))

    async def end(self, name: ReplicaName, seconds: float) -> None:
        await self._check_lease()
        calls = [asyncio.ensure_future(_stop(actor)) for actor in self._of(name)]
        if calls:
            _, late = await asyncio.wait(calls, timeout=seconds)
            for call in late:
                call.cancel()
        for key in [key for key in self._actors if key[0] == name]:
            await self._calls.run(ray_names.kill_actor, name.rank(key[1]), self.spec.cluster)
            if (process := self._processes.get(key)) is not None:
                process.signal(signal.SIGKILL)  # a stopped process does not handle Ray's request
        await self._calls.run(ray_names.remove_group, name.group(self.spec.cluster))
        for key in [key for key in self._actors if key[0] == name]:
            del self._actors[key]
            self._processes.pop(key, None)

    async def _check_lease(self) -> None:
        """Before calls that go to ranks directly: another controller may act by now. Raises as RayCalls.run."""
        await self._calls.run(lambda: None)

    def _of(self, name: ReplicaName) -> list[Any]:
        """Handles of a build's ranks, in order."""
        return [actor for key, actor in sorted(self._actors.items(), key=lambda item: item[0]) if key[0] == name]

    # -- configuration of a rank ------------------------------------------------------------------------------

    def _logs(self, name: ReplicaName, rank: int) -> bytes:
        """An encoded LogConfig. Generations of a replica append to the same file; without a folder they use stderr."""
        path = str(rank_log_path(Path(self._log_folder), name.replica_id, rank)) if self._log_folder else ""
        logs = LogConfig(f"rank {rank}", name.replica_id, path, self.spec.logs.format)
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
            internal_tls=self.spec.internal.tls_files,
        )


def _absolute(path: str) -> str:
    """A path that exists here, for ranks, which have another working directory; others unchanged."""
    found = Path(path).expanduser()
    return str(found.resolve()) if found.exists() else path


def _draining() -> dict[str, float]:
    """Addresses of the nodes that Ray drains, and the seconds that they have. Without a deadline they have an hour."""
    ends = private.draining_nodes()
    if not ends:
        return {}
    addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
    now = time.time()
    return {addresses[node]: at / 1e3 - now if at else 3600.0 for node, at in ends.items() if node in addresses}


def _rank_environment() -> dict[str, str]:
    """Variables that libraries read when they load.

    A rank's thread of steps sets its own number of threads; all other threads compute alone. By default waiting threads
    of OpenMP spin for milliseconds, which blocks the router and other ranks on a shared machine; a short spin keeps
    most of its gain. The operator's own setting has precedence.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    waiting = {name: os.environ[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in os.environ}
    return threads | {"TOKENIZERS_PARALLELISM": "false"} | (waiting or {"GOMP_SPINCOUNT": "2000"})


async def _stop(actor: Any) -> None:
    """A dead rank has nothing to stop."""
    with contextlib.suppress(ray.exceptions.RayError):
        await actor.stop.remote()


async def _profile(actor: Any, steps: int, seconds: float) -> ProfileOutcome:
    try:
        encoded = await actor.profile.remote(steps, seconds)
    except ray.exceptions.RayError:
        return ProfileOutcome(error="the rank was killed while it was profiled")
    return msgspec.msgpack.decode(encoded, type=ProfileOutcome)
