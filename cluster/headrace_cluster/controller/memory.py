"""What a controller knows that nobody could tell the next one: kept by whoever started it, from its last View."""

import msgspec


class ReplicaMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One replica id. What an operator changed at run time belongs here."""

    generation: int
    role: str  # prefill | decode | both
    held: bool  # an operator wants it down
    drain_seconds: float | None = None  # left for its requests in flight, while it is drained
    ever_ready: bool = False  # a build that does not start is then no reason to end the cluster


class ControllerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """For the next controller of the same cluster. A first one has none."""

    created: int  # unix seconds: the date of the models in /v1/models
    replicas: dict[str, ReplicaMemory] = {}
