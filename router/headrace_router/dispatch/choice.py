"""One answer during generation: token ids in, text and logprobs out, until it is complete."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_proto.replica_pb2 import (
    FINISH_CANCELLED,
    FINISH_COMPLETE,
    FINISH_DEADLINE,
    FINISH_ERROR,
    FINISH_INVALID,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    TokenLogprobs,
)
from headrace_router.answer.events import Args, CallStart, Event, Reasoning, Text
from headrace_router.answer.parser import AnswerParser, Syntax, call_id
from headrace_router.core.errors import ApiError, ConstraintError, DeadlineError, GenerationFailedError
from headrace_router.core.policy.interface import ChoiceRequest
from headrace_router.text.detokenize import StopMatcher
from headrace_router.text.model_card import ModelCard
from headrace_router.validation.tool_use import template_arguments

STOP = "stop"
LENGTH = "length"
TOOL_CALLS = "tool_calls"


@dataclass(slots=True)
class CallPart:
    """What became visible of a call of a tool. ident, name: in its first part. arguments: a part of a JSON object, or
    of the free text of a custom tool.
    """

    index: int
    ident: str = ""
    name: str = ""
    arguments: str = ""
    custom: bool = False


@dataclass(slots=True)
class ParsedParts:
    """What became visible of an answer besides its text. calls: by index."""

    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, CallPart] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)  # the same and the text, in the order of the answer

    def extend(self, later: "ParsedParts") -> None:
        """Adds what came next."""
        self.reasoning += later.reasoning
        self.events += later.events
        for index, part in later.calls.items():
            known = self.calls.setdefault(index, CallPart(index, part.ident, part.name, custom=part.custom))
            known.arguments += part.arguments


@dataclass(slots=True)
class ChoiceUpdate:
    """What became visible of one choice since the last update."""

    index: int
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # as many as text-bearing token ids, when asked for
    offsets: list[int] = field(default_factory=list)  # with logprobs: where in the answer a token's character begins
    ending: TokenLogprobs | None = None  # with logprobs: of the token that ended the answer and has no text
    # In the first update, when asked for: of all but the prompt's first token.
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_string: str | None = None  # that ended the answer
    parsed: "ParsedParts | None" = None  # where an answer is more than text

    @property
    def text(self) -> str:
        return self.pieces[0] if len(self.pieces) == 1 else "".join(self.pieces)

    def extend(self, later: "ChoiceUpdate") -> None:
        """Merges the next update of the same choice: a slow client's unread updates stay one object."""
        self.pieces += later.pieces
        if later.parsed is not None:
            self.parsed = self.parsed or ParsedParts()
            self.parsed.extend(later.parsed)
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.offsets += later.offsets
        self.ending = later.ending
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_string = later.stop_string


def is_first(choice: ChoiceRequest) -> bool:
    """Whether it is the first of the choices of its prompt."""
    return choice.sampling.choice_index == 0


class Choice:
    """State of one choice across its attempts; a migration continues from its tokens so far."""

    def __init__(
        self,
        request: ChoiceRequest,
        card: ModelCard,
        stop: tuple[str, ...],
        parser: AnswerParser | None = None,
        calls_before: int = 0,
        special: bool = False,
    ) -> None:
        """parser: where the answer is more than text. calls_before: in the chat. special: special tokens are text."""
        self.request = request
        self._card = card
        self._special = special
        self._ended_by_token = False  # the last token has no text
        self._parser = parser
        self._reasoner = parser if parser is not None and parser.syntax.reasoning is not None else None
        self._calls_before = calls_before
        self._calls = 0
        self._custom = False  # the tool of the latest call
        self.output_token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.failure: ApiError | None = None
        self.prompt_logprobs: list[TokenLogprobs] | None = None  # until the next update
        chars = parser.syntax.chars if parser is not None else None
        self._text = card.tokens.stream(request.prompt_token_ids, chars, special=special)
        self._stops = StopMatcher(parser.syntax.stops(stop) if parser is not None else stop)
        self._one_by_one = bool(stop) or request.sampling.HasField("logprobs")
        self._min_tokens = request.sampling.min_tokens
        self._pending: deque[tuple[int, TokenLogprobs | None, int]] = deque()  # token, logprobs, where its text begins
        self._raw_length = 0  # characters detokenized
        self._shown_length = 0  # characters in updates

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    @property
    def reasoning_tokens(self) -> int:
        """The number of output tokens so far that are inside of the reasoning."""
        return self._reasoner.reasoning_tokens if self._reasoner is not None else 0

    def message(self, parser: AnswerParser | None) -> dict[str, Any] | None:
        """The complete answer as the template gets it with the next turn, without its reasoning.

        parser: a new one, like that of the choice. None after a stop string: the client was given less than the tokens
        say. The answer is read again as a whole, which costs less than to keep each piece.
        """
        if self._stops.matched:
            return None
        chars = parser.syntax.chars if parser is not None else None
        stream = self._card.tokens.stream(self.request.prompt_token_ids, chars, special=self._special)
        text = stream.push(self.output_token_ids[: -1 if self._ended_by_token else None])
        calls: list[tuple[CallStart, list[str]]] = []
        if parser is not None:
            events = [*parser.push(text), *parser.finish(cut=self.finish_reason == LENGTH)]
            text = "".join(event.text for event in events if isinstance(event, Text))
            for event in events:
                if isinstance(event, CallStart):
                    calls.append((event, []))
                elif isinstance(event, Args):
                    calls[-1][1].append(event.text)
        found = [
            {"function": {"name": call.name, "arguments": template_arguments("".join(parts), custom=call.custom)}}
            for call, parts in calls
        ]
        return {"role": "assistant", "content": text, "tool_calls": found}

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether they are asked for, and come with the next tokens, which are the first ones."""
        return self.request.sampling.HasField("prompt_logprobs") and not self.output_token_ids

    def consume(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], finish: int, error: str
    ) -> ChoiceUpdate | None:
        """Adds the next tokens. Returns what became visible, or None. After a stop string, `done` is set early."""
        update = ChoiceUpdate(self.request.index)
        # The token that ended the answer is counted, but has no text.
        ending = finish == FINISH_STOP and len(token_ids) > 0
        shown_ids = token_ids[:-1] if ending else token_ids
        if self._one_by_one:
            self._consume_one_by_one(update, shown_ids, logprobs)
        else:
            self.output_token_ids.extend(shown_ids)
            # Where reasoning is counted, the parser gets one token at a time.
            for ids in (shown_ids,) if self._reasoner is None else ((token_id,) for token_id in shown_ids):
                self._show(update, self._detokenize(ids) if ids else "")
            update.token_ids.extend(shown_ids)
        if self._parser is not None and self._parser.full and not self.done:
            self.finish_reason = update.finish_reason = TOOL_CALLS
        if not self.done:
            self._finish(update, finish, error)
            if ending and not self.failure:
                self.output_token_ids.append(token_ids[-1])
                self._ended_by_token = True
                update.token_ids.append(token_ids[-1])
                if logprobs:
                    update.ending = logprobs[len(token_ids) - 1]
                    update.offsets.append(self._raw_length)
        update.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        seen = update.pieces or update.token_ids or update.finish_reason or update.prompt_logprobs is not None
        return update if seen else None

    def _consume_one_by_one(
        self, update: ChoiceUpdate, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Exact to the token: usage ends with the one that completed the stop string, and each has its offset."""
        for position, token_id in enumerate(token_ids):
            self.output_token_ids.append(token_id)
            self._pending.append((token_id, logprobs[position] if logprobs else None, self._raw_length))
            piece = self._detokenize((token_id,))
            if len(self.output_token_ids) < self._min_tokens:
                shown = self._stops.flush() + piece
            else:
                shown = self._stops.push(piece)
            self._show(update, shown)
            if self._stops.matched:
                self._release(update, everything=False)
                self._pending.clear()
                update.stop_string = self._stops.matched
                self._end(update, STOP)
                return
            self._release(update, everything=not self._stops.holding)

    def _detokenize(self, token_ids: Sequence[int]) -> str:
        piece = self._text.push(token_ids)
        self._raw_length += len(piece)
        if self._reasoner is not None:
            self._reasoner.end_token(self._raw_length)
        return piece

    def _finish(self, update: ChoiceUpdate, finish: int, error: str) -> None:
        if finish == FINISH_NONE:
            return
        if finish in (FINISH_STOP, FINISH_COMPLETE, FINISH_LENGTH):
            self._show(update, self._stops.flush())
            self._release(update, everything=True)
            self._end(update, LENGTH if finish == FINISH_LENGTH else STOP)
        elif finish == FINISH_DEADLINE:
            self.failure = DeadlineError("The request's deadline passed before the answer was complete.")
        elif finish == FINISH_INVALID:
            self.failure = ConstraintError(f"This request cannot be answered: {error}.")
        elif finish in (FINISH_ERROR, FINISH_CANCELLED):
            self.failure = GenerationFailedError(
                f"The replica could not finish this answer: {error or 'no reason given'}"
            )

    def _end(self, update: ChoiceUpdate, reason: str) -> None:
        if self._parser is not None:
            self._add(update, self._parser.syntax, self._parser.finish(cut=reason == LENGTH))
            if reason == STOP and self._calls:
                reason = TOOL_CALLS
        self.finish_reason = update.finish_reason = reason

    def _show(self, update: ChoiceUpdate, text: str) -> None:
        if not text:
            return
        self._shown_length += len(text)
        if self._parser is None:
            update.pieces.append(text)
        else:
            self._add(update, self._parser.syntax, self._parser.push(text))

    def _add(self, update: ChoiceUpdate, syntax: Syntax, events: Sequence[Event]) -> None:
        parsed = update.parsed = update.parsed or ParsedParts()
        parsed.events += events
        for event in events:
            if isinstance(event, Text):
                update.pieces.append(event.text)
            elif isinstance(event, Reasoning):
                parsed.reasoning.append(event.text)
            elif isinstance(event, CallStart):
                ident = call_id(syntax, event.name, self._calls_before + self._calls)
                self._custom = event.custom
                parsed.calls[self._calls] = CallPart(self._calls, ident, event.name, custom=event.custom)
                self._calls += 1
            elif isinstance(event, Args):
                index = self._calls - 1
                part = parsed.calls.setdefault(index, CallPart(index, custom=self._custom))
                part.arguments += event.text

    def _release(self, update: ChoiceUpdate, *, everything: bool) -> None:
        """Adds the tokens whose text has become visible, at least in part, to the update."""
        pending = self._pending
        while pending and (everything or pending[0][2] < self._shown_length):
            token_id, entry, offset = pending.popleft()
            update.token_ids.append(token_id)
            if entry is not None:
                update.logprobs.append(entry)
                update.offsets.append(offset)
