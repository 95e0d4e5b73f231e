"""Products of codes: right, and what they are worth at batch 1, 32, 256 and with many requests.

Those of few bits are compared while the model is loaded, and a wrong one ends the section.
"""

from collections.abc import Iterator

from gpu_bench.section import Figure, Section, SectionRun
from gpu_bench.sections import decode, serving

_WRONG = 0.02  # of the largest output; results are rounded to bfloat16


def run(run: SectionRun) -> Iterator[Figure]:
    import torch

    import headrace_kernels.ops as ops
    from headrace_kernels.reference.rounded import scaled_matmul
    from headrace_worker.model.surgery.scaled import ScaledLinear, WeightOnlyLinear

    bench = run.usual_bench()
    parts = list(bench.model.module.modules())
    linears = [part for part in parts if isinstance(part, ScaledLinear)]
    few_bits = sum(isinstance(part, WeightOnlyLinear) for part in parts)
    yield Figure.check("linears of codes", bool(linears or few_bits) or run.device == "cpu", few_bits=few_bits)
    with torch.inference_mode():
        for linear in linears[:4]:
            outputs, inputs = linear.scaled.codes.shape
            for rows in (1, 5, 256):
                x = ops.round_rows(torch.randn(rows, inputs, device=run.device, dtype=linear.dtype), linear.in_blocks)
                expected = scaled_matmul(x, linear.scaled, None, torch.float32)
                found = ops.scaled_matmul(x, linear.scaled, None, linear.dtype).float()
                error = float((found - expected).abs().max() / expected.abs().max())
                yield Figure.check(f"{outputs} x {inputs}, rows {rows}", error < _WRONG, error=round(error, 5))
    yield from decode.run(run)
    yield from serving.run(run)


SECTION = Section(
    "quantized", "FP8 weights, inputs and cache, int4 weights: right, decode, 256 requests",
    ("llama-8b-fp8", "llama-8b-fp8-cache", "llama-8b-int4"), 700, run, small=("tiny-fp8", "tiny-int4"),
)  # fmt: skip
