"""Samples tokens from logits: vectorised over rows, each row with its own options and noise."""

from headrace_worker.sampler.batch import SampleBatch
from headrace_worker.sampler.masks import NO_MASKS
from headrace_worker.sampler.output import SampleOutput
from headrace_worker.sampler.sampler import Sampler

__all__ = ["NO_MASKS", "SampleBatch", "SampleOutput", "Sampler"]
