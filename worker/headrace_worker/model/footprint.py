"""Memory of one rank of a replica, as far as it depends on the model. Plain data, without torch."""

from msgspec import Struct

from headrace_worker.core.layout import CacheLayout


class Footprint(Struct, frozen=True):
    """The larger of the first and the last rank: the others differ by little."""

    layout: CacheLayout
    weight_bytes: int
    max_positions: int


class PreflightResult(Struct, frozen=True):
    """Result of the preflight process: the footprint of each config, in order, up to the one that `error` is about."""

    footprints: list[Footprint]
    error: str = ""
