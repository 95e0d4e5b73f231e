"""One rank of a replica as a Ray actor. Ray starts and watches it; no token ever passes through Ray."""

import importlib
import os
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from headrace_cluster.rank_config import NODE_HOST, REPLICA_CLASS, StartOutcome
from headrace_proto.errors import HeadraceError
from headrace_worker.config import ReplicaConfig


class RankActor:
    """Wraps `Replica`. Its methods run in threads: `start` and `wait` block while the others answer."""

    def __init__(self, config: bytes, rank: int, replica_class: str = REPLICA_CLASS) -> None:
        import ray.util

        # The command line's Ctrl-C is not for ranks: they end in order. Ray has put workers into their own group.
        self._config = msgspec.msgpack.decode(config, type=ReplicaConfig)
        self._node = str(ray.util.get_node_ip_address())
        if self._config.host == NODE_HOST:
            self._config = msgspec.structs.replace(self._config, host=self._node)
        self._rank = rank
        self._replica_class = replica_class
        self._replica: Any = None
        self._progress = ("importing the engine", 0.0)

    def facts(self) -> tuple[int, str]:
        """Process id and node."""
        return os.getpid(), self._node

    def start(self) -> bytes:
        """Loads the model and listens; returns an encoded StartOutcome when ready, or when it cannot be."""
        try:
            module, _, name = self._replica_class.partition(":")
            make: Callable[..., Any] = getattr(importlib.import_module(module), name)
            self._replica = make(self._config, self._rank, self._report)
            outcome = StartOutcome(started=self._replica.start())
        except HeadraceError as error:
            outcome = StartOutcome(error=str(error), final=True)
        except Exception as error:  # a bug or a missing library: said, not swallowed; the trace is in the log
            traceback.print_exc()
            sentence = f"{self._config.replica_id} failed to start: {type(error).__name__}: {error}"
            outcome = StartOutcome(error=sentence, final=True)
        return msgspec.msgpack.encode(outcome)

    def progress(self) -> tuple[str, float]:
        """What `start` is doing, and how far it is, 0..1."""
        return self._progress

    def wait(self) -> str:
        """Blocks until the replica ends; returns why."""
        try:
            self._replica.wait()
        except HeadraceError as error:
            return str(error)
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
        return "it was stopped"

    def drain(self) -> None:
        """Takes no new requests."""
        if self._replica is not None:
            self._replica.drain()

    def stop(self) -> None:
        """Ends the engine; the process is ended by the controller."""
        if self._replica is not None:
            self._replica.stop()

    def _report(self, stage: str, fraction: float) -> None:
        self._progress = (stage, fraction)
