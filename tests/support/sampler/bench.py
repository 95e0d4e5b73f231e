"""A sampler with the rows' tokens, as in the runner."""

from typing import Any

import torch
from torch import Tensor

from headrace_worker.core.plan import RowInit, RowSampling
from headrace_worker.device.cpu import CpuDevice
from headrace_worker.sampler import SampleOutput, Sampler


class Bench:
    """Rows with tokens; ``draw`` samples one token for each of some rows and appends it."""

    def __init__(self, vocab: int, max_rows: int = 80) -> None:
        self.sampler = Sampler(vocab, max_rows, CpuDevice())
        self.tokens = torch.zeros((max_rows, 128), dtype=torch.int32)
        self.lengths = [0] * max_rows

    def start(self, row: int, prompt: list[int], outputs: list[int] | None = None, **options: Any) -> None:
        known = prompt + (outputs or [])
        self.sampler.init(RowInit(row, 1, known, len(prompt), RowSampling(**options)))
        self.tokens[row] = 0
        self.tokens[row, : len(known)] = torch.tensor(known)
        self.lengths[row] = len(known)

    def draw(self, logits: Tensor, rows: list[int]) -> SampleOutput:
        output = self.sampler.sample(logits.clone(), rows, [self.lengths[row] for row in rows], self.tokens)
        for row, token in zip(rows, output.tokens.tolist(), strict=True):
            self.tokens[row, self.lengths[row]] = token
            self.lengths[row] += 1
        return output
