"""The gain of graphs and of asynchronous scheduling, the cost of determinism; whether a row depends on its batch."""

from collections.abc import Iterator
from typing import Any

from gpu_bench.section import Figure, Section, SectionRun

MODES: dict[str, dict[str, Any]] = {
    "graphs, one step ahead": {},
    "no graphs": {"cuda_graphs": "off"},
    "one step at a time": {"async_scheduling": "off"},
    "no graphs, one step at a time": {"cuda_graphs": "off", "async_scheduling": "off"},
    "deterministic": {"deterministic": True},
}


def run(run: SectionRun) -> Iterator[Figure]:
    context, steps = (32, 16) if run.small else (512, 128)
    for name, options in MODES.items():
        bench = run.bench(**options)
        for batch in (1, 32):
            floor = run.ceilings.seconds(bench.sizes.decode([context + steps / 2] * batch))
            step = bench.decode_seconds(batch, context, steps)
            yield Figure(f"{name}, batch {batch}", batch / step, "tok/s", batch / floor)
        prompts = bench.prompts([(length, 16) for length in range(5, 85, 5)])
        together = [completion.token_ids for completion in bench.engine.generate(prompts)]
        alone = [bench.engine.generate([prompt])[0].token_ids for prompt in prompts]
        equal = sum(one == other for one, other in zip(alone, together, strict=True))
        if name == "deterministic" or run.device == "cpu":
            yield Figure.check(f"{name}: alone as together", equal == len(prompts), equal=equal, of=len(prompts))
        else:
            yield Figure(f"{name}: alone as together", equal, f"of {len(prompts)}")
        bench.close()


SECTION = Section("modes", "graphs, scheduling one step ahead, determinism", ("qwen3-0.6b",), 90, run)
