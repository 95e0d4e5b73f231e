"""Commands of rank 0 to the other ranks, and the answers of the rank that samples."""

from collections.abc import Mapping
from typing import Self

import numpy as np
from msgspec import Struct, msgpack

from headrace_worker.core.guide import Mask
from headrace_worker.core.plan import StepPlan, StepResult


class Drawn(Struct, frozen=True):
    """Tokens that the last stage sampled in an earlier step, in the order of its sampled rows."""

    step: int
    tokens: list[int]


class Step(Struct, frozen=True, tag="step"):
    """Put the drawn tokens into the rows, then run the plan."""

    plan: StepPlan
    drawn: list[Drawn]


class Draw(Struct, frozen=True, tag="draw"):
    """For the last guided step, to the rank that samples: its tokens' masks, int32 words, by index into the tokens."""

    step: int
    masks: dict[int, bytes]

    @classmethod
    def of(cls, step: int, masks: Mapping[int, Mask]) -> Self:
        return cls(step, {index: mask.astype("<i4").tobytes() for index, mask in masks.items()})

    def unpacked(self) -> dict[int, Mask]:
        """The masks as arrays."""
        return {index: np.frombuffer(words, "<i4") for index, words in self.masks.items()}


class Clear(Struct, frozen=True, tag="clear"):
    """Reset the first blocks and rows."""

    blocks: int
    rows: int


class RecordSteps(Struct, frozen=True, tag="record"):
    """Record steps for replay."""


class StopRank(Struct, frozen=True, tag="stop"):
    """The replica stops in an orderly way."""


Command = Step | Draw | Clear | RecordSteps | StopRank


class Answer(Struct, frozen=True):
    """The result of a step with work, from the rank that samples; `error` when only sampling failed."""

    result: StepResult
    error: str = ""


encoder = msgpack.Encoder()
decode_command = msgpack.Decoder(Command).decode
decode_answer = msgpack.Decoder(Answer).decode
