"""Whether the spec fits the available GPUs, CPUs and memory. Pure: the available amounts are arguments."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from headrace_base.errors import counted, size_text
from headrace_cluster.errors import PlacementError
from headrace_cluster.spec.model_spec import ModelSpec

# Memory of a rank without weights and cache. Measured: 303 MiB of private memory (Python, torch, transformers).
PROCESS_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The least memory that the ranks of one model use on this machine. Bytes."""

    model: ModelSpec
    weights: int  # bytes per replica

    @property
    def replicas(self) -> int:
        return sum(pool.replicas for pool in self.model.pools)

    @property
    def ranks(self) -> int:
        return sum(pool.ranks for pool in self.model.pools)

    @property
    def total(self) -> int:
        memory = (self.model.kv_cache_memory or 0) + (self.model.kv_offload_memory or 0)
        return self.ranks * (PROCESS_BYTES + memory) + self.replicas * self.weights

    def summary(self) -> str:
        """The terms of the sum as text."""
        cache = self.model.kv_cache_memory
        process = f"{size_text(PROCESS_BYTES)} for the process"
        of_rank = f"{process} and {size_text(cache)} of KV cache" if cache else process
        if evicted := self.model.kv_offload_memory:
            of_rank = f"{of_rank} and {size_text(evicted)} for evicted blocks"
        ranks, replicas = counted(self.ranks, "rank"), counted(self.replicas, "replica")
        return f"{self.model.name}: {ranks} x {of_rank}, {replicas} x {size_text(self.weights)} of weights"


def gpus_per_rank(models: Sequence[ModelSpec], model: ModelSpec, have: int, owner: str) -> int:
    """GPUs per rank of `model`, out of `have` GPUs that `owner` has for all models.

    Raises PlacementError when there are too few.
    """
    if not rank_gpus(model, have):
        return 0
    need = sum(pool.ranks for entry in models if entry.device != "cpu" for pool in entry.pools)
    if need > have:
        parts = " and ".join(
            f"{counted(pool.replicas, 'replica')} x {counted(pool.tp * pool.pp, 'rank')}" for pool in model.pools
        )
        needed = "1 GPU is" if need == 1 else f"{need} GPUs are"
        raise PlacementError(
            f"{needed} needed ({model.name}: {parts}), but {owner} has {have or 'none'}; lower --replicas, --prefill, "
            "--decode, --tp or --pp, or pass --device cpu"
        )
    return 1


def rank_gpus(model: ModelSpec, have: int) -> int:
    """GPUs of one rank in a Ray that has so many: with the device `auto` none in a Ray without GPUs."""
    return 0 if model.device == "cpu" or (have == 0 and model.device == "auto") else 1


def waiting_sentence(model: ModelSpec, gpus: int, free: Mapping[str, float]) -> str:
    """Why a replica has no place yet. gpus: of each rank. free: CPUs and GPUs in all of Ray."""
    share = {"CPU": model.cpu_share} | ({"GPU": gpus} if gpus else {})
    has = {kind: free.get(kind, 0) for kind in share}
    together = f", each {model.tp} on one node" if model.tp > 1 else ""
    labels = ", ".join(f"{key}={value}" for key, value in model.node_labels.items())
    where = f", on nodes with the labels {labels}" if labels else ""
    on_all = ", on all nodes" if labels else ""
    return (
        f"waiting for a place: it needs {model.ranks} x {_resource_list(share)}{together}{where}, and Ray has free"
        f"{on_all}: {_resource_list(has)}; it starts when nodes are added or other replicas end"
    )


def _resource_list(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items())


def check_cpus(models: Sequence[ModelSpec], cores: int) -> None:
    """Raises PlacementError when ranks reserve more CPUs in Ray than the machine has."""
    share = sum(pool.ranks * model.cpu_share for model in models for pool in model.pools)
    if share > cores * (1 + 1e-9):
        raise PlacementError(
            f"the CPU shares of {counted(_ranks(models), 'rank')} add up to {share:g} CPUs, but this machine has "
            f"{cores}; lower --cpu-share, --replicas, --prefill, --decode, --tp or --pp"
        )


def check_memory(needs: Sequence[MemoryNeed], free: int) -> None:
    """Raises PlacementError when the ranks do not fit into `free` bytes together."""
    total = sum(need.total for need in needs)
    if total > free:
        raise PlacementError(
            f"the ranks need {size_text(total)} of memory at least ({'; '.join(need.summary() for need in needs)}), "
            f"but {size_text(free)} are free: {_advice(needs, total - free)}"
        )


def oversubscription(models: Sequence[ModelSpec], cores: int) -> str | None:
    """A sentence when more ranks compute on the CPU than there are cores; None otherwise."""
    ranks = _ranks(models)
    if ranks <= cores:
        return None
    return f"{ranks} ranks share {counted(cores, 'core')}: together they answer no faster than {cores} would"


def excess_threads(model: ModelSpec, cores: int) -> str | None:
    """A sentence when each rank on the CPU gets more threads than there are cores; None otherwise."""
    if model.cpu_threads is None or model.cpu_threads <= cores:
        return None
    return (
        f"{model.name}: {model.cpu_threads} threads of a rank share {counted(cores, 'core')}, which is slower than "
        f"{counted(cores, 'thread')}; lower --cpu-threads"
    )


def _ranks(models: Sequence[ModelSpec]) -> int:
    return sum(pool.ranks for model in models for pool in model.pools)


def _advice(needs: Sequence[MemoryNeed], excess: int) -> str:
    """The flag that makes the largest model small enough."""
    largest = max(needs, key=lambda need: need.total)
    model = largest.model
    spare = (model.kv_cache_memory or 0) - -(-excess // largest.ranks)
    if spare >= 1 << 20:
        return f"give --kv-cache-memory {spare >> 20}MiB or less"
    fits = (largest.total - excess) * largest.replicas // largest.total
    if fits > 0:
        flag = "--replicas" if model.prefill is None else "--prefill and --decode, together"
        return f"use {flag} {fits} or less"
    memory = "--kv-offload-memory" if model.kv_offload_memory else "--kv-cache-memory"
    return f"use a smaller model, a smaller {memory}, --dtype bfloat16, or a machine with more memory"


def threads_per_rank(cores: Mapping[str, float], placed: Iterable[str], ranks: int) -> int:
    """Cores of the smallest node where a replica is placed, shared among the ranks there.

    cores: by node. ranks: of all replicas; evenly on the nodes that have cores.
    """
    nodes = sum(1 for count in cores.values() if count)
    smallest = min((cores.get(node) or 1.0 for node in placed), default=1.0)
    return max(1, int(smallest) // ceil(ranks / max(1, nodes)))
