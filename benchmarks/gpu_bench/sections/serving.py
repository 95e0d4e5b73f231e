"""Many requests at once, to the end of all: tokens per second, and the times of their first tokens."""

from collections.abc import Iterator
from random import Random
from statistics import quantiles

from gpu_bench.section import Figure, Section, SectionRun

MIXED, EQUAL = "qwen3-0.6b", "llama-8b"


def workload(model: str, small: bool) -> tuple[str, list[tuple[int, int]]]:
    """Its name, and (input, output) tokens of each request.

    The mixed one has the lengths of nano-vllm's benchmark (its README): uniform in 100 to 1,024, in and out.
    """
    if model.startswith(EQUAL):
        return "256 requests of 1024 in, 1024 out", [(1024, 1024)] * 256
    random = Random(0)
    if small:
        return "16 requests of 10-60", [(random.randint(10, 60), random.randint(10, 60)) for _ in range(16)]
    return "256 requests of 100-1024", [(random.randint(100, 1024), random.randint(100, 1024)) for _ in range(256)]


def run(run: SectionRun) -> Iterator[Figure]:
    from gpu_bench.bench import SAMPLINGS

    name, lengths = workload(run.model, run.small)
    prompts, output = (sum(part) for part in zip(*lengths, strict=True))
    bench = run.usual_bench()
    bench.run([(length, 8) for length, _ in lengths[:8]])
    floor = run.ceilings.seconds(bench.sizes.workload(lengths))
    for sampling_name, sampling in SAMPLINGS.items():
        seconds, done, facts = bench.run(lengths, sampling)
        label = f"{name}, {sampling_name}"
        yield Figure(
            label, output / seconds, "tok/s", output / floor,
            {"seconds": round(seconds, 2), "total_tok_s": round((output + prompts) / seconds)} | facts,
        )  # fmt: skip
        first = sorted(completion.first_token_at for completion in done)
        yield Figure(
            f"{label}: first tokens, p50", first[len(first) // 2] * 1e3, "ms",
            extra={"p99_ms": round(quantiles(first, n=100)[98] * 1e3, 1)},
        )  # fmt: skip


SECTION = Section("serving", "256 requests at once, mixed lengths or 1k in, 1k out", (MIXED, EQUAL), 200, run)
