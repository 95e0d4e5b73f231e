"""One engine on a GPU, and its measurements."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from gpu_models import write_config

PEAK_GB_S = 4300.0  # of an H200, measured with copies
Result = dict[str, Any]


class Bench:
    """One engine over random weights."""

    def __init__(self, model: str, folder: Path, device: str, **options: Any) -> None:
        from headrace_worker.core.config import ReplicaConfig
        from headrace_worker.offline import OfflineEngine

        fields: dict[str, Any] = {
            "dtype": "bfloat16" if device == "cuda" else "float32",
            "max_model_len": 4096,
            "max_num_seqs": 256,
        }
        source = str(write_config(model, folder))
        self.config = ReplicaConfig(
            replica_id="bench", model=model, source=source, device=device, load_format="dummy",
            **fields | options,
        )  # fmt: skip
        began = time.perf_counter()
        self.engine = OfflineEngine(self.config)
        self.seconds_to_ready = time.perf_counter() - began
        self.vocab = self.engine.assembly.model.vocab_size
        self.random = Random(0)

    def prompts(self, lengths: list[tuple[int, int]]) -> list[Any]:
        """Requests of (input, output) tokens that never stop early."""
        from headrace_worker.offline import Prompt

        ids = [[self.random.randrange(10, self.vocab) for _ in range(length)] for length, _ in lengths]
        return [Prompt(one, out, ignore_eos=True) for one, (_, out) in zip(ids, lengths, strict=True)]

    def run(self, lengths: list[tuple[int, int]]) -> Result:
        """Runs all requests at once, to the end."""
        with self.host_times() as host, self.step_memory() as memory:
            began = time.perf_counter()
            done = self.engine.generate(self.prompts(lengths))
            seconds = time.perf_counter() - began
        assert all(len(completion.token_ids) == out for completion, (_, out) in zip(done, lengths, strict=True))
        output = sum(out for _, out in lengths)
        return {
            "requests": len(lengths),
            "output_tok_s": round(output / seconds, 1),
            "total_tok_s": round((output + sum(length for length, _ in lengths)) / seconds, 1),
            "seconds": round(seconds, 2),
            **host,
            **memory,
        }

    def decode(self, batch: int, context: int, steps: int) -> Result:
        """Steady decoding: the time of steps once every prompt is computed."""
        times: list[float] = []
        last = [0.0]

        def after() -> None:
            now = time.perf_counter()
            running = self.engine.assembly.engine.scheduler.running
            if len(running) == batch and all(request.computed > context for request in running):
                times.append(now - last[0])
            last[0] = now

        self.engine.generate(self.prompts([(context, steps)] * batch), after_step=after)
        step = median(times[3:-3] or times)
        assembly = self.engine.assembly
        kv = batch * (context + steps / 2) * assembly.model.layout.block_bytes / assembly.model.layout.block_size
        read = assembly.model.weight_bytes + kv * len(assembly.model.layout.groups)
        return {
            "step_ms": round(step * 1e3, 3),
            "output_tok_s": round(batch / step, 1),
            "gb_s": round(read / step / 1e9, 1),
            "of_peak": round(read / step / 1e9 / PEAK_GB_S, 3),
        }

    @contextmanager
    def step_memory(self) -> Iterator[Result]:
        """GiB that steps use besides weights and cache while in the block; on GPUs only."""
        import torch

        found: Result = {}
        model = self.engine.assembly.model
        if model.device.torch_device.type != "cuda":
            yield found
            return
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        found["step_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)

    @contextmanager
    def host_times(self) -> Iterator[Result]:
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
        found: Result = {}
        try:
            yield found
        finally:
            runner.collect, engine.step = collect, step
            ordered = sorted(steps) or [0.0]
            found["host_us_p50"] = round(median(ordered) * 1e6, 1)
            found["host_us_p99"] = round(ordered[int(len(ordered) * 0.99)] * 1e6, 1)
            found["steps"] = len(steps)
