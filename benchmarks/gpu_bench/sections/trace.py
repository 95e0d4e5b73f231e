"""Twenty steps under the profiler: the device's true gap, the time in which it computes nothing, and its kernels."""

import gzip
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_bench.section import Figure, Section, SectionRun

STEPS = 20
BATCHES = (1, 32, 256)
SMALL_BATCHES = (1, 8)
WAIT_SECONDS = 60.0


def run(run: SectionRun) -> Iterator[Figure]:
    from gpu_bench.timeline import read_timeline

    bench = run.bench(profile_dir=str(run.folder))
    assert bench.profiler is not None
    bench.profiler.warm_up()
    context = 32 if run.small else 512
    for batch in SMALL_BATCHES if run.small else BATCHES:
        bench.run([(context, 8)] * batch)
        report, name = record(bench, batch, context), f"{run.model}-batch-{batch}.trace.json.gz"
        trace = Path(report.path)
        (run.results / name).write_bytes(trace.read_bytes())
        timeline = read_timeline(gzip.decompress(trace.read_bytes()), on_device=run.device == "cuda")
        steps = report.steps
        floor = run.ceilings.seconds(bench.sizes.decode([context + steps / 2] * batch))
        yield Figure(f"batch {batch}: a step", timeline.span / steps * 1e3, "ms", floor * 1e3, {"steps": steps})
        yield Figure(f"batch {batch}: busy in a step", timeline.busy / steps * 1e3, "ms", floor * 1e3)
        yield Figure(
            f"batch {batch}: gap in a step", (timeline.span - timeline.busy) / steps * 1e3, "ms",
            extra={"longest_us": round(timeline.longest_gap * 1e6, 1), "trace": name},
        )  # fmt: skip
        yield Figure(f"batch {batch}: kernels of a step", timeline.events / steps, "kernels", extra={"top": [
            {"name": operator.name[:80], "calls": operator.calls, "ms": round(operator.milliseconds, 3)}
            for operator in report.operators if operator.on_device or run.device == "cpu"
        ]})  # fmt: skip
    bench.close()


def record(bench: Any, batch: int, context: int) -> Any:
    """A profile of steps that decode: opened once all prompts are computed."""
    window: list[Any] = []

    def after() -> None:
        running = bench.engine.assembly.engine.scheduler.running
        if not window and len(running) == batch and all(request.computed > context for request in running):
            window.append(bench.profiler.open(STEPS, WAIT_SECONDS))

    bench.engine.generate(bench.prompts([(context, 2 * STEPS)] * batch), after_step=after)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(window[0].wait(WAIT_SECONDS)))
    waiting.start()
    while waiting.is_alive():
        bench.engine.assembly.engine.run_empty_step()  # ends the window, should it still be open
        waiting.join(0.1)
    return found[0]


SECTION = Section("trace", "20 steps of the profiler: the true gap", ("qwen3-0.6b", "llama-8b"), 200, run)
