"""One rank of a replica as a Ray actor. Ray starts and watches it; no generated token passes through Ray."""

import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import structlog

from headrace_base.cluster_member import ClusterSecret
from headrace_base.errors import HeadraceError, MemoryTooSmallError
from headrace_base.logs import LogConfig, configure_logs
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import (
    ENDED,
    NODE_HOST,
    REPLICA_CLASS,
    Binding,
    ProfileOutcome,
    RankReport,
    Stage,
    bind_gpus,
)
from headrace_cluster.local.rank_states import RankState
from headrace_worker.comm.errors import RankLostError
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.profiling.report import DEFAULT_SECONDS, DEFAULT_STEPS

MEET_SECONDS = 0.1  # between two questions to rank 0 whether all ranks are there

log = structlog.get_logger(__name__)


class RankActor:
    """Wraps `Replica`, and starts it: its arguments are the whole intent, so that a start needs no controller.

    Only the cluster's secret comes by a call, since Ray keeps the arguments of actors. Methods run in threads.
    """

    def __init__(
        self,
        config: bytes,
        rank: int,
        digest: bytes,
        namespace: str,
        replica_class: str = REPLICA_CLASS,
        logs: bytes = b"",
    ) -> None:
        """config: an encoded ReplicaConfig. digest: of what is wanted, for reports.

        namespace: of the cluster's actors, where rank 0 has a name. logs: an encoded LogConfig; empty: the logging is
        not changed.
        """
        import ray
        import ray.util

        self._config = msgspec.msgpack.decode(config, type=ReplicaConfig)
        log_path = ""
        if logs:
            log_config = msgspec.msgpack.decode(logs, type=LogConfig)
            log_path = log_config.path
            configure_logs(log_config)
            log.info("process starts", pid=os.getpid(), generation=self._config.generation)
        node = str(ray.util.get_node_ip_address())
        self._newest = RankReport(
            pid=os.getpid(),
            node=node,
            gpus=[str(gpu) for gpu in ray.get_gpu_ids()],
            digest=digest,
            secrets=(),
            model=self._config.model,
            tp=self._config.tp,
            pp=self._config.pp,
            role=self._config.role,
            log_path=log_path,
        )
        self._changed = threading.Condition()  # notified when the report changes
        self._drains_until = 0.0
        self._state = RankState(ReplicaName(self._config.replica_id, self._config.generation).rank(rank))
        self._state.write(self._newest.stage)
        if self._config.host == NODE_HOST:
            self._config = replace(self._config, host=node)
        self._secret = ClusterSecret(())
        self._has_secret = threading.Event()
        self._rank = rank
        self._namespace = namespace
        self._replica_class = replica_class
        self._replica: Any = None
        self._meeting = Meeting(self._config.tp * self._config.pp)
        if threading.current_thread() is threading.main_thread():
            # Without a handler the signal would end the process.
            signal.signal(signal.SIGUSR2, lambda number, frame: self._profile_on_signal())
        threading.Thread(target=self._run, name="replica", daemon=True).start()

    def report(self, seen: int = -1, seconds: float = 0.0) -> bytes:
        """An encoded RankReport: at once if its version is not `seen`, else when it changes, or after `seconds`.

        The call is repeated: each one occupies one of this actor's few threads, even if its controller has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._newest.version != seen, seconds)
            left = max(0.0, self._drains_until - time.monotonic())
            return msgspec.msgpack.encode(msgspec.structs.replace(self._newest, drain_seconds=left))

    def set_secret(self, values: tuple[bytes, ...]) -> None:
        """Starts the replica, the first time. What has started keeps the keys of its cache when the secret changes."""
        self._secret.values = values
        self._note(secrets=self._secret.fingerprints)
        self._has_secret.set()

    def meet(self, rank: int, node: str, gpus: Sequence[str]) -> bytes:
        """On rank 0, for the other ranks: an encoded Binding once all ranks are there; empty until then.

        Raises RankLostError if rank 0 has failed before.
        """
        self._meeting.add(rank, node, gpus)
        binding = self._meeting.binding(rank)
        if binding is None and self._newest.stage in ENDED:
            raise RankLostError("rank 0 has failed")
        return msgspec.msgpack.encode(binding) if binding is not None else b""

    def set_role(self, role: str) -> None:
        """Sets how routers use the replica from now on. For rank 0."""
        with self._changed:
            self._replica.set_role(role)
            self._note(role=role)

    def drain(self, seconds: float) -> None:
        """Stops accepting requests, once it does; those in flight have so many seconds, of the first call."""
        with self._changed:
            if self._newest.stage is Stage.READY:
                self._drains_until = time.monotonic() + seconds
                self._replica.drain()
                self._note(stage=Stage.DRAINING)

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

    # -- from the start to the end -----------------------------------------------------------------------------

    def _run(self) -> None:
        self._has_secret.wait()
        self._note(stage=Stage.STARTING, progress="importing the engine")
        try:
            binding = self._join()
            replica = self._replica or self._make()
            started = replica.start(*([binding.rendezvous] if binding.rendezvous is not None else []))
        except RankLostError as error:
            self._note(stage=Stage.FAILED, error=str(error), secondary=True)
        except HeadraceError as error:
            log.error(str(error))
            lacks_resources = isinstance(error, MemoryTooSmallError)
            self._note(stage=Stage.FAILED, error=str(error), final=True, lacks_resources=lacks_resources)
        except Exception as error:  # a bug or a missing library: reported; the traceback is in the log
            log.exception("the start failed with an unexpected error")
            sentence = f"{self._config.replica_id} failed to start: {type(error).__name__}: {error}"
            sentence += f"; its log: {self._newest.log_path}" if self._newest.log_path else ""
            self._note(stage=Stage.FAILED, error=sentence, final=True)
        else:
            self._note(stage=Stage.READY, started=started, progress="")
            self._note(stage=Stage.ENDED, error=self._await_end())

    def _join(self) -> Binding:
        """Waits until all ranks are there. The device is known before anything is made for it."""
        own = self._newest
        if self._rank:
            binding = self._ask_rank_0()
            self._bind(binding)
            return binding
        self._meeting.add(0, own.node, own.gpus)
        self._bind(self._meeting.wait()[0])
        rendezvous = self._make().open_rendezvous() if own.tp * own.pp > 1 else None
        return self._meeting.open(rendezvous)

    def _ask_rank_0(self) -> Binding:
        """Raises RankLostError."""
        import ray

        own, name = self._newest, ReplicaName(self._config.replica_id, self._config.generation).rank(0)
        while True:
            try:
                actor = ray.get_actor(name, namespace=self._namespace)
                if encoded := ray.get(actor.meet.remote(self._rank, own.node, own.gpus)):
                    return msgspec.msgpack.decode(encoded, type=Binding)
            except ray.exceptions.ActorUnavailableError:  # the network, or Ray's GCS
                pass
            except (ValueError, ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
                raise RankLostError("rank 0 has ended") from error
            time.sleep(MEET_SECONDS)

    def _bind(self, binding: Binding) -> None:
        """Decides the device, before CUDA is used, which reads the variable once.

        A rank without a GPU runs on the CPU: what `auto` would find on its machine may belong to another rank.
        """
        if binding.gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(binding.visible_gpus)
            self._config = replace(self._config, device=f"cuda:{binding.gpu}")
        elif self._config.device == "auto":
            self._config = replace(self._config, device="cpu")

    def _make(self) -> Any:
        module, _, name = self._replica_class.partition(":")
        make: Callable[..., Any] = getattr(importlib.import_module(module), name)
        self._replica = make(self._config, self._secret, self._rank, self._show_progress)
        return self._replica

    def _await_end(self) -> str:
        """The cause."""
        try:
            self._replica.wait()
        except HeadraceError as error:
            return str(error)
        except Exception as error:
            log.exception("the replica ended with an unexpected error")
            return f"{type(error).__name__}: {error}"
        return "it was stopped"

    def _show_progress(self, stage: str, fraction: float) -> None:
        if stage != self._newest.progress:
            log.info(stage)
        self._note(progress=stage, fraction=fraction)

    def _note(self, **changes: Any) -> None:
        """Changes the report."""
        with self._changed:
            self._newest = msgspec.structs.replace(self._newest, version=self._newest.version + 1, **changes)
            if "stage" in changes:
                self._state.write(self._newest.stage)
            self._changed.notify_all()

    def _profile_on_signal(self) -> None:
        """Records the default number of steps; the result is in the log."""

        def begin() -> None:
            try:
                self._replica.begin_profile(DEFAULT_STEPS, DEFAULT_SECONDS)
            except Exception as error:
                log.warning(f"SIGUSR2: no profile: {error}")

        threading.Thread(target=begin, daemon=True).start()  # a handler must not wait for a lock


class Meeting:
    """On rank 0: which ranks of a replica exist, and where. Thread-safe."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._places: dict[int, tuple[str, Sequence[str]]] = {}
        self._bindings: list[Binding] = []  # once rank 0 has opened the rendezvous
        self._changed = threading.Condition()

    def add(self, rank: int, node: str, gpus: Sequence[str]) -> None:
        """This rank exists."""
        with self._changed:
            self._places[rank] = node, gpus
            self._changed.notify_all()

    def wait(self) -> list[Binding]:
        """By rank, without the rendezvous, once all ranks exist."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._places) == self._ranks)
            return bind_gpus([place for _, place in sorted(self._places.items())])

    def open(self, rendezvous: Any) -> Binding:
        """All may start, with this rendezvous (None: of one rank). Returns rank 0's binding."""
        bindings = [msgspec.structs.replace(binding, rendezvous=rendezvous) for binding in self.wait()]
        with self._changed:
            self._bindings = bindings
        return bindings[0]

    def binding(self, rank: int) -> Binding | None:
        """None until all may start."""
        with self._changed:
            return self._bindings[rank] if self._bindings else None
