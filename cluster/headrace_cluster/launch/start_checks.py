"""Checks before Ray starts, within two seconds and without torch: addresses, keys, files and their headers, memory."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace_cluster.core.placement import (
    MemoryNeed,
    check_cpus,
    check_memory,
    excess_threads,
    gpus_per_rank,
    oversubscription,
)
from headrace_cluster.core.rank_config import replica_config
from headrace_cluster.errors import ReplicaFailedError
from headrace_cluster.local import state
from headrace_cluster.local.ports import free_port_after, is_taken
from headrace_cluster.local.state import ServeState, describe
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.model_spec import ModelSpec, Pool
from headrace_proto.cluster_member import SecretFile
from headrace_proto.errors import HeadraceError, ListenError
from headrace_router.access.auth import check_exposure, check_metrics_exposure
from headrace_router.access.tls_files import check_tls_files, load_tls_files
from headrace_worker.comm.interface import address_on
from headrace_worker.device.dtypes import ELEMENT_BYTES, dtype_name
from headrace_worker.device.memory import available_cores, available_memory
from headrace_worker.model.facts import read_template
from headrace_worker.model.headers import check_length, read_headers
from headrace_worker.model.source import HubUnreachableError, ModelSource, hub_commit, is_here, resolve

# AMD's, and NVIDIA's where the bindings are missing: Ray and torch can use them, but they are not counted here.
_UNCOUNTED_GPUS = (Path("/dev/kfd"), Path("/dev/nvidiactl"))


@dataclass(frozen=True, slots=True)
class Machine:
    """Limits of the ranks that are placed here."""

    cores: int
    memory: int  # bytes that are free
    gpus: int | None  # as Ray counts them; None: unknown


def this_machine() -> Machine:
    """Takes milliseconds."""
    return Machine(available_cores(), available_memory(), _gpu_count(_nvidia_count()))


def _gpu_count(found: int) -> int | None:
    """As Ray counts them; None when GPUs are here that were not found."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "NoDevFiles"):
        return 0
    if not found and any(path.exists() for path in _UNCOUNTED_GPUS):
        return None
    return found if visible is None else min(found, len(visible.split(",")))


def _nvidia_count() -> int:
    """GPUs that the driver's management library (NVML) lists; 0 without it or its bindings."""
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()


@dataclass(frozen=True, slots=True)
class Address:
    """The address of one flag: `count` consecutive ports from `port` on."""

    flag: str
    host: str
    port: int  # 0 = any free one
    count: int = 1

    @property
    def ports(self) -> range:
        return range(self.port, self.port + self.count) if self.port else range(0)


def check_tls(spec: ClusterSpec) -> None:
    """Whether the files of TLS can be used. Raises TlsFileError, PrivateFileError."""
    if spec.tls.enabled:
        check_tls_files(spec.tls, load_tls_files(spec.tls))


def check_secrets(spec: ClusterSpec) -> None:
    """Whether the files of the controller's secrets can be used. Raises SecretFileError, PrivateFileError."""
    if spec.control.secret_file is not None:
        SecretFile(spec.control.secret_file)
    if spec.admin.key_file is not None:
        SecretFile(spec.admin.key_file, "the admin key file")


def check_keys(spec: ClusterSpec) -> None:
    """Whether routers may listen on their interface, and can read their keys. Raises a HeadraceError."""
    check_exposure(spec.routers.host, spec.auth)
    check_metrics_exposure(spec.metrics_host, spec.auth, no_auth=spec.routers.metrics_no_auth)
    spec.auth.load_all()


def check_ports(spec: ClusterSpec, *, with_router: bool) -> None:
    """Raises one ListenError for all ports in use, with a free port for each of their flags."""
    addresses = _addresses(spec, with_router=with_router)
    taken = {(each, port): None for each in addresses for port in each.ports if is_taken(each.host, port, each.flag)}
    if not taken:
        return
    others = [server for server in state.running() if server.pid != os.getpid()]
    used: dict[tuple[str, str], list[int]] = {}  # by host and what uses them
    for address, port in taken:
        used.setdefault((address.host, _user(port, others)), []).append(port)
    parts = " and ".join(_in_use(host, by, ports) for (host, by), ports in used.items())
    moved = list(dict.fromkeys(address for address, _ in taken))
    flags = " and ".join(address.flag for address in moved)
    if spec.routers.metrics_port is None and "--admin-port" in flags:  # by default they follow the admin port
        moved += [each for each in addresses if each.flag == "--metrics-port" and each not in moved]
    raise ListenError(
        f"{parts}; choose {'another' if len(taken) == 1 else 'others'} with {flags}: "
        f"add {_free_flags(addresses, moved, others)}"
    )


def _addresses(spec: ClusterSpec, *, with_router: bool) -> list[Address]:
    admin = Address("--admin-port", spec.admin.host, spec.admin.port)
    if not with_router:
        return [admin]
    routers, metrics = spec.routers, spec.metrics_ports
    own = [Address("--metrics-port", spec.metrics_host, metrics[0], len(metrics))] if metrics else []
    return [
        Address("--port", routers.host, routers.port),
        Address("--grpc-port", routers.host, routers.grpc_port),
        admin,
        *own,
    ]


def _user(port: int, servers: Sequence[ServeState]) -> str:
    """' by headrace (…)' for a server of this user; servers that are starting come last: they may not listen yet."""
    known = sorted((server for server in servers if port in server.ports), key=lambda server: server.starting)
    return f" by {describe(known[0])}" if known else ""


def _in_use(host: str, by: str, ports: Sequence[int]) -> str:
    if len(ports) == 1:
        return f"port {ports[0]} on {host} is in use{by}"
    return f"ports {', '.join(map(str, ports[:-1]))} and {ports[-1]} on {host} are in use{by}"


def _free_flags(addresses: Sequence[Address], moved: Sequence[Address], others: Sequence[ServeState]) -> str:
    """'--grpc-port 9001 --admin-port 9002': the next free ports above the HTTP port, else above the first in use."""
    avoid = {port for address in addresses for port in address.ports} | {port for each in others for port in each.ports}
    after = next((address.port for address in addresses if address.flag == "--port" and address.port), moved[0].port)
    flags: list[str] = []
    for address in addresses:
        if address in moved:
            first = free_port_after(address.host, after, address.count, avoid)
            avoid.update(range(first, first + address.count))
            flags.append(f"{address.flag} {first}")
    return " ".join(flags)


def check_start(
    spec: ClusterSpec, report: Callable[[str], None], warn: Callable[[str], None], *, with_router: bool
) -> ClusterSpec:
    """The spec with commits as revisions of the Hub's models: every rank loads these, also when it is repaired.

    Raises a HeadraceError. `report` receives the stage, `warn` sentences about problems that allow a start.
    """
    report("checking its files")
    check_tls(spec)
    check_secrets(spec)
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
    spec, needs = check_models(spec, warn, machine)
    check_ports(spec, with_router=with_router)
    if machine is None:
        return spec
    check_memory(list(needs.values()), machine.memory)
    computing = [need.model for need in needs.values()]
    threads = [excess_threads(model, machine.cores) for model in computing]
    for excess in (oversubscription(computing, machine.cores), *threads):
        if excess is not None:
            warn(excess)
    return spec


def check_models(
    spec: ClusterSpec, warn: Callable[[str], None], machine: Machine | None = None
) -> tuple[ClusterSpec, dict[str, MemoryNeed]]:
    """The spec with commits, and what models need of this machine's memory, by name. machine: None = a Ray of others.

    Raises a HeadraceError.
    """
    located = [_locate(spec, model, warn) for model in spec.models]
    spec = spec.model_copy(update={"models": tuple(model for model, _ in located)})
    return spec, {
        model.name: need
        for model, source in located
        if source is not None
        for pool in {(pool.tp, pool.pp): pool for pool in model.pools}.values()
        if (need := _check_headers(spec, model, source, pool, machine)) is not None
    }


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


def _check_headers(
    spec: ClusterSpec, model: ModelSpec, source: ModelSource, pool: Pool, machine: Machine | None
) -> MemoryNeed | None:
    """What the model needs of this machine's memory; None for GPUs, and where the machine is unknown."""
    with _prefix_errors(spec, model):
        device = model.device if model.device != "auto" else "cuda"  # if unknown, the one with the smaller sizes
        if machine is not None and machine.gpus is not None:
            device = "cuda" if gpus_per_rank(spec.models, model, machine.gpus, "this machine") else "cpu"
        config = replica_config(model.shaped(pool), replica_id="", device=device)
        headers = read_headers(source)
        check_length(config, headers)
        element_bytes = ELEMENT_BYTES[dtype_name(model.dtype, device, model.deterministic)]
        return MemoryNeed(model, headers.weight_bytes(config, element_bytes)) if device == "cpu" else None


@contextlib.contextmanager
def _prefix_errors(spec: ClusterSpec, model: ModelSpec) -> Iterator[None]:
    """With several models, prefixes the sentence of an error with the model's name."""
    try:
        yield
    except HeadraceError as error:
        if len(spec.models) == 1:
            raise
        raise ReplicaFailedError(f"{model.name}: {error}") from error
