"""Which GPU a rank uses, and which it sees: decided by the controller, from what Ray gave to each rank."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuBinding:
    """For CUDA_VISIBLE_DEVICES, and the rank's own among them."""

    visible: tuple[str, ...]
    index: int


def bind_gpus(places: Sequence[tuple[str, Sequence[str]]]) -> list[GpuBinding | None]:
    """(node, GPUs that Ray gave) of every rank of a replica, in rank order; None for a rank without a GPU.

    The ranks of a replica on one node see each other's GPUs: NCCL can only copy between GPUs that both sides see.
    """
    on_node: dict[str, list[str]] = {}
    for node, gpus in places:
        on_node.setdefault(node, []).extend(gpus)
    return [GpuBinding(tuple(on_node[node]), on_node[node].index(gpus[0])) if gpus else None for node, gpus in places]
