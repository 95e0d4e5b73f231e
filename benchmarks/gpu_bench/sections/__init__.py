"""All sections, by name, in the order in which they run."""

from gpu_bench.section import Section
from gpu_bench.sections import (
    correctness,
    decode,
    families,
    kernels,
    libraries,
    modes,
    nccl,
    quantized,
    sampler,
    serving,
    trace,
    transfer,
    ttft,
)

SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (
        nccl.SECTION,
        correctness.SECTION,
        families.SECTION,
        kernels.SECTION,
        sampler.SECTION,
        libraries.SECTION,
        decode.SECTION,
        decode.OTHER_CACHES,
        trace.SECTION,
        serving.SECTION,
        quantized.SECTION,
        ttft.SECTION,
        transfer.SECTION,
        modes.SECTION,
    )
}
