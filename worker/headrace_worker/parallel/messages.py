"""What rank 0 tells the other ranks, and what the drawing rank answers."""

from msgspec import Struct, msgpack

from headrace_worker.plan import StepPlan, StepResult


class Drawn(Struct, frozen=True):
    """Tokens that the last stage drew in an earlier step, in the order of its drawing rows."""

    step: int
    tokens: list[int]


class Step(Struct, frozen=True, tag="step"):
    """Put the drawn tokens into the rows, then run the plan."""

    plan: StepPlan
    drawn: list[Drawn]


class Clear(Struct, frozen=True, tag="clear"):
    """Make row 0 and the first blocks as new."""

    blocks: int


class Stop(Struct, frozen=True, tag="stop"):
    """The replica ends in order."""


Command = Step | Clear | Stop


class Answer(Struct, frozen=True):
    """What a step with work brought, from the rank that draws; `error` when only drawing failed."""

    result: StepResult
    error: str = ""


encoder = msgpack.Encoder()
decode_command = msgpack.Decoder(Command).decode
decode_answer = msgpack.Decoder(Answer).decode
