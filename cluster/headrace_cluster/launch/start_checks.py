"""Checks before Ray starts, within two seconds and without torch: keys, files and their headers, GPUs, memory."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace_base.cluster_member import SecretFile
from headrace_base.errors import HeadraceError
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
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.model_spec import ModelSpec, Pool
from headrace_router.access.auth import AuthConfig, check_exposure, check_metrics_exposure
from headrace_router.access.tls_files import check_tls_files, load_tls_files
from headrace_worker.device.dtypes import ELEMENT_BYTES, dtype_name
from headrace_worker.device.memory import available_cores, available_memory
from headrace_worker.model.chat_templates import read_template
from headrace_worker.model.headers import check_options, read_headers
from headrace_worker.model.source import HubUnreachableError, ModelSource, hub_commit, is_here, may_be_hub_id, resolve

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
    return Machine(available_cores(), available_memory(), _gpu_count())


def _gpu_count() -> int | None:
    """As Ray counts them: those that NVIDIA's library lists; None when GPUs are here that it does not list."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "NoDevFiles"):
        return 0
    try:
        import pynvml

        pynvml.nvmlInit()
        found = int(pynvml.nvmlDeviceGetCount())
    except Exception:  # no driver, or no bindings
        found = 0
    if not found and any(path.exists() for path in _UNCOUNTED_GPUS):
        return None
    return found if visible is None else min(found, len(visible.split(",")))


def check_files(spec: ClusterSpec, *, with_router: bool) -> None:
    """Whether files of TLS, secrets and keys can be used, and routers may listen on their interface.

    Raises a HeadraceError.
    """
    if spec.tls.enabled:
        check_tls_files(spec.tls, load_tls_files(spec.tls))
    if spec.control.secret_file is not None:
        SecretFile(spec.control.secret_file)
    if spec.admin.key_file is not None:
        SecretFile(spec.admin.key_file, "the admin key file")
    AuthConfig(metrics_key_file=spec.control.metrics_key_file).load_metrics()
    if with_router:
        check_exposure(spec.routers.host, spec.auth)
        check_metrics_exposure(spec.metrics_host, spec.auth, no_auth=spec.routers.metrics_no_auth)
        spec.auth.load_all()


def check_start(spec: ClusterSpec, warn: Callable[[str], None], *, with_router: bool) -> ClusterSpec:
    """The spec with commits as revisions of the Hub's models: every rank loads these, also when it is repaired.

    Raises a HeadraceError. `warn` receives sentences about problems that allow a start.
    """
    check_files(spec, with_router=with_router)
    machine = this_machine() if spec.ray.address is None else None
    if machine is not None:
        check_cpus(spec.models, machine.cores)
    spec, needs = check_models(spec, warn, machine)
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


def check_local(spec: ClusterSpec, warn: Callable[[str], None]) -> ClusterSpec:
    """The spec with commits, where every rank runs on this machine: a path that is not here is wrong.

    Raises a HeadraceError.
    """
    for model in spec.models:
        if not may_be_hub_id(model.source):
            with _prefix_errors(spec, model):
                resolve(model.source, model.load_format)
    return check_models(spec, warn)[0]


def check_room(spec: ClusterSpec) -> None:
    """Whether all ranks fit on this machine's CPUs and GPUs. Raises PlacementError."""
    machine = this_machine()
    check_cpus(spec.models, machine.cores)
    if machine.gpus is not None:
        for model in spec.models:
            gpus_per_rank(spec.models, model, machine.gpus, "this machine")


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
        config = replica_config(model.shaped(pool), replica_id="", device=device, role=pool.role)
        headers = read_headers(source, trust_remote_code=model.trust_remote_code)
        check_options(config, headers)
        if model.chat_template is not None and spec.ray.address is None:
            read_template(Path(model.chat_template).expanduser())
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
