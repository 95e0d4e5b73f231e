"""A replica without an engine: it starts at once and sends health; with the model "refuse" its start fails.

Ranks import it inside Ray workers, by path.
"""

import os
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc

from headrace_base.cluster_member import ClusterSecret
from headrace_base.errors import EngineDeadError, MemoryTooSmallError
from headrace_proto import replica_pb2 as pb
from headrace_proto import replica_pb2_grpc
from headrace_proto.role import parse_role
from headrace_worker.core.config import Rendezvous, ReplicaConfig, ReplicaStarted


class FakeReplica(replica_pb2_grpc.ReplicaServicer):
    """Has the interface of headrace_worker.replica.Replica."""

    def __init__(
        self,
        config: ReplicaConfig,
        secret: ClusterSecret,
        rank: int = 0,
        report: Callable[[str, float], None] = lambda stage, fraction: None,
    ) -> None:
        self.config = config
        self.secret = secret
        self.rank = rank
        self.report = report
        self.role: str = config.role
        self.boot_id = os.urandom(16)
        self.ended = threading.Event()
        self.health_paused = threading.Event()
        self.draining = False
        self.error = ""
        self.running = 0
        self.routers = 0  # number of connected routers
        self._server: Any = None

    def open_rendezvous(self) -> Rendezvous:
        """A rendezvous that is not used."""
        return Rendezvous("127.0.0.1", 1, bytes(32))

    def start(self, rendezvous: Rendezvous | None = None) -> ReplicaStarted:
        """Listens, on rank 0."""
        if self.config.model == "refuse":
            raise MemoryTooSmallError("too little memory: the model needs 3 GiB, 1 GiB is free; take a smaller one")
        self.report("loading nothing", 0.5)
        address = self._listen() if self.rank == 0 else ""
        return ReplicaStarted(
            address=address,
            boot_id=self.boot_id,
            pid=os.getpid(),
            device="cpu",
            dtype="float32",
            revision="r1",
            threads=self.config.cpu_threads or 0,
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            kv_blocks=8,
            kv_bytes=1 << 20,
            block_size=16,
            weight_bytes=1 << 20,
            notes=[],
        )

    def _listen(self) -> str:
        self._server = grpc.server(futures.ThreadPoolExecutor(8), options=(("grpc.so_reuseport", 0),))
        replica_pb2_grpc.add_ReplicaServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(f"{self.config.host}:0")
        self._server.start()
        return f"{self.config.host}:{port}"

    def wait(self) -> None:
        """Blocks until stop() or die()."""
        self.ended.wait()
        if self.error:
            raise EngineDeadError(self.error)

    def set_role(self, role: str) -> None:
        """Reports it in its health."""
        self.role = role

    def drain(self) -> None:
        """Reports it in its health."""
        self.draining = True

    def stop(self) -> None:
        """Ends the server."""
        self.ended.set()
        if self._server is not None:
            self._server.stop(0)

    def die(self, sentence: str) -> None:
        """Simulates a failed step loop."""
        self.error = sentence
        self.ended.set()

    def WatchHealth(self, request: pb.HealthRequest, context: Any) -> Any:
        """One message per interval, unless `health_paused`."""
        step = 0
        while not self.ended.is_set():
            if not self.health_paused.is_set():
                step += 1
                yield self._health(step)
            self.ended.wait(request.interval_ms / 1e3)

    def _health(self, step: int) -> pb.ReplicaHealth:
        identity = pb.ReplicaIdentity(
            replica_id=self.config.replica_id,
            generation=self.config.generation,
            boot_id=self.boot_id,
            model=self.config.model,
            revision="r1",
            dtype="float32",
            role=parse_role(self.role).number,
        )
        state = pb.REPLICA_STATE_DRAINING if self.draining else pb.REPLICA_STATE_READY
        load = pb.Load(running=self.running, predicted_step_ms=10)
        return pb.ReplicaHealth(identity=identity, state=state, step=step, load=load, routers=self.routers)
