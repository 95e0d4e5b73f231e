"""One rank of a replica as a Ray actor. Ray starts and watches it; no generated token passes through Ray."""

import importlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import structlog

from headrace_cluster.core.rank_config import (
    NODE_HOST,
    REPLICA_CLASS,
    ProfileOutcome,
    RankReport,
    StartArgs,
    StartOutcome,
    fingerprint,
)
from headrace_proto.cluster_member import ClusterSecret
from headrace_proto.errors import HeadraceError, MemoryTooSmallError
from headrace_proto.logs import LogConfig, configure_logs
from headrace_worker.comm.errors import RankLostError
from headrace_worker.core.config import Rendezvous, ReplicaConfig, ReplicaStarted
from headrace_worker.profiling.report import DEFAULT_SECONDS, DEFAULT_STEPS

log = structlog.get_logger(__name__)


class RankActor:
    """Wraps `Replica`. Its methods run in threads: `start` and `wait` block while the others answer."""

    def __init__(self, config: bytes, rank: int, replica_class: str = REPLICA_CLASS, logs: bytes = b"") -> None:
        """config: an encoded ReplicaConfig. logs: an encoded LogConfig; empty: the logging is not changed."""
        import ray.util

        self._config = msgspec.msgpack.decode(config, type=ReplicaConfig)
        self._log_path = ""
        if logs:
            log_config = msgspec.msgpack.decode(logs, type=LogConfig)
            self._log_path = log_config.path
            configure_logs(log_config)
            log.info("process starts", pid=os.getpid(), generation=self._config.generation)
        self._fingerprint = fingerprint(self._config)
        self._node = str(ray.util.get_node_ip_address())
        if self._config.host == NODE_HOST:
            self._config = replace(self._config, host=self._node)
        self._secret = ClusterSecret(())  # Ray keeps the arguments of actors, and not those of calls
        self._rank = rank
        self._replica_class = replica_class
        self._replica: Any = None
        self._role: str = self._config.role
        self._role_number = 0
        self._role_lock = threading.Lock()
        self._draining = False
        self._held: bool | None = None
        self._started: ReplicaStarted | None = None
        self._ended = threading.Event()
        self._cause = ""
        self._progress = ("importing the engine", 0.0)
        if threading.current_thread() is threading.main_thread():
            # Without a handler the signal would end the process.
            signal.signal(signal.SIGUSR2, lambda number, frame: self._profile_on_signal())

    def facts(self) -> tuple[int, str, list[str]]:
        """Process id, node, and the GPUs that Ray assigned to this rank."""
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
            secrets=self._secret.fingerprints,
            model=self._config.model,
            tp=self._config.tp,
            pp=self._config.pp,
            role=self._role,
            role_number=self._role_number,
            started=self._started,
            draining=self._draining,
            held=self._held,
            ended=self._ended.is_set(),
            log_path=self._log_path,
        )
        return msgspec.msgpack.encode(report)

    def set_secret(self, values: tuple[bytes, ...]) -> None:
        """Before `start`, and whenever the cluster's secret changes. What has started keeps the keys of its cache."""
        self._secret.values = values

    def open_rendezvous(self, encoded: bytes) -> bytes:
        """For rank 0 of several: the rendezvous for the start of all ranks. encoded: a StartArgs.

        Returns an encoded StartOutcome.
        """
        self._bind(msgspec.msgpack.decode(encoded, type=StartArgs))
        return self._guarded(lambda: StartOutcome(rendezvous=self._make().open_rendezvous()))

    def start(self, encoded: bytes) -> bytes:
        """Loads the model and listens. encoded: a StartArgs. Returns an encoded StartOutcome once ready or failed."""
        args = msgspec.msgpack.decode(encoded, type=StartArgs)
        self._bind(args)
        return self._guarded(lambda: StartOutcome(started=self._start(args.rendezvous)))

    def progress(self) -> tuple[str, float]:
        """The stage of `start` and its progress, 0..1."""
        return self._progress

    def wait(self, seconds: float) -> str | None:
        """Blocks until the replica ends and returns the cause; None after `seconds`.

        The call is repeated: each call occupies one of this actor's few threads, even if its controller has ended.
        """
        return self._cause if self._ended.wait(seconds) else None

    def set_role(self, role: str, number: int) -> None:
        """Sets how routers use the replica from now on. For rank 0.

        number: of the decision; a call with an earlier number than the last one changes nothing.
        """
        with self._role_lock:
            if number < self._role_number:
                return
            self._replica.set_role(role)
            self._role, self._role_number = role, number

    def drain(self, held: bool) -> None:
        """Stops accepting requests. held: whether an operator drains it."""
        self._draining, self._held = True, held
        if self._replica is not None:
            self._replica.drain()

    def profile(self, steps: int, seconds: float) -> bytes:
        """Records the next steps; returns an encoded ProfileOutcome once the trace is written or has failed."""
        try:
            outcome = ProfileOutcome(self._replica.profile(steps, seconds))
        except HeadraceError as error:
            outcome = ProfileOutcome(error=str(error))
        return msgspec.msgpack.encode(outcome)

    def stop(self) -> None:
        """Ends the engine; the controller ends the process."""
        if self._replica is not None:
            self._replica.stop()

    def _bind(self, args: StartArgs) -> None:
        """Decides the device, before anything is built for it and before CUDA is used, which reads the variable once.

        A rank without a GPU runs on the CPU: what `auto` would find on its machine may belong to another rank.
        """
        if args.gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(args.visible_gpus)
            self._config = replace(self._config, device=f"cuda:{args.gpu}")
        elif self._config.device == "auto":
            self._config = replace(self._config, device="cpu")

    def _profile_on_signal(self) -> None:
        """Records the default number of steps; the result is in the log."""

        def begin() -> None:
            try:
                self._replica.begin_profile(DEFAULT_STEPS, DEFAULT_SECONDS)
            except Exception as error:
                log.warning(f"SIGUSR2: no profile: {error}")

        threading.Thread(target=begin, daemon=True).start()  # a handler must not wait for a lock

    def _start(self, rendezvous: Rendezvous | None) -> ReplicaStarted:
        replica = self._replica or self._make()
        started: ReplicaStarted = replica.start(rendezvous) if rendezvous is not None else replica.start()
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
            log.exception("the replica ended with an unexpected error")
            self._cause = f"{type(error).__name__}: {error}"
        self._ended.set()

    def _make(self) -> Any:
        module, _, name = self._replica_class.partition(":")
        make: Callable[..., Any] = getattr(importlib.import_module(module), name)
        self._replica = make(self._config, self._secret, self._rank, self._report)
        return self._replica

    def _guarded(self, call: Callable[[], StartOutcome]) -> bytes:
        try:
            outcome = call()
        except RankLostError as error:
            outcome = StartOutcome(error=str(error), secondary=True)
        except HeadraceError as error:
            log.error(str(error))
            lacks_resources = isinstance(error, MemoryTooSmallError)
            outcome = StartOutcome(error=str(error), final=True, lacks_resources=lacks_resources)
        except Exception as error:  # a bug or a missing library: reported; the traceback is in the log
            log.exception("the start failed with an unexpected error")
            sentence = f"{self._config.replica_id} failed to start: {type(error).__name__}: {error}"
            sentence += f"; its log: {self._log_path}" if self._log_path else ""
            outcome = StartOutcome(error=sentence, final=True)
        return msgspec.msgpack.encode(outcome)

    def _report(self, stage: str, fraction: float) -> None:
        if stage != self._progress[0]:
            log.info(stage)
        self._progress = (stage, fraction)
