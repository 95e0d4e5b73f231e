"""The draw of tokens: greedy, with a temperature, truncated; and the same tokens as on a CPU."""

from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING

from gpu_bench.roofline import Cost
from gpu_bench.section import NO_MODEL, Figure, Section, SectionRun

if TYPE_CHECKING:
    from headrace_kernels import DrawOptions

# temperature, top_p, log(min_p), top_k
CASES = {
    "greedy": (0.0, 1.0, -inf, 0),
    "temperature 0.6": (0.6, 1.0, -inf, 0),
    "top-p 0.95": (0.6, 0.95, -inf, 0),
    "top-k 20": (0.6, 1.0, -inf, 20),
    "top-k 20, top-p 0.95": (0.6, 0.95, -inf, 20),
    "min-p 0.05": (0.6, 1.0, -3.0, 0),
}
SPREADS = {"flat": 1.0, "peaked": 5.0}  # of the logits: noise decides; as those of a trained model
VOCAB, CHECKED = 151_936, 64
_CACHED = 50 << 20  # bytes of the second cache


def run(run: SectionRun) -> Iterator[Figure]:
    import torch

    from headrace_kernels import draw
    from headrace_kernels.gpu_benchmark import GpuBenchmark

    cases, random = GpuBenchmark(run.device, run.small), torch.Generator().manual_seed(0)
    vocab = 3000 if run.small else VOCAB
    dtype = torch.bfloat16 if run.device == "cuda" else torch.float32
    for spread, factor in SPREADS.items():
        same = (torch.randn(CHECKED, vocab, generator=random) * factor).to(dtype)
        for name, numbers in CASES.items():
            rows = torch.arange(CHECKED)
            host, _ = draw(same, rows, rows, options(*numbers, CHECKED, "cpu"))
            at = rows.to(run.device)
            found, _ = draw(same.to(run.device), at, at, options(*numbers, CHECKED, run.device))
            equal = int((found.cpu() == host).sum())
            yield Figure.check(f"{spread}, {name}: the tokens of a CPU", equal == CHECKED, rows=CHECKED, equal=equal)
        for count in (2,) if run.small else (1, 32, 256):
            logits = (torch.randn(count, vocab, device=run.device) * factor).to(dtype)
            at = torch.arange(count, device=run.device)
            for name, numbers in CASES.items():
                seconds = cases.seconds(draw, logits, at, at, options(*numbers, count, run.device))
                # A step's logits have just been written: those of few rows are in the cache, here as there.
                floor = run.ceilings.seconds(Cost(logits.nbytes)) if logits.nbytes > _CACHED else 0.0
                yield Figure(f"{spread}, {name}, rows {count}", seconds * 1e6, "us", floor * 1e6)


def options(temperature: float, top_p: float, log_min_p: float, top_k: int, rows: int, device: str) -> "DrawOptions":
    """The same of all rows, each with a key of its own."""
    import torch

    from headrace_kernels import DrawOptions

    numbers = torch.tensor([[temperature, top_p, log_min_p]], device=device).repeat(rows, 1)
    keys = torch.arange(rows, device=device)
    return DrawOptions(numbers, torch.stack([keys, torch.full_like(keys, top_k)], 1))


SECTION = Section("sampler", "draws of tokens, alone; and equal to those of a CPU", (NO_MODEL,), 60, run)
