"""Steady decoding: batch 1, 32 and 256, greedy and sampled, with a low and a high limit of a request's length."""

from collections.abc import Iterator, Sequence
from functools import partial

from gpu_bench.section import Figure, Section, SectionRun

BATCHES = (1, 32, 256)
SMALL_BATCHES = (1, 8)
LIMITS = (4096, 40960)


def run(run: SectionRun, limits: Sequence[int] = LIMITS) -> Iterator[Figure]:
    from gpu_bench.bench import SAMPLINGS

    context, steps = (32, 16) if run.small else (512, 128)
    loaded = None
    for limit in limits:
        bench = run.bench(max_model_len=limit, loaded=loaded)
        for batch in SMALL_BATCHES if run.small else BATCHES:
            cost = bench.sizes.decode([context + steps / 2] * batch)
            floor = run.ceilings.seconds(cost)
            for name, sampling in SAMPLINGS.items():
                step = bench.decode_seconds(batch, context, steps, sampling)
                yield Figure(
                    f"batch {batch}, {name}, limit {limit}",
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
        yield Figure(f"start, limit {limit}", bench.seconds_to_ready, "s")
        loaded = bench.close()


SECTION = Section(
    "decode", "steps of batch 1, 32, 256; greedy and sampled; two limits", ("qwen3-0.6b", "llama-8b"), 410, run
)

OTHER_CACHES = Section(
    "other-caches", "steps of batch 1, 32, 256 with recurrent states, and with latents",
    ("qwen3.5-9b", "deepseek-v2-lite"), 300, partial(run, limits=LIMITS[:1]),
)  # fmt: skip
