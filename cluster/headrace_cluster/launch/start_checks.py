"""Checks before Ray starts that report within seconds an error that would otherwise appear after a minute.

    exposure, keys ─▶ model files ─▶ headers, resources of this machine ─▶ ports ─▶ architecture
                                     without torch                                  with torch, in a child process

In a joined Ray ranks may run on other machines: they make the checks that depend on the machine.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace_cluster.core.placement import (
    PROCESS_BYTES,
    MemoryNeed,
    check_cpus,
    check_memory,
    excess_threads,
    gpus_per_rank,
    oversubscription,
)
from headrace_cluster.core.rank_config import replica_config
from headrace_cluster.errors import ReplicaFailedError
from headrace_cluster.launch.address_checks import check_keys, check_ports, check_tls
from headrace_cluster.launch.preflight import Preflight
from headrace_cluster.local.machine import Machine, this_machine
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_cluster.spec.pools import Pool
from headrace_proto.errors import HeadraceError
from headrace_worker.comm.interface import address_on
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.kv.sizing import DEFAULT_MAX_NUM_SEQS, gpu_headroom, request_limit, size_kv
from headrace_worker.device.dtypes import ELEMENT_BYTES, dtype_name
from headrace_worker.model.facts import read_template
from headrace_worker.model.footprint import Footprint
from headrace_worker.model.headers import check_length, gguf_footprint, read_headers
from headrace_worker.model.source import HubUnreachableError, ModelSource, hub_commit, is_here, resolve

_NO_LIMIT = 1 << 62  # bytes
# Settings that change neither weights nor the layout of the cache.
_UNRELATED = {
    "async_scheduling",
    "chat_template",
    "cpu_threads",
    "cuda_graphs",
    "defaults",
    "kv_cache_memory",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_waiting",
    "rank_interface",
    "reasoning_parser",
    "tool_parser",
}


def check_start(
    spec: ClusterSpec, report: Callable[[str], None], warn: Callable[[str], None], *, with_router: bool
) -> ClusterSpec:
    """The spec with commits as revisions of the Hub's models: every rank loads these, also when it is repaired.

    Raises a HeadraceError. `report` receives the stage, `warn` sentences about problems that allow a start.
    """
    report("checking its files")
    check_tls(spec)
    if with_router:
        check_keys(spec)
    machine = this_machine() if spec.ray.address is None else None
    if machine is not None:
        check_cpus(spec.models, machine.cores)
        for model in spec.models:
            if model.rank_interface:
                address_on(model.rank_interface)
            if model.chat_template is not None:
                read_template(Path(model.chat_template).expanduser())
    located = [_locate(spec, model, warn) for model in spec.models]
    spec = spec.model_copy(update={"models": tuple(model for model, _ in located)})
    builds = [build for model, source in located if source for build in _builds(spec, model, source, machine)]
    checked = [build for build in builds if not build.is_plain]
    # Closed after an interrupt, too: it has a child process.
    with contextlib.closing(Preflight([(build.config, build.source.revision) for build in checked])) as preflight:
        read = [_read_headers(spec, build) for build in builds]
        needs = [need for need, _ in read]
        on_cpu = {need.model.name: need for build, need in zip(builds, needs, strict=True) if build.is_on_cpu}
        if machine is not None:
            check_memory(list(on_cpu.values()), machine.memory)
        check_ports(spec, with_router=with_router)
        if checked:
            report("checking its architecture")
        answers = iter(preflight.finish())
        footprints = [
            plain if build.is_plain else next(answers) for build, (_, plain) in zip(builds, read, strict=True)
        ]
    for build, need, footprint in zip(builds, needs, footprints, strict=True):
        if footprint is not None:
            with _prefix_errors(spec, build.model):
                build.check_cache(need, footprint, machine)
    if machine is None:
        return spec
    computing = [need.model for need in on_cpu.values()]
    threads = [excess_threads(model, machine.cores) for model in computing]
    for excess in (oversubscription(computing, machine.cores), *threads):
        if excess is not None:
            warn(excess)
    return spec


def _locate(spec: ClusterSpec, model: ModelSpec, warn: Callable[[str], None]) -> tuple[ModelSpec, ModelSource | None]:
    """The model with its commit, since a branch or tag may move while ranks are started, and its files.

    Without files in a joined Ray: this machine may run no rank, and downloads nothing for those that do.
    """
    with _prefix_errors(spec, model):
        if spec.ray.address is not None and not is_here(model.source):
            source = commit = None
            try:
                commit = hub_commit(model.source, model.revision)
            except HubUnreachableError as error:
                warn(f"{error} A cluster that runs keeps its commit; new ranks load what their node has in its cache.")
        else:
            source = resolve(model.source, model.load_format, model.revision)
            commit = source.commit
    return (model if commit is None else model.model_copy(update={"revision": commit})), source


def _builds(spec: ClusterSpec, model: ModelSpec, source: ModelSource, machine: Machine | None) -> "list[_Build]":
    with _prefix_errors(spec, model):
        device = model.device
        if machine is not None and machine.gpus is not None:
            device = "cuda" if gpus_per_rank(spec.models, model, machine.gpus, "this machine") else "cpu"
        shapes = {(pool.tp, pool.pp): pool for pool in model.pools}
        return [_Build(model, source, pool, device) for pool in shapes.values()]


def _read_headers(spec: ClusterSpec, build: "_Build") -> tuple[MemoryNeed, Footprint | None]:
    with _prefix_errors(spec, build.model):
        return build.read_headers()


@contextlib.contextmanager
def _prefix_errors(spec: ClusterSpec, model: ModelSpec) -> Iterator[None]:
    """With several models, prefixes the sentence of an error with the model's name."""
    try:
        yield
    except HeadraceError as error:
        if len(spec.models) == 1:
            raise
        raise ReplicaFailedError(f"{model.name}: {error}") from error


class _Build:
    """One shape of one model."""

    def __init__(self, model: ModelSpec, source: ModelSource, pool: Pool, device: str) -> None:
        """`device`: cpu, cuda, or auto if it depends on unknown machines."""
        self.model = model
        self.source = source
        self.pool = pool
        # If it is unknown, the device with the smaller sizes.
        self.config = _config(model, pool, "cuda" if device == "auto" else device)
        self.is_placed = device != "auto"
        self.element_bytes = ELEMENT_BYTES[dtype_name(model.dtype, self.config.device, model.deterministic)]

    @property
    def is_plain(self) -> bool:
        """Whether it is the embedded model in one rank: its headers are sufficient."""
        return self.source.embedded and self.pool.tp * self.pool.pp == 1

    @property
    def is_on_cpu(self) -> bool:
        return self.config.device == "cpu"

    def read_headers(self) -> tuple[MemoryNeed, Footprint | None]:
        """Without torch; a footprint if the build is plain."""
        headers = read_headers(self.source)
        check_length(self.config, headers)
        need = MemoryNeed(self.model, headers.weight_bytes(self.config, self.element_bytes))
        return need, gguf_footprint(self.config, headers, self.element_bytes) if self.is_plain else None

    def check_cache(self, need: MemoryNeed, footprint: Footprint, machine: Machine | None) -> None:
        """Whether one request fits into the KV cache of a rank. Raises MemoryTooSmallError, ModelUnsupportedError."""
        size_kv(
            footprint.layout,
            device_type=self.config.device,
            max_num_seqs=self.model.max_num_seqs or DEFAULT_MAX_NUM_SEQS,
            max_model_len=request_limit(self.model.max_model_len, footprint.max_positions),
            kv_cache_memory=self.model.kv_cache_memory,
            headroom=gpu_headroom(machine.gpu_memory) if machine is not None and self.is_placed else 0,
            free=self._free(need, footprint, machine),
        )

    def _free(self, need: MemoryNeed, footprint: Footprint, machine: Machine | None) -> int:
        """The most bytes for one rank's cache once the replica is loaded."""
        if machine is None or not self.is_placed:
            return _NO_LIMIT
        if self.config.device == "cuda":
            return machine.gpu_memory - footprint.weight_bytes if machine.gpu_memory else _NO_LIMIT
        ranks = self.pool.tp * self.pool.pp
        return max(0, machine.memory - need.weights - ranks * PROCESS_BYTES) // ranks


def _config(model: ModelSpec, pool: Pool, device: str) -> ReplicaConfig:
    """What decides how a rank is built: a footprint that was kept is found by it."""
    return replica_config(model.shaped(pool), leave_out=_UNRELATED, replica_id="", device=device)
