"""A model's answer as events, from its text in pieces of any size: the result doesn't depend on how it was split.

The text of marker tokens is replaced by one private character each (see `families`), which are spelled out again in
all that leaves this module.
"""

import secrets
import string
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import regex

from headrace_router.answer.arguments import (
    GemmaReader,
    JsonReader,
    ObjectsReader,
    PythonReader,
    Reader,
    ReaderState,
    TaggedReader,
)
from headrace_router.answer.events import Args, CallEnd, CallStart, Event, Reasoning, Text, merged
from headrace_router.answer.families import (
    FIRST_MARKER,
    MARKER,
    QUOTE,
    REASONING,
    TOOLS,
    ArgumentSyntax,
    ReasoningFamily,
    ToolFamily,
    markers,
)
from headrace_router.answer.input_text import InputText

NOTHING = r"(?!)"
_LETTERS = string.ascii_letters + string.digits


class Syntax:
    """How one model writes its answers, compiled for its vocabulary. Immutable."""

    def __init__(
        self,
        tools: ToolFamily | None,
        reasoning: ReasoningFamily | None,
        tokens: Mapping[str, int] | None = None,
        special: Container[int] = (),
    ) -> None:
        """tokens: ids of the vocabulary's added tokens, by text. special: those that are no text."""
        self.tools = tools
        self.reasoning = reasoning
        found = sorted({marker for marker in markers() if marker in (tokens or {})})
        self.tokens = {marker: (tokens or {})[marker] for marker in found}
        self.added = sorted((tokens or {}).values())
        self.special = {marker for marker, token_id in self.tokens.items() if token_id in special}
        self.chars = {self.tokens[marker]: chr(FIRST_MARKER + place) for place, marker in enumerate(found)}
        self._char_of = {marker: chr(FIRST_MARKER + place) for place, marker in enumerate(found)}
        self._spelled = {FIRST_MARKER + place: marker for place, marker in enumerate(found)}
        self._shown = {char: "" if marker in self.special else marker for char, marker in self._spelled.items()}
        plain = {
            "think": reasoning.open if reasoning else NOTHING,
            "noise": (reasoning and reasoning.noise) or NOTHING,
            "dropped": (reasoning and reasoning.dropped) or NOTHING,
        }
        noise = "|".join(row.noise for row in (tools, reasoning) if row is not None and row.noise)
        call = (tools and tools.call) or NOTHING
        self.start = self.compiled((tools and tools.start) or NOTHING)
        self.text = self._of(plain)
        self.text_with_calls = self._of({"call": call, **plain, "noise": noise or NOTHING})
        thinking = {"noise": reasoning.close if reasoning else NOTHING}
        self.thinking = self._of(thinking)
        self.thinking_with_calls = self._of({"call": call, **thinking} if tools and tools.ends_reasoning else thinking)
        every = [
            self._marker(marker) for pattern in (call, noise, *plain.values()) for marker in MARKER.findall(pattern)
        ]
        self.marker = regex.compile("|".join(every) or NOTHING)
        self.form = tools.form if tools else ArgumentSyntax.JSON
        self.tags = (
            tuple(map(self.compiled, (tools.tags.key, tools.tags.close, tools.tags.end)))
            if tools and tools.tags
            else ()
        )
        self.before = tools.tags.before if tools and tools.tags else ""
        self.quote = self._char_of.get(QUOTE, QUOTE)

    @property
    def closes_by_token(self) -> bool:
        """Whether this model reasons, and its reasoning ends with a token that nothing else is written with."""
        return self.reasoning is not None and MARKER.split(self.reasoning.written[1])[1] in self.tokens

    def compiled(self, pattern: str) -> "regex.Pattern[str]":
        """The compiled pattern of a row."""
        return regex.compile(MARKER.sub(lambda found: self._marker(found[1]), pattern), regex.DOTALL)

    def begins_in_reasoning(self, prompt: str) -> bool:
        """Whether the answer to this rendered prompt does."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.prefix.rstrip())

    def stops(self, texts: Sequence[str]) -> list[str]:
        """Stop strings, and these as they are in an answer where a marker in them is a token."""
        found = dict.fromkeys(texts)
        for text in texts:
            for marker, char in self._char_of.items():
                text = text.replace(marker, char)
            found[text] = None
        return list(found)

    def spelled(self, text: str) -> str:
        """Text with the private characters replaced by their markers."""
        return text.translate(self._spelled)

    def shown(self, text: str) -> str:
        """The same without special tokens."""
        return text.translate(self._shown)

    def _marker(self, marker: str) -> str:
        return self._char_of.get(marker) or regex.escape(marker)

    def _of(self, rules: Mapping[str, str]) -> "regex.Pattern[str]":
        return self.compiled("|".join(f"(?P<{name}>{pattern})" for name, pattern in rules.items()))


Row = TypeVar("Row", ToolFamily, ReasoningFamily)


def syntax_of(
    template: str,
    tool_parser: str,
    reasoning_parser: str,
    tokens: Mapping[str, int],
    special: Container[int],
    *,
    knows_tools: bool = True,
) -> Syntax:
    """The syntax of a model, from its chat template or the names of parsers.

    Where the template knows no tools, calls are those of `hermes`, which our own text about tools asks for.
    """
    tools = _row(TOOLS, tool_parser, template)
    if tool_parser in ("", "auto") and not knows_tools:
        tools = _row(TOOLS, "hermes", template)
    return Syntax(tools, _row(REASONING, reasoning_parser, template), tokens, special)


def _row(rows: Sequence[Row], name: str, template: str) -> Row | None:
    if name not in ("", "auto"):
        return next((row for row in rows if name in row.names), None)
    return next((row for row in rows if all(part in template for part in row.seen)), None)


def call_id(syntax: Syntax, name: str, count: int) -> str:
    """For a call of this tool, after so many calls in the chat.

    Mistral's templates accept nine letters and digits only, and no other template minds.
    """
    if syntax.tools is not None and syntax.tools.ident:
        return syntax.tools.ident.format(name=name, count=count)
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class AnswerParser:
    """The state of one answer."""

    def __init__(
        self,
        syntax: Syntax,
        tools: Mapping[str, Mapping[str, Any]] | None,
        *,
        custom: Container[str] = (),
        thinking: bool,
        one_call: bool = False,
        whole: bool = False,
        special: bool = False,
    ) -> None:
        """tools: the JSON Schema of the parameters of each; without it, calls are text. custom: names of those that
        take free text. thinking: whether the prompt ends inside of the reasoning. one_call: the answer ends with the
        first call. whole: the answer is not streamed, so that a call that does not end is text; in a stream only what
        was not passed on of it is, unless it is cut. special: special tokens are text, except for those that mark
        reasoning and calls.
        """
        self.syntax = syntax
        self._tools = tools
        self._custom = custom
        self._input: InputText | None = None  # input of the call that has not ended, if its tool is custom
        self._one_call = one_call
        self._whole = whole
        self._buffer = ""
        self._reader: Reader | None = None
        self._opening = ""  # what began the calls, until the first of them has ended
        self._call: list[Event] = []  # events of the call that has not ended, where the answer is whole
        self._begun = False  # a call has not ended of which events were passed on
        self._cut = False
        self._was_text = False  # what began like a call was text, so what ends it is, too
        self._at_start = tools is not None
        self._thinking = thinking
        self._dropping = False
        self._space = ""  # white space that is text only if text follows
        self._space_before = ""  # the last marker, if no text was shown after it
        self._trims = thinking  # white space before the next text is dropped
        self._text = syntax.text if tools is None else syntax.text_with_calls
        self._thoughts = syntax.thinking if tools is None else syntax.thinking_with_calls
        self._spelled = syntax.shown if tools is None and not special else syntax.spelled
        self._pushed = 0  # characters
        self._ends: deque[int] = deque()  # ends of tokens not known to be reasoning or not, in characters
        self.reasoning_tokens = 0  # inside of the reasoning, without its marks
        self.calls = 0  # complete ones
        self._has_call = False  # events of a call were passed on

    @property
    def full(self) -> bool:
        """Whether the answer is complete, whatever follows."""
        return self._one_call and self.calls > 0

    @property
    def held(self) -> int:
        """Characters of which it is not certain yet what they are."""
        return len(self._buffer)

    def push(self, text: str) -> list[Event]:
        """The events that this text completes."""
        if self.full:
            return []
        self._buffer += text
        self._pushed += len(text)
        return self._run(final=False)

    def finish(self, *, cut: bool = False) -> list[Event]:
        """The events of what was held back, at the end of the answer. cut: by the limit of its tokens."""
        self._cut = cut
        events = self._run(final=True)
        self._count_tokens(self._ends[-1] if self._ends else 0)  # after a stop string, more than was pushed
        return events

    def end_token(self, end: int) -> None:
        """A token's text ends here, in characters of the answer; before its text is pushed."""
        self._ends.append(end)

    def _count_tokens(self, end: int) -> None:
        """Counts the tokens until here: all of them are reasoning, or none."""
        while self._ends and self._ends[0] <= end:
            self._ends.popleft()
            self.reasoning_tokens += self._thinking

    def _run(self, final: bool) -> list[Event]:
        events: list[Event] = []
        while self._step(events, final) and not self.full:
            pass
        self._count_tokens(self._pushed - len(self._buffer))
        if final and self._space and not self._has_call and not self._thinking:
            events.append(Text(self._space))
            self._space = ""
        return merged(events)

    def _step(self, events: list[Event], final: bool) -> bool:
        """Handles the next part of the buffer; False if more text is needed."""
        if self._reader is not None:
            return self._read(self._reader, events, final)
        if not self._buffer:
            return False
        if self._at_start and not self._thinking:
            found = self.syntax.start.match(self._buffer, partial=not final)
            if found is not None and found.partial:
                return False
            self._at_start = False
            if found is not None and not found.partial:
                self._begin_call(found, known=True)
                return True
        pattern = self._thoughts if self._thinking or self._dropping else self._text
        found = pattern.search(self._buffer, partial=True)
        if final and found is not None and found.partial and not self._is_cut_off(found.start()):
            found = None  # it was no marker after all
        end = len(self._buffer) if found is None else found.start()
        self._show(events, self._buffer[:end])
        self._buffer = self._buffer[end:]
        if found is None or found.partial:
            return False
        self._take(events, found)
        return True

    def _is_cut_off(self, place: int) -> bool:
        """Whether what is held from here on began a call, or what belongs to calls."""
        return self.calls > 0 or self.syntax.marker.search(self._buffer, place) is not None

    def _take(self, events: list[Event], found: "regex.Match[str]") -> None:
        """Handles a match at the start of the buffer."""
        self._space = self._space_before or self._space
        self._space_before = self._space
        if self._thinking:
            self._count_tokens(self._pushed - len(self._buffer))
        if _has(found, "call"):
            self._thinking = self._dropping = False
            self._begin_call(found, known=False)
            return
        self._buffer = self._buffer[len(found[0]) :]
        if not self._thinking:
            self._count_tokens(self._pushed - len(self._buffer))
        if self._thinking or self._dropping:
            self._thinking = self._dropping = False
            self._space, self._trims = "", True
        elif _has(found, "think"):
            self._thinking = True
            self._trims = True
        elif _has(found, "dropped"):
            self._dropping = True
        elif self._was_text:
            self._show(events, found[0])
            self._was_text = False

    def _begin_call(self, found: "regex.Match[str]", *, known: bool) -> None:
        """known: it is a call only if there is a tool of this name."""
        self._opening = found[0]
        self._was_text = False
        self._buffer = self._buffer[len(found[0]) :]
        self._reader = self._reader_of(found, known)

    def _reader_of(self, found: "regex.Match[str]", known: bool) -> Reader:
        tools, form = self._tools or {}, self.syntax.form
        name = found.group("name") if _has(found, "name") else None
        names = tools if known else None
        if form is ArgumentSyntax.PYTHON:
            return PythonReader(names)
        if name is None:
            return ObjectsReader(names, self._custom)
        name = name.strip()
        if form is ArgumentSyntax.TAGGED:
            return TaggedReader(name, tools.get(name, {}), self.syntax.tags, self.syntax.before)
        if form is ArgumentSyntax.GEMMA:
            return GemmaReader(name, self.syntax.quote)
        return JsonReader(name)

    def _read(self, reader: Reader, events: list[Event], final: bool) -> bool:
        for event in self._read_events(reader):
            if isinstance(event, Args) and not event.text:
                continue
            self._call.append(event)
            ended = isinstance(event, CallEnd)
            if ended or not self._whole:
                events += self._call
                self._call.clear()
                self._begun, self._has_call = not ended, True
            if ended:
                self.calls += 1
                self._opening = ""
            if self.full:
                return False
        self._buffer = reader.rest
        if reader.state is ReaderState.READING and not final:
            return False
        if reader.state is not ReaderState.DONE:
            self._was_text = not self._begun
            text = self._unsent(reader) if self._begun else self._opening + reader.unfinished()
            if reader.state is ReaderState.READING:
                text, self._buffer = text + self._buffer, ""
            if not (self._begun and self._cut):
                self._show(events, text)
        self._call.clear()
        self._reader, self._begun = None, False
        return True

    def _read_events(self, reader: Reader) -> Iterator[Event]:
        """The events of the buffer. The arguments of a custom tool are its input."""
        for event in reader.feed(self._buffer):
            if isinstance(event, CallStart):
                is_custom = event.name in self._custom
                self._input = InputText() if is_custom else None
                event = CallStart(event.name, is_custom)
            elif isinstance(event, Args):
                event = Args(self.syntax.spelled(event.text if self._input is None else self._input.add(event.text)))
            elif self._input is not None and isinstance(event, CallEnd):
                yield Args(self.syntax.spelled(self._input.finish()))
            yield event

    def _unsent(self, reader: Reader) -> str:
        """What was read of a call that has not ended, and is in no event."""
        return (self._input.held if self._input is not None else "") + reader.unsent()

    def _show(self, events: list[Event], text: str) -> None:
        """Text outside of calls."""
        if self._dropping or not text:
            return
        text = self._space + self._spelled(text)
        if self._trims:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._trims = False
            self._space_before = ""
            events.append(Reasoning(shown) if self._thinking else Text(shown))


def _has(found: "regex.Match[str]", name: str) -> bool:
    return name in found.re.groupindex and found.group(name) is not None
