"""Each kernel beside the same work in torch's libraries: attention, row ops, products."""

from collections.abc import Iterator

from gpu_bench.roofline import Cost
from gpu_bench.section import NO_MODEL, Figure, Section, SectionRun


def run(run: SectionRun) -> Iterator[Figure]:
    import torch

    from headrace_kernels.gpu_benchmark import GpuBenchmark

    cases = GpuBenchmark(run.device, run.small)
    with torch.inference_mode():
        for part in (cases.decode, cases.prefill, cases.products, cases.products_of_8_bits, cases.rows):
            for timing in part():
                yield Figure(
                    f"{timing.case}, {timing.backend}",
                    timing.seconds * 1e6,
                    "us",
                    run.ceilings.seconds(Cost(timing.bytes, timing.flop)) * 1e6,
                )


SECTION = Section("libraries", "attention, row ops and products beside torch's libraries", (NO_MODEL,), 120, run)
