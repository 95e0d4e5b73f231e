"""One rank of a replica as a Ray actor. Ray starts and watches it; no token ever passes through Ray."""

import importlib
import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from headrace_cluster.rank_config import (
    NODE_HOST,
    REPLICA_CLASS,
    ProfileOutcome,
    RankReport,
    StartOrder,
    StartOutcome,
    fingerprint,
)
from headrace_proto.errors import HeadraceError
from headrace_worker.config import Meeting, ReplicaConfig, ReplicaStarted
from headrace_worker.parallel.errors import RankLostError
from headrace_worker.profiling import DEFAULT_SECONDS, DEFAULT_STEPS


class RankActor:
    """Wraps `Replica`. Its methods run in threads: `start` and `wait` block while the others answer."""

    def __init__(self, config: bytes, rank: int, replica_class: str = REPLICA_CLASS) -> None:
        import ray.util

        # The command line's Ctrl-C is not for ranks: they end in order. Ray has put workers into their own group.
        self._config = msgspec.msgpack.decode(config, type=ReplicaConfig)
        self._fingerprint = fingerprint(self._config)
        self._node = str(ray.util.get_node_ip_address())
        if self._config.host == NODE_HOST:
            self._config = msgspec.structs.replace(self._config, host=self._node)
        self._rank = rank
        self._replica_class = replica_class
        self._replica: Any = None
        self._role = self._config.role
        self._draining = False
        self._started: ReplicaStarted | None = None
        self._ended = threading.Event()
        self._cause = ""
        self._progress = ("importing the engine", 0.0)
        if threading.current_thread() is threading.main_thread():
            # Without a handler it would end the process.
            signal.signal(signal.SIGUSR2, lambda number, frame: self._profile_on_signal())

    def facts(self) -> tuple[int, str, list[str]]:
        """Process id, node, and the GPUs that Ray keeps for this rank."""
        import ray

        return os.getpid(), self._node, [str(gpu) for gpu in ray.get_gpu_ids()]

    def report(self) -> bytes:
        """An encoded RankReport, at any time."""
        pid, node, gpus = self.facts()
        report = RankReport(
            pid=pid,
            node=node,
            gpus=gpus,
            fingerprint=self._fingerprint,
            role=self._role,
            started=self._started,
            draining=self._draining,
            ended=self._ended.is_set(),
        )
        return msgspec.msgpack.encode(report)

    def open_meeting(self) -> bytes:
        """Of rank 0 of several: an encoded StartOutcome with the meeting that all ranks are to start with."""
        return self._guarded(lambda: StartOutcome(meeting=self._make().open_meeting()))

    def start(self, order: bytes) -> bytes:
        """Loads the model and listens; returns an encoded StartOutcome when ready, or when it cannot be."""
        given = msgspec.msgpack.decode(order, type=StartOrder)
        if given.gpu is not None:
            # CUDA reads this when it is first used, which is later.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(given.visible_gpus)
            self._config = msgspec.structs.replace(self._config, device=f"cuda:{given.gpu}")
        return self._guarded(lambda: StartOutcome(started=self._start(given.meeting)))

    def progress(self) -> tuple[str, float]:
        """What `start` is doing, and how far it is, 0..1."""
        return self._progress

    def wait(self, seconds: float) -> str | None:
        """Blocks until the replica ends, and returns why; None when so many seconds are over.

        It has to be asked again and again, since a call has one of this actor's few threads, also when the controller
        that asked is gone.
        """
        return self._cause if self._ended.wait(seconds) else None

    def set_role(self, role: str) -> None:
        """What routers are to use the replica for from now on. Of rank 0."""
        self._replica.set_role(role)
        self._role = role

    def drain(self) -> None:
        """Takes no new requests."""
        self._draining = True
        if self._replica is not None:
            self._replica.drain()

    def profile(self, steps: int, seconds: float) -> bytes:
        """Records the next steps; returns an encoded ProfileOutcome when the trace is written, or cannot be."""
        try:
            outcome = ProfileOutcome(self._replica.profile(steps, seconds))
        except HeadraceError as error:
            outcome = ProfileOutcome(error=str(error))
        return msgspec.msgpack.encode(outcome)

    def stop(self) -> None:
        """Ends the engine; the process is ended by the controller."""
        if self._replica is not None:
            self._replica.stop()

    def _profile_on_signal(self) -> None:
        """A window of the usual size; what comes of it is in the log."""

        def begin() -> None:
            try:
                self._replica.begin_profile(DEFAULT_STEPS, DEFAULT_SECONDS)
            except Exception as error:
                print(f"SIGUSR2: no profile: {error}", flush=True)

        threading.Thread(target=begin, daemon=True).start()  # a handler must not wait for a lock

    def _start(self, meeting: Meeting | None) -> ReplicaStarted:
        replica = self._replica or self._make()
        started: ReplicaStarted = replica.start(meeting) if meeting is not None else replica.start()
        threading.Thread(target=self._await_end, name="end of the replica", daemon=True).start()
        self._started = started
        return started

    def _await_end(self) -> None:
        try:
            self._replica.wait()
            self._cause = "it was stopped"
        except HeadraceError as error:
            self._cause = str(error)
        except Exception as error:
            traceback.print_exc()
            self._cause = f"{type(error).__name__}: {error}"
        self._ended.set()

    def _make(self) -> Any:
        module, _, name = self._replica_class.partition(":")
        make: Callable[..., Any] = getattr(importlib.import_module(module), name)
        self._replica = make(self._config, self._rank, self._report)
        return self._replica

    def _guarded(self, call: Callable[[], StartOutcome]) -> bytes:
        try:
            outcome = call()
        except RankLostError as error:
            outcome = StartOutcome(error=str(error), secondary=True)
        except HeadraceError as error:
            outcome = StartOutcome(error=str(error), final=True)
        except Exception as error:  # a bug or a missing library: said, not swallowed; the trace is in the log
            traceback.print_exc()
            sentence = f"{self._config.replica_id} failed to start: {type(error).__name__}: {error}"
            outcome = StartOutcome(error=sentence, final=True)
        return msgspec.msgpack.encode(outcome)

    def _report(self, stage: str, fraction: float) -> None:
        self._progress = (stage, fraction)
