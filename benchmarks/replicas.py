"""Replicas as processes of this machine, and a router's stream to each: without Ray and without a router.

Import `machine` before this: it sets how OpenMP waits.
"""

import asyncio
import os
import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
import numpy as np
import torch

from headrace_base.cluster_member import NO_PROXY
from headrace_proto import CONTRACT_VERSION
from headrace_proto import replica_pb2 as pb
from headrace_proto.replica_pb2_grpc import ReplicaStub
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.kv_transfer.agent import KvAgent, Pieces
from headrace_worker.replica import Replica
from support.members import MEMBER, METADATA


def run_replica(config: ReplicaConfig, pipe: Any) -> None:
    """Runs one replica until a message arrives on the pipe."""
    replica = Replica(config, MEMBER.secret)
    pipe.send(replica.start().address)
    pipe.recv()
    replica.stop()


def serve_raw(piece_bytes: int, pieces: int, device: str, pipe: Any) -> None:
    """The source of a `RawCopy`, until a message arrives on the pipe."""
    memory = _memory(piece_bytes, pieces, device)
    agent = KvAgent(f"raw-{os.getpid()}", [memory])
    pipe.send((agent.metadata, memory.data_ptr()))
    while not pipe.poll():
        agent.notices()
        time.sleep(5e-5)


class RawCopy:
    """Reads pieces of `serve_raw`'s memory by NIXL, in one read: every second one, so that none follows another."""

    def __init__(self, piece_bytes: int, pieces: int, device: str, pipe: Any) -> None:
        self._memory = _memory(piece_bytes, pieces, device)
        self._agent = KvAgent(f"raw-{os.getpid()}", [self._memory])
        self._pipe = pipe
        metadata, address = pipe.recv()
        self._name = self._agent.connect(metadata)
        self._device = -1 if device == "cpu" else 0
        self._sides = [_pieces(start, piece_bytes, pieces) for start in (address, self._memory.data_ptr())]

    def speed(self) -> float:
        """GB/s."""
        began = time.perf_counter()
        theirs, mine = self._sides
        reading = self._agent.read(self._name, theirs, mine, self._device, self._device)
        while not reading.done():
            self._agent.notices()
        return reading.num_bytes / (time.perf_counter() - began) / 1e9

    def stop(self) -> None:
        """Ends the source."""
        self._pipe.send(True)


def _memory(piece_bytes: int, pieces: int, device: str) -> torch.Tensor:
    return torch.zeros(2 * pieces * piece_bytes, dtype=torch.uint8, device=device)


def _pieces(start: int, piece_bytes: int, pieces: int) -> Pieces:
    places = np.arange(pieces, dtype=np.uint64) * np.uint64(2 * piece_bytes) + np.uint64(start)
    return np.column_stack((places, np.full(pieces, piece_bytes, np.uint64)))


@dataclass
class Answer:
    """The time of each token of an answer, in seconds after its request."""

    attempt_id: bytes
    times: list[float] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def reach(self, count: int) -> None:
        """Waits until `count` tokens have arrived."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.times) >= count)

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


class ReplicaStream:
    """A router's stream to one replica."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.load = pb.Load()
        self._channel = MEMBER.channel(address, NO_PROXY)
        self._answers: dict[bytes, tuple[Answer, float]] = {}

    async def open(self) -> None:
        stub: Any = ReplicaStub(self._channel)
        self._call = stub.Serve(metadata=METADATA)
        hello = pb.RouterHello(router_id="benchmark", contract_version=CONTRACT_VERSION)
        await self._call.write(pb.RouterFrame(hello=hello))
        self._task = asyncio.create_task(self._read())

    async def submit(self, prompt: list[int], count: int, source: str = "") -> Answer:
        """Requests a greedy answer; returns when the request is sent."""
        sampling = pb.Sampling(temperature=0, max_tokens=count, ignore_eos=True)
        submit = pb.Submit(attempt_id=os.urandom(16), prompt_token_ids=prompt, sampling=sampling)
        if source:
            submit.source.address = source
        answer = Answer(submit.attempt_id)
        self._answers[submit.attempt_id] = answer, time.perf_counter()
        await self._call.write(pb.RouterFrame(submits=[submit]))
        return answer

    async def first_token(self, prompt: list[int], source: str = "") -> float:
        answer = await self.submit(prompt, 1, source)
        await answer.done.wait()
        return answer.times[0]

    async def cancel(self, answer: Answer) -> None:
        await self._call.write(pb.RouterFrame(cancels=[pb.Cancel(attempt_id=answer.attempt_id)]))

    async def close(self) -> None:
        self._task.cancel()
        await self._channel.close()

    async def _read(self) -> None:
        while (frame := await self._call.read()) is not grpc.aio.EOF:
            self.load = frame.load
            for delta in frame.deltas:
                answer, began = self._answers[delta.attempt_id]
                answer.times += [time.perf_counter() - began] * len(delta.token_ids)
                async with answer.changed:
                    answer.changed.notify_all()
                if delta.finish:
                    answer.done.set()


def tokens(random: Random, count: int, vocabulary: int = 40_000) -> list[int]:
    return [random.randrange(20, vocabulary) for _ in range(count)]


async def fetch_speed(first: ReplicaStream, second: ReplicaStream, prompt: list[int]) -> float:
    """GB/s of one prompt's blocks that the second replica has computed before."""
    await second.first_token(prompt)
    before = first.load.counters
    await first.first_token(prompt, second.address)
    await asyncio.sleep(0.6)  # an idle tick reports the counters
    after = first.load.counters
    return (after.fetched_bytes - before.fetched_bytes) / (after.fetch_seconds - before.fetch_seconds) / 1e9
