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
import torch

from headrace_proto import CONTRACT_VERSION
from headrace_proto import replica_pb2 as pb
from headrace_proto.channel_options import NO_PROXY
from headrace_proto.replica_pb2_grpc import ReplicaStub
from headrace_worker.core.config import Rendezvous, ReplicaConfig
from headrace_worker.core.transfer.orders import OpenPair
from headrace_worker.kv_transfer.pair_group import PairGroup
from headrace_worker.replica import Replica
from support.members import MEMBER, METADATA


def run_replica(config: ReplicaConfig, pipe: Any) -> None:
    """Runs one replica until a message arrives on the pipe."""
    replica = Replica(config, MEMBER.secret)
    pipe.send(replica.start().address)
    pipe.recv()
    replica.stop()


def copy_raw(rendezvous: Rendezvous, piece: tuple[int, ...], dtype: torch.dtype, pieces: int, pipe: Any) -> None:
    """The sender of the raw copy: pieces of the shape and dtype, again for each true message on the pipe.

    It first sends that it is ready to connect, which ranks must do within seconds.
    """
    pipe.send(True)
    pair_group = PairGroup(OpenPair(1, rendezvous, 2, 1, 0, (), sends=True), 0, "127.0.0.1", None)
    sent = torch.zeros(piece, dtype=dtype)
    while pipe.recv():
        pending = None
        for _ in range(pieces):
            if pending is not None:
                pair_group.finish(pending)
            pending = pair_group.send(sent, 0)
        if pending is not None:
            pair_group.finish(pending)
    pair_group.close()


@dataclass
class Answer:
    """The time of each token of an answer, in seconds after its request."""

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
        answer = Answer()
        self._answers[submit.attempt_id] = answer, time.perf_counter()
        await self._call.write(pb.RouterFrame(submits=[submit]))
        return answer

    async def first_token(self, prompt: list[int], source: str = "") -> float:
        answer = await self.submit(prompt, 1, source)
        await answer.done.wait()
        return answer.times[0]

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


def raw_speed(pair_group: PairGroup, piece: tuple[int, ...], dtype: torch.dtype, pieces: int, pipe: Any) -> float:
    """GB/s of pieces received one after the other, with `copy_raw` at the other end."""
    received = torch.empty(piece, dtype=dtype)
    pipe.send(True)
    pair_group.take(pair_group.expect(received, 0))
    began = time.perf_counter()
    for _ in range(pieces - 1):
        pair_group.take(pair_group.expect(received, 0))
    return (pieces - 1) * received.nbytes / (time.perf_counter() - began) / 1e9
