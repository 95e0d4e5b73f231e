"""The host's part of a step without a model, by function: a GPU waits for it when the host is slow.

    python benchmarks/host_step.py [--running 1,32,256] [--sampling greedy,mixed] [--max-len 2048] [--steps 400]
        [--profile] [--save]

A real engine loop over a model without arithmetic: it returns the same logits at once, over so small a vocabulary that
sampling costs calls, not arithmetic. Decode steps of requests with 100 to 600 tokens, on a device that takes the paths
of a GPU, recorded steps included: copies to it are copies in memory, and launches are not included (benchmarks/gpu.py
measures the gap there). --max-len: the limit of tokens of a request, for which tables are.

`step` is one turn of the loop without the model's call. `plan to ranks` (several ranks only) is part of a step there;
`deliver` runs on the thread of the gRPC server, under the same interpreter lock.
"""

import argparse
import asyncio
import cProfile
import gc
import os
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any, TypeVar

import machine
import torch
from torch import Tensor, nn

from headrace_proto.block_hash import BlockHasher, derive_key
from headrace_worker.assembly.command_queue import CommandQueue
from headrace_worker.assembly.loop import EngineLoop, StepReport
from headrace_worker.comm.parallel_context import SINGLE
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.engine import Engine
from headrace_worker.core.kv.manager import KVManager, ModelScope
from headrace_worker.core.layout import CacheGroupSpec, CacheLayout
from headrace_worker.core.load_reports import ReportPacer, ReportState
from headrace_worker.core.plan import RowSampling, StepPlan
from headrace_worker.core.request import Request
from headrace_worker.core.scheduler import Scheduler, SchedulerLimits
from headrace_worker.device.cpu import CpuDevice
from headrace_worker.ranks.messages import Step, encoder
from headrace_worker.runner.batch import Batch
from headrace_worker.runner.pools import KVPools
from headrace_worker.runner.rank_runner import Runner
from headrace_worker.server.convert import to_load
from headrace_worker.server.servicer import Outbox

ROWS, VOCABULARY, BLOCK_SIZE = 256, 128, 16
T = TypeVar("T")
LAYOUT = CacheLayout(BLOCK_SIZE, (CacheGroupSpec(0, (0,), 1, 1, 0),), 4)
PARTS = ("expire", "schedule", "prepare", "sample", "apply_tokens", "collect", "observe", "process", "load")


class NoModel(nn.Module):
    """Replaces a model, so that a runner can be constructed."""

    base_model = None

    def forward(self, logits_to_keep: Tensor) -> None: ...


class CountingDevice(CpuDevice):
    """Counts the bytes that are sent to it."""

    asynchronous = True

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def upload(self, tensor: Tensor) -> Tensor:
        self.sent += tensor.nbytes
        return tensor.clone()

    def upload_into(self, target: Tensor, tensor: Tensor) -> None:
        self.sent += tensor.nbytes
        super().upload_into(target, tensor)


class FixedSteps:
    """Recorded steps that return the same."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self._outputs = outputs

    def allocate(self, make: Callable[[], T]) -> T:
        return make()

    def warm_up(self, step: Callable[[], object]) -> None: ...

    def record(self, step: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        return lambda: None, self._outputs

    def seconds(self, replay: Callable[[], None]) -> float:
        return 1.0


class FixedRunner(Runner):
    """A runner without a model."""

    def __init__(self, max_len: int) -> None:
        self.counting = CountingDevice()
        model: Any = SimpleNamespace(
            layout=LAYOUT,
            device=self.counting,
            dtype=torch.float32,
            module=NoModel(),
            parallel=SINGLE,
            config=SimpleNamespace(),
        )
        model.vocab_size, model.deterministic = VOCABULARY, False
        super().__init__(model, KVPools.of(model, 20_000), max_rows=ROWS, max_len=max_len)
        self._logits = torch.rand(ROWS, VOCABULARY)
        self.record(FixedSteps((self._logits, torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS))))
        self.plan: StepPlan | None = None

    def prepare(self, plan: StepPlan) -> Batch | None:
        self.plan = plan
        return super().prepare(plan)

    def forward(self, batch: Batch, hidden_in: Tensor | None = None) -> Tensor | None:
        return self._logits[: len(batch.sample_rows)].clone() if batch.sample_rows else None


class Times:
    """Microseconds by part."""

    def __init__(self) -> None:
        self.current: defaultdict[str, float] = defaultdict(float)
        self.all: defaultdict[str, list[float]] = defaultdict(list)
        self.names: set[str] = set()

    def watch(self, owner: Any, *names: str) -> None:
        """Measures calls of these methods of one object."""
        for name in names:
            setattr(owner, name, self._timed(name, getattr(owner, name)))
            self.names.add(name)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.current[name] += (time.perf_counter() - began) * 1e6

        return timed

    def close(self, step: float) -> None:
        """A turn of the loop took `step` µs, the model included."""
        self.current["step"] = step - self.current.pop("forward", 0.0)
        for name in self.current.keys() | self.names:
            self.all[name].append(self.current[name])
        self.current.clear()


class Bench:
    """An engine loop without its thread, and one router's outbox."""

    def __init__(self, running: int, sampling: str, max_len: int, steps: int) -> None:
        random = Random(0)
        scope = ModelScope("m", "r", "float32", "float32")
        self.kv = KVManager(LAYOUT, 20_000, BlockHasher(derive_key(b"k")), scope)
        self.scheduler = Scheduler(SchedulerLimits(ROWS, 2048, ReplicaConfig.max_waiting), self.kv, time.monotonic)
        self.max_len = max_len
        self.runner = FixedRunner(max_len)
        self.engine = Engine(self.scheduler, self.runner, time.monotonic)
        self.report: StepReport | None = None
        self.loop = EngineLoop(self.engine, self._take, CommandQueue())
        self.outbox = Outbox(ReportPacer(), time.monotonic)
        self.events = asyncio.new_event_loop()
        for number in range(running):
            self.engine.submit(self._request(random, number, sampling, steps))
        while len(self.scheduler.waiting) or any(entry.missing > 1 for entry in self.scheduler.running):
            self.loop._run_once()
        for _ in range(20):
            self.loop._run_once()
        gc.collect()
        gc.freeze()  # as a replica does once it has loaded

    def _take(self, report: StepReport) -> None:
        self.report = report

    def _request(self, random: Random, number: int, sampling: str, steps: int) -> Request:
        length = random.randrange(100, 600)
        options = RowSampling(temperature=0.0)
        if sampling == "mixed" and number % 4:
            options = (
                RowSampling(temperature=0.8, seed=number),
                RowSampling(temperature=0.8, top_p=0.9, seed=number),
                RowSampling(temperature=0.8, repetition_penalty=1.1, seed=number),
            )[number % 4 - 1]
        return Request(
            attempt_id=os.urandom(16),
            tokens=[random.randrange(VOCABULARY) for _ in range(length)],
            prompt_len=length,
            max_len=min(self.max_len, length + steps + 200),
            sampling=options,
            stop_ids=frozenset(),
            chain=self.kv.start_chain(b"", ""),
            arrival=time.monotonic(),
        )

    def deliver(self) -> None:
        """The work of the server's thread per step and router: deltas, a frame, its bytes."""
        report = self.report
        assert report is not None
        self.outbox.put(report.outputs)
        load = to_load(report.load, report.step, report.draining, report.idle_steps)
        self.outbox.set_heartbeat(report.step, load, ReportState(report.load.predicted_step))
        frame = self.events.run_until_complete(self.outbox.take())
        assert frame is not None and len(frame.deltas) == len(report.outputs)
        frame.SerializeToString()

    def encode(self) -> None:
        """The additional work of rank 0 of several ranks: the plan as bytes."""
        assert self.runner.plan is not None
        encoder.encode(Step(self.runner.plan, []))

    def measure(self, steps: int) -> dict[str, dict[str, float]]:
        times = Times()
        times.watch(self.scheduler, "expire", "schedule", "process")
        times.watch(self.runner, "prepare", "forward", "sample", "apply_tokens", "collect")
        times.watch(self.engine.latency, "observe")
        times.watch(self.engine, "load")
        extra = Times()
        extra.watch(self, "deliver", "encode")
        sent = self.runner.counting.sent
        for _ in range(steps):
            began = time.perf_counter()
            self.loop._run_once()
            times.close((time.perf_counter() - began) * 1e6)
            self.deliver()
            self.encode()
            extra.close(0)
        self.sent = (self.runner.counting.sent - sent) / steps
        found = {name: times.all[name] for name in PARTS}
        found["rest"] = [
            total - sum(parts)
            for total, *parts in zip(times.all["step"], *(times.all[name] for name in PARTS), strict=True)
        ]
        found |= {"step": times.all["step"], "plan to ranks": extra.all["encode"], "deliver": extra.all["deliver"]}
        return {name: _summary(values) for name, values in found.items()}

    def profile(self, steps: int) -> None:
        """Prints the time of `steps` turns by function."""
        recorder = cProfile.Profile()
        recorder.enable()
        for _ in range(steps):
            self.loop._run_once()
        recorder.disable()
        pstats.Stats(recorder).sort_stats("tottime").print_stats(25)

    def close(self) -> None:
        self.events.close()
        gc.unfreeze()


def _summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"p50_us": round(median(ordered), 1), "p99_us": round(ordered[int(len(ordered) * 0.99)], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="1,32,256", help="requests that decode, at most 256")
    parser.add_argument("--sampling", default="greedy,mixed")
    parser.add_argument("--max-len", type=int, default=2048, help="tokens of a request")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--profile", action="store_true", help="time of a step by function (cProfile, which adds overhead)"
    )
    parser.add_argument("--save", action="store_true", help="append to results/host_step.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, dict[str, dict[str, float]]] = {}
    sent: dict[str, float] = {}
    for sampling in arguments.sampling.split(","):
        for running in map(int, arguments.running.split(",")):
            bench = Bench(running, sampling, arguments.max_len, arguments.steps)
            if arguments.profile:
                print(f"{running} running, {sampling}")
                bench.profile(arguments.steps)
            else:
                result[f"{running} {sampling}"] = bench.measure(arguments.steps)
                sent[f"{running} {sampling}"] = round(bench.sent)
            bench.close()
    if arguments.profile:
        return
    print(f"µs, p50 / p99   {''.join(f'{case:>20s}' for case in result)}")
    for part in next(iter(result.values())):
        cells = (f"{found[part]['p50_us']:.0f} / {found[part]['p99_us']:.0f}" for found in result.values())
        print(f"{part:<16s}{''.join(f'{cell:>20s}' for cell in cells)}")
    print(f"{'bytes sent':<16s}{''.join(f'{count:>20.0f}' for count in sent.values())}")
    if arguments.save:
        print(machine.save("host_step", {"microseconds": result, "bytes": sent, "max_len": arguments.max_len}))


if __name__ == "__main__":
    main()
