"""A replica: loads the model, sizes its cache, warms up, then serves until it is stopped or its loop fails."""

from headrace_worker.replica.replica import Replica

__all__ = ["Replica"]
