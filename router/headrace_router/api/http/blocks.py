"""An answer as blocks, one after the other: reasoning, text, calls. Messages and Responses are views of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from headrace_router.answer.events import Args, CallStart, Event, Reasoning, Text
from headrace_router.dispatch.choice import CallPart, ChoiceUpdate

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """One block, with the parts that were read so far. call: its id and name."""

    index: int
    kind: Kind
    call: CallPart | None = None
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins."""

    block: Block


@dataclass(frozen=True, slots=True)
class Added:
    """A part of the open block."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The block is complete. last: the answer ends with it, or was cut off in it."""

    block: Block
    last: bool


class BlockReader:
    """Reads the updates of one choice. However an answer is cut into updates, its blocks are the same.

    Text that is white space alone is no block: models write it between two calls.
    """

    def __init__(self, *, reasoning: bool = True) -> None:
        """reasoning: False leaves it out."""
        self._reasoning = reasoning
        self._open: Block | None = None
        self._count = 0
        self._calls = 0
        self._space = ""  # white space that may be the beginning of a text

    def read(self, update: ChoiceUpdate) -> Iterator[Opened | Added | Closed]:
        """What the update adds; at the end of the answer the open block is closed."""
        events: list[Event] = [Text(update.text)] if update.text else []
        for event in update.parsed.events if update.parsed is not None else events:
            if isinstance(event, CallStart):
                assert update.parsed is not None
                yield from self._begin("call", update.parsed.calls[self._calls])
                self._calls += 1
            elif isinstance(event, Args):
                yield self._add(event.text)
            elif isinstance(event, Reasoning) and self._reasoning:
                yield from self._begin("reasoning")
                yield self._add(event.text)
            elif isinstance(event, Text):
                text, self._space = self._space + event.text, ""
                if text.isspace() and (self._open is None or self._open.kind != "text"):
                    self._space = text
                else:
                    yield from self._begin("text")
                    yield self._add(text)
        if update.finish_reason is not None:
            yield from self._close(last=True)

    def _begin(self, kind: Kind, call: CallPart | None = None) -> Iterator[Opened | Closed]:
        if self._open is not None and self._open.kind == kind and call is None:
            return
        yield from self._close(last=False)
        self._open = Block(self._count, kind, call)
        self._count += 1
        self._space = ""
        yield Opened(self._open)

    def _add(self, text: str) -> Added:
        assert self._open is not None
        self._open.parts.append(text)
        return Added(self._open, text)

    def _close(self, *, last: bool) -> Iterator[Closed]:
        if self._open is not None:
            block, self._open = self._open, None
            yield Closed(block, last)
