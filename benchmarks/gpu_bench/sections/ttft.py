"""The time to the first token: prompts alone, prompts that are cached, and many at once."""

from collections.abc import Iterator
from statistics import median

from gpu_bench.section import Figure, Section, SectionRun

ROUNDS = 3


def run(run: SectionRun) -> Iterator[Figure]:
    lengths = (16, 200) if run.small else (128, 1024, 4096, 16384)
    burst, burst_length = (4, 40) if run.small else (32, 1024)
    bench = run.usual_bench()
    bench.run([(lengths[0], 2)])
    for length in lengths:
        alone, cached = [], []
        for _ in range(ROUNDS):
            prompts = bench.prompts([(length, 1)])
            alone.append(bench.engine.generate(prompts)[0].first_token_at)
            again = bench.engine.generate(prompts)[0]
            cached.append(again.first_token_at)
        floor = run.ceilings.seconds(bench.sizes.prefill(length))
        yield Figure(f"prompt of {length}", median(alone) * 1e3, "ms", floor * 1e3)
        floor = run.ceilings.seconds(bench.sizes.decode([length]))
        yield Figure(
            f"prompt of {length}, cached", median(cached) * 1e3, "ms", floor * 1e3,
            {"cached_tokens": again.cached_tokens},
        )  # fmt: skip
    done = bench.engine.generate(bench.prompts([(burst_length, 1)] * burst))
    first = sorted(completion.first_token_at for completion in done)
    whole = bench.sizes.prefill(burst_length)
    floor = run.ceilings.seconds(type(whole)(whole.bytes, whole.flop * burst))
    yield Figure(f"last of {burst} prompts of {burst_length} at once", first[-1] * 1e3, "ms", floor * 1e3,
                 {"p50_ms": round(median(first) * 1e3, 1)})  # fmt: skip


SECTION = Section("ttft", "first tokens: alone, cached, 32 prompts at once", ("qwen3-0.6b", "llama-8b"), 110, run)
