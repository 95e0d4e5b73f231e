"""All sections, by name, in the order in which they run."""

from gpu_bench.section import Section
from gpu_bench.sections import (
    correctness,
    decode,
    kernels,
    libraries,
    modes,
    nccl,
    sampler,
    serving,
    trace,
    transfer,
    ttft,
)

SECTIONS: dict[str, Section] = {
    module.SECTION.name: module.SECTION
    for module in (nccl, correctness, kernels, sampler, libraries, decode, trace, serving, ttft, transfer, modes)
}
