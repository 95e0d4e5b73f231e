"""What rank 0 tells the other ranks, and what the drawing rank answers."""

from collections.abc import Mapping
from typing import Self

import numpy as np
from msgspec import Struct, msgpack

from headrace_worker.guide import Mask
from headrace_worker.plan import StepPlan, StepResult


class Drawn(Struct, frozen=True):
    """Tokens that the last stage drew in an earlier step, in the order of its drawing rows."""

    step: int
    tokens: list[int]


class Step(Struct, frozen=True, tag="step"):
    """Put the drawn tokens into the rows, then run the plan."""

    plan: StepPlan
    drawn: list[Drawn]


class Draw(Struct, frozen=True, tag="draw"):
    """Of the last guided step, to the rank that draws: its tokens' masks, int32 words, by index into the tokens."""

    step: int
    masks: dict[int, bytes]

    @classmethod
    def of(cls, step: int, masks: Mapping[int, Mask]) -> Self:
        return cls(step, {index: mask.astype("<i4").tobytes() for index, mask in masks.items()})

    def unpacked(self) -> dict[int, Mask]:
        """The masks as they were."""
        return {index: np.frombuffer(words, "<i4") for index, words in self.masks.items()}


class Clear(Struct, frozen=True, tag="clear"):
    """Make the first blocks and rows as new."""

    blocks: int
    rows: int


class Record(Struct, frozen=True, tag="record"):
    """Record steps up to so many tokens."""

    max_tokens: int


class Stop(Struct, frozen=True, tag="stop"):
    """The replica ends in order."""


Command = Step | Draw | Clear | Record | Stop


class Answer(Struct, frozen=True):
    """What a step with work brought, from the rank that draws; `error` when only drawing failed."""

    result: StepResult
    error: str = ""


encoder = msgpack.Encoder()
decode_command = msgpack.Decoder(Command).decode
decode_answer = msgpack.Decoder(Answer).decode
