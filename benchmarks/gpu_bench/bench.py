"""One engine over random weights, and what is measured of it."""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from gpu_bench.models import OPTIONS, write_config
from gpu_bench.roofline import ModelSizes
from headrace_worker.assembly.assemble import assemble
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.plan import RowSampling
from headrace_worker.model.load import LoadedModel, load
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.offline import Completion, OfflineEngine, Prompt
from headrace_worker.profiling.profiler import StepProfiler, make_profiler

Lengths = Sequence[tuple[int, int]]  # (input, output) tokens of requests

GREEDY = RowSampling(temperature=0.0)
SAMPLED = RowSampling(temperature=0.6, top_p=0.95)
SAMPLINGS = {
    "greedy": GREEDY,
    "temperature 0.6, top-p 0.95": SAMPLED,
    "temperature 0.6, top-k 20, top-p 0.95": RowSampling(temperature=0.6, top_k=20, top_p=0.95),
}


class Bench:
    """An engine that is made once; `close` frees its memory."""

    def __init__(
        self,
        model: str,
        folder: Path,
        device: str,
        loaded: LoadedModel | None = None,
        plan: SurgeryPlan | None = None,
        **options: Any,
    ) -> None:
        """`loaded`: weights of another bench of the same model, dtype and mode. `options`: of `ReplicaConfig`."""
        fields: dict[str, Any] = {
            "dtype": "bfloat16" if device == "cuda" else "float32",
            "max_model_len": 4096,
            "max_num_seqs": 256,
            "load_format": "dummy",
        }
        self.config = ReplicaConfig(
            replica_id="bench", model=model, source=str(write_config(model, folder)), device=device,
            **fields | OPTIONS.get(model, {}) | options,
        )  # fmt: skip
        began = time.perf_counter()
        if plan is not None:
            loaded = load(self.config, plan=plan)
        self.profiler: StepProfiler | None = make_profiler(self.config, 0)
        self.engine = OfflineEngine(assemble(self.config, model=loaded, profiler=self.profiler))
        self.seconds_to_ready = time.perf_counter() - began
        self.model = self.engine.assembly.model
        self.sizes = ModelSizes.of(self.model)
        self.random = Random(0)
        print(f"{model} {options}: ready after {self.seconds_to_ready:.1f} s", *self.engine.assembly.notes, sep="\n  ")

    def close(self) -> LoadedModel:
        """Frees the engine and its cache; returns the weights."""
        import torch

        model = self.model
        del self.engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return model

    def prompts(self, lengths: Lengths, sampling: RowSampling = GREEDY) -> list[Prompt]:
        """Requests that never stop early."""
        ids = [[self.random.randrange(10, self.model.vocab_size) for _ in range(length)] for length, _ in lengths]
        return [Prompt(one, out, sampling, ignore_eos=True) for one, (_, out) in zip(ids, lengths, strict=True)]

    def run(self, lengths: Lengths, sampling: RowSampling = GREEDY) -> tuple[float, list[Completion], dict[str, Any]]:
        """Seconds of all requests at once, to the end; their completions; facts about the steps."""
        with self._host_times() as facts:
            prompts = self.prompts(lengths, sampling)
            began = time.perf_counter()
            done = self.engine.generate(prompts)
            seconds = time.perf_counter() - began
        if any(len(completion.token_ids) != out for completion, (_, out) in zip(done, lengths, strict=True)):
            raise AssertionError(f"requests ended early: {next(one.error for one in done if one.error)}")
        return seconds, done, facts | {"preemptions": sum(completion.preemptions for completion in done)}

    def decode_seconds(self, batch: int, context: int, steps: int, sampling: RowSampling = GREEDY) -> float:
        """Median time of a step of steady decoding, once every prompt is computed."""
        times: list[float] = []
        last = [0.0]

        def after() -> None:
            now = time.perf_counter()
            running = self.engine.assembly.engine.scheduler.running
            if len(running) == batch and all(request.computed > context for request in running):
                times.append(now - last[0])
            last[0] = now

        self.engine.generate(self.prompts([(context, steps)] * batch, sampling), after_step=after)
        return median(times[3:-3] or times)

    @contextmanager
    def _host_times(self) -> Iterator[dict[str, Any]]:
        """Microseconds per step that the host spends outside of waiting for results, while in the block."""
        engine: Any = self.engine.assembly.engine
        runner = engine._runner
        waits: list[float] = []
        steps: list[float] = []
        collect, step = runner.collect, engine.step

        def timed_collect(handle: Any) -> Any:
            began = time.perf_counter()
            try:
                return collect(handle)
            finally:
                waits.append(time.perf_counter() - began)

        def timed_step() -> Any:
            began, count = time.perf_counter(), len(waits)
            outputs = step()
            steps.append(time.perf_counter() - began - sum(waits[count:]))
            return outputs

        runner.collect, engine.step = timed_collect, timed_step
        found: dict[str, Any] = {}
        try:
            yield found
        finally:
            runner.collect, engine.step = collect, step
            ordered = sorted(steps) or [0.0]
            found["host_us_p50"] = round(median(ordered) * 1e6, 1)
            found["host_us_p99"] = round(ordered[int(len(ordered) * 0.99)] * 1e6, 1)
            found["steps"] = len(steps)
