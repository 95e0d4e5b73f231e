"""Checks before Ray starts, within two seconds and without torch: addresses, keys, files and their headers, memory.

All else is for the ranks, whose error ends the start with a sentence. In a joined Ray ranks may run on other machines:
they make the checks that depend on the machine.
"""

import contextlib
from collections.abc import Callable, Iterator
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
from headrace_cluster.launch.address_checks import check_keys, check_ports, check_secrets, check_tls
from headrace_cluster.local.machine import Machine, this_machine
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_cluster.spec.pools import Pool
from headrace_proto.errors import HeadraceError
from headrace_worker.comm.interface import address_on
from headrace_worker.device.dtypes import ELEMENT_BYTES, dtype_name
from headrace_worker.model.facts import read_template
from headrace_worker.model.headers import check_length, read_headers
from headrace_worker.model.source import HubUnreachableError, ModelSource, hub_commit, is_here, resolve


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
