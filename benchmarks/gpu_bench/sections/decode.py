"""Steady decoding: batch 1, 32 and 256, greedy and sampled."""

from collections.abc import Iterator

from gpu_bench.section import Figure, Section, SectionRun

BATCHES = (1, 32, 256)
SMALL_BATCHES = (1, 8)


def run(run: SectionRun) -> Iterator[Figure]:
    from gpu_bench.bench import SAMPLINGS

    context, steps = (32, 16) if run.small else (512, 128)
    bench = run.usual_bench()
    for batch in SMALL_BATCHES if run.small else BATCHES:
        cost = bench.sizes.decode([context + steps / 2] * batch)
        floor = run.ceilings.seconds(cost)
        for name, sampling in SAMPLINGS.items():
            step = bench.decode_seconds(batch, context, steps, sampling)
            yield Figure(
                f"batch {batch}, {name}",
                batch / step,
                "tok/s",
                batch / floor,
                {
                    "step_ms": round(step * 1e3, 4),
                    "floor_ms": round(floor * 1e3, 4),
                    "gb_s": round(cost.bytes / step / 1e9, 1),
                    "tflop_s": round(cost.flop / step / 1e12, 2),
                },
            )
    yield Figure("start", bench.seconds_to_ready, "s")


SECTION = Section("decode", "steps of batch 1, 32, 256; greedy and sampled", ("qwen3-0.6b", "llama-8b"), 120, run)
OTHER_CACHES = Section(
    "other-caches", "steps of batch 1, 32, 256 with recurrent states, and with latents",
    ("qwen3.5-9b", "deepseek-v2-lite"), 200, run,
)  # fmt: skip
