"""Scheduler and KV bookkeeping without a model: milliseconds per step, and KV slots wasted.

    python benchmarks/bookkeeping.py [--save]

The model is replaced by a constant, so the times are schedule + process of `headrace_worker.core.engine.Engine`.
"""

import argparse
import os
import time
from collections.abc import Mapping
from random import Random
from statistics import median

import machine

from headrace_proto.block_hash import BlockHasher, derive_key
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.engine import Engine
from headrace_worker.core.guide import Mask
from headrace_worker.core.kv.manager import KVManager, ModelScope
from headrace_worker.core.layout import CacheGroupSpec, CacheLayout
from headrace_worker.core.plan import RowSampling, StepPlan, StepResult
from headrace_worker.core.request import Request
from headrace_worker.core.scheduler import Scheduler, SchedulerLimits

BLOCK_SIZE = 16


class ConstantRunner:
    """Returns the same token for every row at once."""

    def launch(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, [11] * sum(work.sample for work in plan.work), {}, {})

    def draw(self, handle: StepResult, masks: Mapping[int, Mask]) -> None: ...

    def collect(self, handle: StepResult) -> StepResult:
        return handle


def make_engine(groups: int) -> tuple[Engine, KVManager, Scheduler]:
    specs = tuple(CacheGroupSpec(index, (index,), 1, 64, 0) for index in range(groups))
    scope = ModelScope("m", "r", "float32", "float32")
    kv = KVManager(CacheLayout(BLOCK_SIZE, specs, 4), 40_000, BlockHasher(derive_key(b"k")), scope)
    scheduler = Scheduler(SchedulerLimits(256, 2048, ReplicaConfig.max_waiting), kv, time.monotonic)
    return Engine(scheduler, ConstantRunner(), time.monotonic), kv, scheduler


def request(kv: KVManager, random: Random, length: int, max_tokens: int) -> Request:
    tokens = [random.randrange(49_152) for _ in range(length)]
    return Request(
        attempt_id=os.urandom(16),
        tokens=tokens,
        prompt_len=length,
        max_len=length + max_tokens,
        sampling=RowSampling(),
        stop_ids=frozenset({2}),
        chain=kv.start_chain(b"", ""),
        arrival=time.monotonic(),
    )


def step_time(running: int, groups: int, steps: int = 400) -> tuple[float, float]:
    """Median and 99th percentile in ms of a decode step of `running` requests with 100 to 600 tokens each."""
    engine, kv, scheduler = make_engine(groups)
    random = Random(0)
    for _ in range(running):
        engine.submit(request(kv, random, random.randrange(100, 600), steps + 600))
    while len(scheduler.waiting) or any(entry.missing > 1 for entry in scheduler.running):
        engine.step()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - began) * 1e3)
    times.sort()
    return median(times), times[int(len(times) * 0.99)]


def waste(mean_length: int) -> tuple[float, int]:
    """Share of allocated slots that hold no token, over a run; and the most slots one request wasted."""
    engine, kv, scheduler = make_engine(1)
    random = Random(1)
    for _ in range(256):
        length = random.randrange(mean_length // 2, mean_length)
        engine.submit(request(kv, random, length, mean_length))
    allocated = empty = most = 0
    while engine.has_work:
        engine.step()
        for entry in scheduler.running:
            if entry.table is not None:
                spare = entry.table.capacity - entry.computed
                allocated += entry.table.capacity
                empty += spare
                most = max(most, spare)
    return empty / allocated, most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="append to results/bookkeeping.jsonl")
    arguments = parser.parse_args()
    steps = {}
    for running, groups in ((1, 1), (32, 1), (256, 1), (256, 2)):
        middle, tail = step_time(running, groups)
        steps[f"{running} running, {groups} group(s)"] = {"p50_ms": round(middle, 3), "p99_ms": round(tail, 3)}
        print(f"{running:4d} running, {groups} cache group(s): p50 {middle:.3f} ms, p99 {tail:.3f} ms per step")
    wasted = {}
    for length in (64, 256, 512):
        share, most = waste(length)
        wasted[str(length)] = {"share": round(share, 4), "most_slots": most}
        print(f"lengths around {length}: {share:.2%} of KV slots empty, at most {most} per request")
    if arguments.save:
        print(machine.save("bookkeeping", {"steps": steps, "kv_waste": wasted}))


if __name__ == "__main__":
    main()
