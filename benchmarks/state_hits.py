"""Prefix cache hits of a model with recurrent layers, against one of full attention with the same memory.

    python benchmarks/state_hits.py [--save] [--running 1]

The engine's scheduler and KV manager over a trace of conversations, without a model: 48 conversations at a time, each
with one of 8 system prompts; half of them drop the reasoning of their answers from the history. The sizes are those of
Qwen3.5: 9B has 24 recurrent and 8 attention layers, 35B-A3B 30 and 10. With half of the memory for states, and with
one snapshot for each row, and host memory for 300 snapshots and as many bytes of blocks.
"""

import argparse
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

import machine

from headrace_proto.block_hash import BlockHasher, derive_key
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.engine import Engine
from headrace_worker.core.guide import Mask
from headrace_worker.core.kv.manager import KVManager, ModelScope
from headrace_worker.core.kv.sizing import size_kv
from headrace_worker.core.layout import CacheGroupSpec, CacheLayout, StateSpec
from headrace_worker.core.plan import RowSampling, StepPlan, StepResult
from headrace_worker.core.request import Request
from headrace_worker.core.scheduler import Scheduler, SchedulerLimits
from headrace_worker.core.transfer.orders import ChunkRead, Load, Store

BLOCK_SIZE = 16
MEMORY = 20 << 30
ACTIVE = 48  # conversations, and rows of the engine
LONGEST = 32_768
HOST_STATES = 300


@dataclass(frozen=True)
class Sizes:
    """Layers of a model in bfloat16: 4 KV heads of 256 (9B), 32 heads of 128 x 128."""

    attention: int
    recurrent: int
    kv_heads: int

    def layout(self, states: bool) -> CacheLayout:
        groups = (CacheGroupSpec(0, tuple(range(self.attention)), self.kv_heads, 256),)
        specs = [
            (StateSpec(layer, "conv", (3, 8192)), StateSpec(layer, "recurrent", (32, 128, 128)))
            for layer in range(self.attention, self.attention + self.recurrent)
        ]
        return CacheLayout(BLOCK_SIZE, groups, 2, tuple(spec for pair in specs for spec in pair) if states else ())


MODELS = {"9B": Sizes(8, 24, 4), "35B-A3B": Sizes(10, 30, 2)}


def conversations(seed: int = 1, sessions: int = 240) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts and answers, in the order of their arrival."""
    random = Random(seed)

    def words(least: int, most: int) -> list[int]:
        return [random.randrange(1000, 150_000) for _ in range(random.randint(least, most))]

    systems = [words(300, 3500) for _ in range(8)]
    live: list[tuple[list[int], list[int], bool]] = []  # history, turns left, whether reasoning is dropped
    while live or sessions:
        while sessions and len(live) < ACTIVE:
            live.append((list(random.choice(systems)), [random.randint(1, 10)], random.random() < 0.5))
            sessions -= 1
        session = random.choice(live)
        history, turns, drops = session
        history += [*words(20, 400), 7, 8]
        thought, answer = words(50, 600), words(30, 400)
        yield [*history, 9, 10], thought + answer  # the template opens the reasoning with 9, 10
        history += answer if drops else [9, 10, *thought, *answer]
        turns[0] -= 1
        if not turns[0]:
            live.remove(session)


class TraceRunner:
    """Samples the tokens of the trace."""

    def __init__(self) -> None:
        self.answers: dict[bytes, list[int]] = {}
        self.copies: list[Load | Store] = []  # to report
        self._rows: dict[int, tuple[int, list[int]]] = {}  # prompt length and answer

    def launch(self, plan: StepPlan) -> StepResult:
        self.copies += [order for order in plan.orders if isinstance(order, Load | Store)]
        for init in plan.inits:
            prompt = init.token_ids[: init.prompt_len]
            self._rows[init.row] = init.prompt_len, self.answers[_key(prompt)]
        tokens = []
        for work in plan.work:
            if work.sample:
                prompt_len, answer = self._rows[work.row]
                tokens.append(answer[work.start + work.count - prompt_len])
        return StepResult(plan.step, tokens, {}, {})

    def draw(self, handle: StepResult, masks: Mapping[int, Mask]) -> None: ...

    def collect(self, handle: StepResult) -> StepResult:
        return handle


def _key(tokens: list[int]) -> bytes:
    return len(tokens).to_bytes(4) + repr(tokens[-64:]).encode()


def replay(sizes: Sizes, running: int, *, states: bool, host: bool = False) -> tuple[float, int, int]:
    """The share of the prompts' tokens that hit the cache, the slots, and the number of requests.

    host: with host memory, and few snapshots beside the running requests.
    """
    layout = sizes.layout(states)
    size = size_kv(
        layout,
        device_type="cuda",
        max_num_seqs=ACTIVE,
        max_model_len=LONGEST,
        kv_cache_memory=MEMORY,
        state_snapshots=ACTIVE if host else None,
        free=MEMORY,
    )
    kv = KVManager(
        layout,
        size.num_blocks,
        BlockHasher(derive_key(b"k")),
        ModelScope("m", "r", "bfloat16", "bfloat16"),
        size.state_slots,
        size.max_num_seqs,
    )
    runner = TraceRunner()
    scheduler = Scheduler(SchedulerLimits(size.max_num_seqs, 8192, ReplicaConfig.max_waiting), kv, time.monotonic)
    host_states = HOST_STATES if host else 0
    host_slots = host_states * layout.state_bytes // layout.block_bytes
    engine = Engine(scheduler, runner, time.monotonic, host_slots=host_slots, host_states=host_states)

    def step() -> None:
        engine.step()
        copies, runner.copies = runner.copies, []
        for order in copies:
            engine.exchange.handle_report(ChunkRead(0, order.fetch, 0, True))

    hits = total = count = 0
    trace, open_requests = conversations(), list[Request]()
    for prompt, answer in trace:
        runner.answers[_key(prompt)] = answer
        request = Request(
            attempt_id=os.urandom(16),
            tokens=list(prompt),
            prompt_len=len(prompt),
            max_len=len(prompt) + len(answer),
            sampling=RowSampling(),
            stop_ids=frozenset(),
            chain=kv.start_chain(b"", ""),
            arrival=time.monotonic(),
        )
        engine.submit(request)
        open_requests.append(request)
        count, total = count + 1, total + len(prompt)
        while len(open_requests) >= running:
            step()
            for done in [request for request in open_requests if request.finish is not None]:
                hits += done.cached_tokens
                open_requests.remove(done)
    while engine.has_work or engine.exchange.busy:
        step()
    hits += sum(request.cached_tokens for request in open_requests)
    scheduler.check(engine.exchange.held(), engine.exchange.held_slots())
    return hits / total, size.state_slots, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=1, help="requests at a time")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    results = {}
    for name in args.models.split(","):
        full, _, count = replay(MODELS[name], args.running, states=False)
        hybrid, slots, _ = replay(MODELS[name], args.running, states=True)
        host, few, _ = replay(MODELS[name], args.running, states=True, host=True)
        results[name] = {
            "requests": count, "running": args.running, "slots": slots, "full": full, "hybrid": hybrid,
            "share": hybrid / full, "host": host, "host_slots": few, "host_share": host / full,
        }  # fmt: skip
        print(
            f"{name}: {count} requests, {args.running} at a time, 20 GiB: {full:.3f} of the tokens of prompts hit with "
            f"full attention, {hybrid:.3f} with {slots} slots of recurrent state: {hybrid / full:.3f} of it; "
            f"{host:.3f} with {few} slots and {HOST_STATES} in host memory: {host / full:.3f} of it",
            flush=True,
        )
    if args.save:
        machine.save("state_hits", results)


if __name__ == "__main__":
    main()
