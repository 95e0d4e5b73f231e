"""Which GPU a rank uses and which GPUs are visible to it: decided by the controller from Ray's assignments."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuBinding:
    """The value of CUDA_VISIBLE_DEVICES, and the index of the rank's own GPU in it."""

    visible: tuple[str, ...]
    index: int


def bind_gpus(places: Sequence[tuple[str, Sequence[str]]]) -> list[GpuBinding | None]:
    """places: (node, GPUs assigned by Ray) of every rank of a replica, in rank order. None for a rank without a GPU.

    On one node, all GPUs of a replica are visible to all of its ranks: NCCL only copies between GPUs that are visible
    to both sides.
    """
    on_node: dict[str, list[str]] = {}
    for node, gpus in places:
        on_node.setdefault(node, []).extend(gpus)
    return [GpuBinding(tuple(on_node[node]), on_node[node].index(gpus[0])) if gpus else None for node, gpus in places]
