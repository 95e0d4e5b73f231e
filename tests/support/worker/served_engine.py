"""A replica's gRPC server with a real engine loop and a fake runner."""

import threading
from typing import Any

import grpc

from headrace_proto import replica_pb2 as pb
from headrace_proto.replica_pb2_grpc import ReplicaStub
from headrace_worker.assembly.command_queue import CommandQueue
from headrace_worker.assembly.loop import EngineLoop
from headrace_worker.server.description import Description
from headrace_worker.server.replica_server import ReplicaServer
from headrace_worker.server.servicer import Servicer
from headrace_worker.server.transfer_peer import TransferPeer
from support.members import MEMBER


class ServedEngine:
    """An engine behind a gRPC server."""

    def __init__(self, bench: Any) -> None:
        self.bench = bench
        self.server = ReplicaServer("127.0.0.1", None, MEMBER)
        identity = pb.ReplicaIdentity(replica_id="a", generation=1, boot_id=b"b" * 16, model="m", revision="r")
        facts = pb.ModelFacts(identity=identity, max_model_len=200, vocab_size=2000, tokenizer_digest=b"d")
        self.loop = EngineLoop(
            bench.engine, lambda report: self.server.call_soon(self.servicer.deliver, report), CommandQueue()
        )
        peer = TransferPeer(lambda: identity, None, self.loop.commands)
        self.description = Description(facts, b"t" * (3 << 19))
        self.servicer = Servicer(self.description, self.loop, bench.kv.start_chain, b"b" * 16, peer, MEMBER)
        self.address = self.server.start(self.servicer)
        threading.Thread(target=self.loop.run, name="steps", daemon=True).start()

    def stub(self, channel: grpc.aio.Channel) -> ReplicaStub:
        return ReplicaStub(channel)

    def close(self) -> None:
        self.loop.stop()
        self.server.stop()
