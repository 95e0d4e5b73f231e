"""A router core with 8, 100 and 1,000 replicas: processor time of each operation, in milliseconds.

    python benchmarks/router_scale.py [--replicas 8,100,1000] [--blocks 10000000] [--rounds N] [--policy NAME]
                                      [--profile PART] [--save]

`decision N`: of a new prompt of 8,192 tokens, after N replicas have reported since the last one, with `--blocks` KV
blocks in the index of all. Of every second prompt a part is in the caches of eight replicas, of the others nothing. The
median, the 99th percentile and the longest of 40 x `--rounds` decisions.

`submit`: sending a prompt to a replica, whose cache is expected to have its blocks from then on. `maintenance`:
`maintain` and `rebalance`, as a router calls them ten times a second.

The replicas are states in this process: no network, no model. Their frames are parsed from bytes, as gRPC does it.
`scrape` is the processor time of GET /metrics, `stall` the longest time in which it holds the event loop.
"""

import argparse
import asyncio
import cProfile
import gc
import itertools
import pstats
import time
from collections.abc import Callable
from statistics import median

import machine
import numpy as np

from headrace_proto.control_pb2 import Member, MemberList
from headrace_proto.replica_pb2 import (
    REPLICA_STATE_READY,
    CacheGroup,
    Counters,
    Delta,
    KvLayout,
    Load,
    ModelFacts,
    ReplicaFrame,
    ReplicaIdentity,
    Sampling,
    StepModel,
    Submit,
)
from headrace_router.core.attempt import Outcome
from headrace_router.core.fleet import Fleet
from headrace_router.core.placement import FleetPlacement
from headrace_router.core.policy import POLICIES
from headrace_router.core.policy.interface import ChoiceRequest
from headrace_router.core.prefix_index import Digests, PrefixIndex
from headrace_router.core.replica_blocks import GroupBlocks, PromptBlocks, ReplicaBlocks
from headrace_router.core.replica_state import ReplicaState
from headrace_router.dispatch.router_metrics import RouterMetrics
from headrace_router.event_loop import exempt_from_collection
from headrace_router.text.model_card import ModelCard

STREAMS = 8  # of each replica
PROMPT = 8192  # tokens
REPORTS = (20, 200, 1000)  # between two decisions
SAMPLES = 40  # decisions, for each round of the other parts
HOLDERS = 8  # replicas that have a part of a prompt
BLOCKS_PER_DOCUMENT = 10_000  # in the index: one of so many is of a prompt that comes again
TICK = 0.1  # seconds between two looks, as in a router


class FakeLink:
    """A connected replica; `report` is what its stream would bring."""

    def __init__(
        self, member: Member, clock: Callable[[], float], ids: "itertools.count[int]", index: PrefixIndex
    ) -> None:
        self.blocks = ReplicaBlocks(index)
        self.state: ReplicaState[ModelCard] = ReplicaState(
            member,
            clock=clock,
            new_id=lambda: next(ids).to_bytes(16, "big"),
            on_send=lambda: None,
            blocks=self.blocks,
        )
        layout = KvLayout(version=1, block_size=16, groups=[CacheGroup(num_layers=32, num_kv_heads=8, head_dim=128)])
        identity = ReplicaIdentity(kv_layout=layout, boot_id=b"b" * 16)
        identity.MergeFrom(member.identity)
        facts = ModelFacts(
            identity=identity,
            max_model_len=131_072,
            kv_blocks=30_000,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            cache_key=b"k" * 32,
        )
        self.state.describe(facts, object())  # type: ignore[arg-type]  # no operation here reads the card
        self.state.receive(ReplicaFrame(hello=identity))
        self.step = 0
        self.tokens = 0
        self.attempts = [
            self.state.submit(Submit(prompt_token_ids=[1]), lambda *_: None, lambda _: None).id for _ in range(STREAMS)
        ]

    def report(self) -> bytes:
        """A frame with nothing but a load."""
        self.step += 1
        load = Load(
            running=STREAMS,
            kv_usage=0.5,
            free_blocks=15_000,
            predicted_step_ms=12.5,
            counters=Counters(generation_tokens=STREAMS * self.step, steps=self.step, prompt_tokens=STREAMS),
            step_model=StepModel(
                base_ms=10.0, per_decode_sequence_ms=0.2, per_prefill_token_ms=0.05, per_kv_token_ms=1e-5, error_ms=0.4
            ),
        )
        return ReplicaFrame(step=self.step, load=load, submits=STREAMS).SerializeToString()

    def tokens_frame(self) -> bytes:
        """A frame with a token for each stream."""
        frame = ReplicaFrame.FromString(self.report())
        for attempt in self.attempts:
            frame.deltas.append(Delta(attempt_id=attempt, first_index=self.tokens, token_ids=[7]))
        self.tokens += 1
        return frame.SerializeToString()

    def close(self) -> None:
        self.state.disconnect()

    def check_stall(self) -> None:
        self.state.silent(10.0)


class FakeCluster:
    """A fleet whose replicas all report every TICK, in virtual time."""

    def __init__(self, replicas: int, policy: str, blocks: int) -> None:
        """blocks: in the index of all replicas together."""
        self.now = 1000.0
        self.links: list[FakeLink] = []
        ids = itertools.count()
        self.index = PrefixIndex(max(1 << 14, 3 * blocks))

        def open_link(member: Member) -> FakeLink:
            self.links.append(FakeLink(member, lambda: self.now, ids, self.index))
            return self.links[-1]

        self.fleet: Fleet[ModelCard] = Fleet(open_link, 0, clock=lambda: self.now, jitter=lambda: 0.0, index=self.index)
        self.placement = FleetPlacement(self.fleet, POLICIES[policy](), clock=lambda: self.now)
        self.metrics = RouterMetrics()
        self.metrics.add_fleet(self.fleet)
        members = [
            Member(
                identity=ReplicaIdentity(replica_id=f"m/{index}", generation=1, model="m", revision="r"),
                address=f"host:{index}",
                state=REPLICA_STATE_READY,
            )
            for index in range(replicas)
        ]
        self.fleet.update(MemberList(members=members))
        self.turn = 0
        self.random = np.random.default_rng(1)
        self.tokens = list(range(PROMPT))
        scheme = self.links[0].state.scheme
        assert scheme is not None
        self.scheme = scheme
        self.frames = [ReplicaFrame.FromString(link.report()) for link in self.links]
        self.documents = self._fill(blocks)
        self.new_request()
        for link in self.links:  # a histogram of a router has series for each replica that it has used
            metrics = self.metrics
            for latency in (metrics.first_token, metrics.inter_token, metrics.end_to_end, metrics.queued):
                latency.labels("m", link.state.replica_id).observe(0.1)
        for _ in range(20):
            self.tick()
        exempt_from_collection()  # as a router does when it starts, and again when most replicas have connected

    def _digests(self, count: int) -> Digests:
        return self.random.integers(1, 1 << 63, count, np.uint64)

    def _fill(self, blocks: int) -> list[Digests]:
        """Fills the index. Returns prompts of which HOLDERS replicas have more and more."""
        for link in self.links:
            for first in range(0, blocks // len(self.links), 8192):
                count = min(8192, blocks // len(self.links) - first)
                self.index.store(link.blocks.slot, self._digests(count))
        documents = []
        for _ in range(max(HOLDERS, blocks // BLOCKS_PER_DOCUMENT)):
            document = self._digests(PROMPT // self.scheme.block_size)
            holders = self.random.permutation(len(self.links))[:HOLDERS].tolist()
            for part, holder in enumerate(holders, 1):
                self.index.store(self.links[holder].blocks.slot, document[: part * len(document) // HOLDERS])
            documents.append(document)
        return documents

    def new_request(self) -> None:
        """With a prompt that was not looked up before; a part of every second one is cached."""
        self.turn += 1
        digests = self._digests(PROMPT // self.scheme.block_size)
        if self.turn % 2:
            known = int(self.random.integers(len(digests)))
            digests[:known] = self.documents[self.turn // 2 % len(self.documents)][:known]
        prompt = PromptBlocks(self.scheme.block_size, (GroupBlocks(0, digests),))
        sampling = Sampling(max_tokens=64)
        self.request = ChoiceRequest("label", "m", "r", b"", self.tokens, sampling, blocks={self.scheme: prompt})

    def some_reports(self, count: int) -> None:
        """Between two decisions."""
        for number in range(min(count, len(self.links))):
            place = (self.turn * count + number) % len(self.links)
            link, frame = self.links[place], self.frames[place]
            link.step += 1
            frame.step = link.step
            link.state.receive(frame)

    def tick(self) -> None:
        self.now += TICK
        for link in self.links:
            link.state.receive(ReplicaFrame.FromString(link.report()))

    def place(self) -> None:
        chosen = self.placement.place(self.request, 0, ())
        assert chosen is not None

    def submit(self) -> None:
        """To the replica that is next in turn."""
        blocks = self.request.blocks[self.scheme]
        state = self.links[self.turn % len(self.links)].state
        self.sent = state.submit(
            Submit(), lambda *_: None, lambda _: None, 0, blocks=blocks, prompt=self.request.prompt_token_ids
        )

    def after_submit(self) -> None:
        """Ends the attempt, and makes the next request."""
        self.sent.end(Outcome.LOST)
        self.new_request()
        self.tick()
        self.fleet.maintain()

    def maintenance(self) -> None:
        """As a router does it."""
        self.fleet.maintain()
        self.fleet.rebalance(self.now)


def _times(operation: Callable[[], object], rounds: int, before: Callable[[], object] = lambda: None) -> list[float]:
    """Milliseconds of each round."""
    found = []
    for _ in range(rounds):
        before()
        began = time.process_time()
        operation()
        found.append((time.process_time() - began) * 1e3)
    return found


def _per_frame(cluster: FakeCluster, make: Callable[[FakeLink], bytes], rounds: int) -> float:
    frames: list[tuple[FakeLink, bytes]] = []

    def receive() -> None:
        for link, frame in frames:
            link.state.receive(ReplicaFrame.FromString(frame))

    def prepare() -> None:
        cluster.now += TICK
        frames[:] = [(link, make(link)) for link in cluster.links]

    return median(_times(receive, rounds, prepare)) / len(cluster.links)


async def _scrape(cluster: FakeCluster, rounds: int) -> tuple[float, float]:
    """(median processor time of a scrape, longest stall of the event loop beside further ones)."""
    stalls, cpu = [0.0], []
    ended = asyncio.Event()

    async def watch() -> None:
        last = time.perf_counter()
        while not ended.is_set():
            await asyncio.sleep(0)
            now = time.perf_counter()
            stalls.append((now - last) * 1e3)
            last = now

    for _ in range(rounds):
        cluster.tick()  # each scrape has new values
        began = time.process_time()
        await cluster.metrics.page("", "")
        cpu.append((time.process_time() - began) * 1e3)
    gc.collect()
    watcher = asyncio.create_task(watch())
    for _ in range(rounds):
        await cluster.metrics.page("", "")
    ended.set()
    await watcher
    return median(cpu), max(stalls)


def _decisions(cluster: FakeCluster, reports: int, samples: int) -> dict[str, float]:
    def prepare() -> None:
        cluster.new_request()
        cluster.some_reports(reports)

    times = sorted(_times(cluster.place, samples, prepare))
    name = f"decision {reports}"
    return {name: median(times), f"{name}, p99": times[int(0.99 * len(times))], f"{name}, max": times[-1]}


def measure(replicas: int, rounds: int, policy: str, blocks: int) -> dict[str, float]:
    cluster = FakeCluster(replicas, policy, blocks)
    fleet = cluster.fleet
    looks = _times(lambda: fleet.rebalance(cluster.now), rounds, cluster.tick)
    maintained = _times(fleet.maintain, rounds, cluster.tick)
    both = _times(cluster.maintenance, rounds, cluster.tick)
    decisions = {count: _decisions(cluster, count, SAMPLES * rounds) for count in REPORTS}
    cards = _times(lambda: fleet.card("m"), 10 * rounds)
    schemes = _times(lambda: cluster.placement.schemes("m", "r"), 10 * rounds)
    cluster.submit()
    submits = _times(cluster.submit, rounds, cluster.after_submit)
    scrape, stall = asyncio.run(_scrape(cluster, max(3, rounds // 10)))
    return {
        "load report": _per_frame(cluster, FakeLink.report, rounds),
        f"frame of {STREAMS} tokens": _per_frame(cluster, FakeLink.tokens_frame, rounds),
        "rebalance": median(looks),
        "maintain": median(maintained),
        "maintain, longest": max(maintained),
        "maintenance": median(both),
        "maintenance, longest": max(both),
        "card": median(cards),
        "schemes": median(schemes),
        "submit": median(submits),
        "report to controller": median(_times(lambda: fleet.report("router"), rounds)),
        **{name: value for found in decisions.values() for name, value in found.items()},
        "scrape": scrape,
        "stall": stall,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="8,100,1000", help="numbers of replicas")
    parser.add_argument("--blocks", type=int, default=100_000, help="KV blocks in the index of all replicas")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="predicted")
    parser.add_argument("--profile", choices=["rebalance", "maintain", "decision"], help="time per function instead")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.replicas.split(",")]
    if arguments.profile:
        cluster = FakeCluster(counts[-1], arguments.policy, arguments.blocks)
        parts = {
            "rebalance": lambda: cluster.fleet.rebalance(cluster.now),
            "maintain": cluster.fleet.maintain,
            "decision": cluster.place,
        }
        profile = cProfile.Profile()
        for _ in range(arguments.rounds):
            cluster.new_request()
            profile.runcall(parts[arguments.profile])
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)
        return
    found = {str(count): measure(count, arguments.rounds, arguments.policy, arguments.blocks) for count in counts}
    print(f"{'ms':24}" + "".join(f"{count:>12}" for count in found))
    for part in found[str(counts[0])]:
        print(f"{part:24}" + "".join(f"{row[part]:12.4f}" for row in found.values()))
    if arguments.save:
        machine.save("router_scale", {"policy": arguments.policy, "blocks": arguments.blocks, "milliseconds": found})


if __name__ == "__main__":
    main()
