"""KV blocks between replicas, in one run, interleaved: the cost and the gain of disaggregation.

1. GB/s of blocks that the source has cached, against a raw copy of equally large pieces over the same transport.
2. TTFT at low load: prompts computed by the replica that answers, and by a prefill replica.
3. ITL of running streams while long prompts arrive: two replicas that do both, against one for prefill and one for
   decode.

    python benchmarks/transfer.py [--rounds N] [--save]

Processes of this machine, one thread each; the embedded model in float32.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

import machine  # isort: skip  # before torch: it sets how OpenMP waits

import grpc
import torch

from headrace_proto import CONTRACT_VERSION
from headrace_proto import replica_pb2 as pb
from headrace_proto.channel_options import NO_PROXY
from headrace_proto.component import Component
from headrace_proto.replica_pb2_grpc import ReplicaStub
from headrace_worker.comm.rendezvous import RendezvousHost
from headrace_worker.core.config import LOCAL_CACHE_KEY, Rendezvous, ReplicaConfig
from headrace_worker.core.transfer.orders import OpenPair
from headrace_worker.kv_transfer.pair_group import PairGroup
from headrace_worker.replica import Replica
from support import identities

PIECE = (2, 16, 3, 16, 64)  # keys and values of a layer in sixteen blocks of the embedded model
PIECES = 400
PROMPTS = (256, 512, 896)
CACHE = 256 << 20
STREAMS, STREAM_TOKENS = 6, 120
LONG, LONG_EVERY = 768, 1.5


def run_replica(name: str, pipe: Any) -> None:
    """Runs one replica until a message arrives on the pipe."""
    config = ReplicaConfig(
        replica_id=name, model="smollm2", source="smollm2", dtype="float32", device="cpu",
        kv_cache_memory=CACHE, max_model_len=1024, max_num_seqs=32, cpu_threads=1,
    )  # fmt: skip
    replica = Replica(config, identities.replica(), LOCAL_CACHE_KEY)
    pipe.send(replica.start().address)
    pipe.recv()
    replica.stop()


def copy_raw(rendezvous: Rendezvous, pipe: Any) -> None:
    """The sender of the raw copy."""
    pair_group = PairGroup(OpenPair(1, rendezvous, 2, 1, 0, (), sends=True), 0, "127.0.0.1", None)
    piece = torch.zeros(PIECE)
    while pipe.recv():
        pending = None
        for _ in range(PIECES):
            if pending is not None:
                pair_group.finish(pending)
            pending = pair_group.send(piece, 0)
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
        self._channel = identities.router().channel(address, Component.REPLICA, NO_PROXY)
        self._answers: dict[bytes, tuple[Answer, float]] = {}

    async def open(self) -> None:
        stub: Any = ReplicaStub(self._channel)
        self._call = stub.Serve()
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


def tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(20, 40_000) for _ in range(count)]


async def use_all_blocks(stream: ReplicaStream, random: Random) -> None:
    """Touches every page of the cache once, so that no first access is measured."""
    await stream.first_token(tokens(random, 16))
    await asyncio.sleep(0.6)  # an idle tick reports the free blocks
    for _ in range(stream.load.free_blocks * 16 // 896 + 1):
        await stream.first_token(tokens(random, 896))


async def fetch_speed(first: ReplicaStream, second: ReplicaStream, random: Random) -> float:
    """GB/s of one prompt's blocks that the second replica has computed before."""
    prompt = tokens(random, 896)
    await second.first_token(prompt)
    before = first.load.counters
    await first.first_token(prompt, second.address)
    await asyncio.sleep(0.6)  # an idle tick reports the counters
    after = first.load.counters
    return (after.fetched_bytes - before.fetched_bytes) / (after.fetch_seconds - before.fetch_seconds) / 1e9


def raw_speed(pair_group: PairGroup, pipe: Any) -> float:
    """GB/s of pieces received one after the other."""
    piece = torch.empty(PIECE)
    pipe.send(True)
    pair_group.take(pair_group.expect(piece, 0))
    began = time.perf_counter()
    for _ in range(PIECES - 1):
        pair_group.take(pair_group.expect(piece, 0))
    return (PIECES - 1) * piece.nbytes / (time.perf_counter() - began) / 1e9


async def gaps_under_prompts(replicas: list[ReplicaStream], source: str, random: Random) -> list[float]:
    """Times between tokens of streams on `replicas` while long prompts arrive at them in turn."""
    streams = [
        await replicas[index % len(replicas)].submit(tokens(random, 40), STREAM_TOKENS) for index in range(STREAMS)
    ]
    await asyncio.gather(*(stream.reach(10) for stream in streams))
    turn, waiting = 0, []
    while not all(stream.done.is_set() for stream in streams):
        waiting.append(await replicas[turn % len(replicas)].submit(tokens(random, LONG), 1, source))
        turn += 1
        await asyncio.sleep(LONG_EVERY)
    for answer in waiting:
        await answer.done.wait()
    return [gap for stream in streams for gap in stream.gaps[10:]]


async def measure(addresses: list[str], pair_group: PairGroup, pipe: Any, rounds: int) -> dict[str, Any]:
    streams = [ReplicaStream(address) for address in addresses]
    for stream in streams:
        await stream.open()
    first, second = streams
    random = Random(1)
    await asyncio.gather(*(use_all_blocks(stream, random) for stream in streams))
    await fetch_speed(first, second, random)  # opens the pair
    fetched, raw = [], []
    for _ in range(rounds):
        raw.append(raw_speed(pair_group, pipe))
        fetched.append(await fetch_speed(first, second, random))
    print(f"blocks {statistics.median(fetched):.2f} GB/s, raw copy {statistics.median(raw):.2f} GB/s", flush=True)
    starts: dict[str, dict[str, float]] = {}
    for length in PROMPTS:
        local, remote = [], []
        for _ in range(rounds):
            local.append(await first.first_token(tokens(random, length)))
            remote.append(await first.first_token(tokens(random, length), second.address))
        starts[str(length)] = {
            "local_ms": round(statistics.median(local) * 1e3, 1),
            "prefill_replica_ms": round(statistics.median(remote) * 1e3, 1),
        }
        print(f"first token of {length} tokens: {starts[str(length)]}", flush=True)
    gaps: dict[str, list[float]] = {"colocated": [], "disaggregated": []}
    for _ in range(max(1, rounds // 2)):
        gaps["colocated"] += await gaps_under_prompts(streams, "", random)
        gaps["disaggregated"] += await gaps_under_prompts([first], second.address, random)
    between = {
        name: {
            "p50_ms": round(statistics.median(found) * 1e3, 1),
            "p99_ms": round(statistics.quantiles(found, n=100)[98] * 1e3, 1),
            "max_ms": round(max(found) * 1e3, 1),
        }
        for name, found in gaps.items()
    }
    for name, row in between.items():
        print(f"between tokens, {name}: {row}", flush=True)
    counters = first.load.counters
    for stream in streams:
        await stream.close()
    return {
        "blocks_gb_s": {"median": round(statistics.median(fetched), 3), "all": [round(x, 3) for x in fetched]},
        "raw_copy_gb_s": {"median": round(statistics.median(raw), 3), "all": [round(x, 3) for x in raw]},
        "first_token": starts,
        "between_tokens": between,
        "fetches": counters.fetches,
        "fetches_failed": counters.fetches_failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="append to results/transfer.jsonl")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    children = []
    for name in ("decode", "prefill"):
        mine, theirs = context.Pipe()
        process = context.Process(target=run_replica, args=(name, theirs))
        process.start()
        children.append((process, mine))
    addresses = [pipe.recv() for _, pipe in children]
    opened = RendezvousHost("127.0.0.1")
    mine, theirs = context.Pipe()
    sender = context.Process(target=copy_raw, args=(opened.rendezvous, theirs))
    sender.start()
    pair_group = PairGroup(OpenPair(1, opened.rendezvous, 2, 0, 1, (), sends=False), 0, "127.0.0.1", opened)
    result = asyncio.run(measure(addresses, pair_group, mine, arguments.rounds))
    mine.send(False)
    sender.join(10)
    pair_group.close()
    for process, pipe in children:
        pipe.send(True)
        process.join(20)
    if arguments.save:
        print(machine.save("transfer", result))


if __name__ == "__main__":
    main()
