"""Readers of a call's arguments: text in, parts of a JSON object out, as they arrive."""

import ast
import html
import json
from collections.abc import Container, Iterator, Mapping
from enum import Enum
from typing import Any, Protocol

import regex

from headrace_router.answer.events import Args, CallEnd, CallStart, Event
from headrace_router.answer.families import FIRST_MARKER
from headrace_router.answer.input_text import INPUT, opens_input


class ReaderState(Enum):
    """The state of a reader."""

    READING = 0
    DONE = 1  # the calls are complete
    FAILED = 2  # it was no call, or it cannot be completed


class Reader(Protocol):
    """Reads from where a call begins. rest: what is not read yet."""

    state: ReaderState
    rest: str

    def feed(self, text: str) -> Iterator[Event]:
        """text: what was left, and what was added to it."""

    def unfinished(self) -> str:
        """The text that was read of a call that has not ended."""

    def unsent(self) -> str:
        """The end of `unfinished` that no event contains."""


class BracketMatcher:
    """Finds where brackets close, in text that arrives in pieces. Nothing in a string is a bracket."""

    def __init__(self, quotes: str = '"', depth: int = 0) -> None:
        """quotes: what a string may be in. depth: brackets that are open already."""
        self._outside = regex.compile(rf"[{{}}\[\]()\\{quotes}\U000f0000-\U000f00ff]")
        self._depth = depth
        self._quote = ""  # quote that began the open string
        self.broken = False  # a marker is in the value, outside of its strings
        self._place = 0  # in the text, up to which it was read

    def find(self, text: str) -> int:
        """Where the value ends, or where a marker breaks it off; -1 if it goes on. text: all of it that has arrived."""
        while found := (_IN_STRING[self._quote] if self._quote else self._outside).search(text, self._place):
            self._place = found.end()
            char = found[0]
            if not self._quote and char >= chr(FIRST_MARKER):
                self.broken = True
                return found.start()
            if char == "\\":
                self._place += 1
            elif char == self._quote:
                self._quote = ""
            elif char in "'\"":
                self._quote = char
            else:
                self._depth += 1 if char in "{[(" else -1
                if self._depth <= 0:
                    return self._place
        self._place = max(self._place, len(text))
        return -1

    def find_next(self, piece: str) -> int:
        """The same of the next piece alone."""
        end = self.find(piece)
        self._place -= len(piece)
        return end


_IN_STRING = {quote: regex.compile(rf"[\\{quote}]") for quote in "'\""}


class _Base:
    def __init__(self) -> None:
        self.state = ReaderState.READING
        self.rest = ""
        self.certain = False
        self._read: list[str] = []
        self._unsent: list[str] = []

    def unfinished(self) -> str:
        return "".join(self._read)

    def unsent(self) -> str:
        return "".join(self._unsent)

    def _take(self, end: int) -> str:
        """Reads so much text of the call."""
        part, self.rest = self.rest[:end], self.rest[end:]
        self._read.append(part)
        return part


class JsonReader(_Base):
    """One JSON object, passed on as it is."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._end = BracketMatcher()

    def feed(self, text: str) -> Iterator[Event]:
        if not self.certain:
            self.certain = True
            yield CallStart(self._name)
        self.rest = text
        end = self._end.find_next(text)
        if part := self._take(len(text) if end < 0 else end):
            yield Args(part)
        if self._end.broken or (end >= 0 and not _is_json("".join(self._read))):
            self.state = ReaderState.FAILED
        elif end >= 0:
            self.state = ReaderState.DONE
            yield CallEnd()


_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = regex.compile(
    rf'\{{\s*(?:"(?:id|type|tool_call_id)"\s*:\s*{_STRING}\s*,\s*)*"(?:tool_)?name"\s*:\s*(?P<name>{_STRING})\s*,\s*'
    rf'(?:"(?:id|type)"\s*:\s*{_STRING}\s*,\s*)*"(?:arguments|parameters)"\s*:\s*(?=\{{)',
    regex.DOTALL,
)
_TAIL = regex.compile(rf'\s*(?:,\s*"\w+"\s*:\s*(?:{_STRING}|[\w.+-]+)\s*)*\}}', regex.DOTALL)
_FIRST_KEY = regex.compile(r'\{\s{0,99}"(?:(?:tool_)?name|id|type|tool_call_id|arguments|parameters)"')
HEAD_CHARS = 4096  # up to the arguments, where the name comes first
_OPEN = regex.compile(r"(?P<array>\[\s{0,9})?(?=\{)")
_NEXT = regex.compile(r"\s{0,9}[,;]\s{0,9}(?=\{)")
_CLOSE = regex.compile(r"\s{0,9}\]")


class ObjectsReader(_Base):
    """Objects such as {"name": …, "arguments": {…}}: one, or several in an array or after each other.

    Where the name comes first, the arguments are passed on as they arrive; else when the object is complete.
    """

    def __init__(self, names: Container[str] | None, custom: Container[str] = ()) -> None:
        """names: of the tools, where an object is a call only if it names one. custom: of those that take free text."""
        super().__init__()
        self._names = names
        self._custom = custom
        self._head_parts = 0  # parts that were read before the arguments
        self._array = ""  # what opened it
        self._end = BracketMatcher()  # finds the end of the object, or of its arguments
        self._step = self._open

    def feed(self, text: str) -> Iterator[Event]:
        self.rest = text
        while self.state is ReaderState.READING:
            step = self._step
            yield from step()
            if self._step == step:  # it needs more text
                return

    def _open(self) -> Iterator[Event]:
        found = _OPEN.match(self.rest, partial=True)
        if found is None:
            self._fail()
        elif not found.partial:
            self._array = self._take(found.end())
            self._step = self._object
        yield from ()

    def _object(self) -> Iterator[Event]:
        """At the brace that opens an object."""
        if self._names is not None and _FIRST_KEY.match(self.rest, partial=True) is None:
            self._fail()  # it is an answer in JSON, which should not wait for its end
            return
        found = _HEAD.match(self.rest, partial=True) if len(self.rest) <= HEAD_CHARS else None
        if found is not None and found.partial:
            return
        if found is not None:
            name = _string(found["name"])
            if not self._is_tool(name):
                self._fail()
                return
            self.certain = True
            self._take(found.end())
            self._head_parts = len(self._read)
            self._end = BracketMatcher()
            self._step = self._arguments
            yield CallStart(name or "")
            return
        end = self._end.find(self.rest)
        if end < 0:
            return
        call = None if self._end.broken else _call(self.rest[:end], self._custom)
        if call is None or not self._is_tool(call[0]):
            self._fail()
            return
        self.certain = True
        self._read.clear()
        self.rest = self.rest[end:]
        self._step = self._between
        yield CallStart(call[0])
        yield Args(call[1])
        yield CallEnd()

    def _arguments(self) -> Iterator[Event]:
        end = self._end.find_next(self.rest)
        if part := self._take(len(self.rest) if end < 0 else end):
            yield Args(part)
        if self._end.broken or (end >= 0 and not _is_json("".join(self._read[self._head_parts :]))):
            self.state = ReaderState.FAILED
        elif end >= 0:
            self._read.clear()
            self._step = self._tail
            yield CallEnd()

    def _tail(self) -> Iterator[Event]:
        """After the arguments: the rest of the object."""
        found = _TAIL.match(self.rest, partial=True)
        if found is None or (found.partial and len(self.rest) > HEAD_CHARS):
            self.state = ReaderState.DONE
        elif not found.partial:
            self.rest = self.rest[found.end() :]
            self._step = self._between
        yield from ()

    def _between(self) -> Iterator[Event]:
        """After an object: another one may follow."""
        found = _NEXT.match(self.rest, partial=True)
        if found is None:
            closed = _CLOSE.match(self.rest) if self._array else None
            self.rest = self.rest[closed.end() :] if closed else self.rest
            self.state = ReaderState.DONE
        elif not found.partial:
            self.rest = self.rest[found.end() :]
            self._end = BracketMatcher()
            self._step = self._object
        yield from ()

    def _is_tool(self, name: str | None) -> bool:
        return name is not None and (self._names is None or name in self._names)

    def _fail(self) -> None:
        self.state = ReaderState.DONE if self.certain else ReaderState.FAILED


def _string(text: str) -> str | None:
    """The text of a JSON string; None if it is no text."""
    try:
        found = str(json.loads(text))
        found.encode()  # half a surrogate pair is no text
    except ValueError:
        return None
    return found


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _call(text: str, custom: Container[str]) -> tuple[str, str] | None:
    """The name and the arguments of an object that is a call."""
    try:
        value = json.loads(text)
        name = value.get("name", value.get("tool_name"))
        given = value.get("arguments", value.get("parameters"))
        if isinstance(given, str) and isinstance(name, str) and name in custom and not opens_input(given):
            given = {INPUT: given}
        elif isinstance(given, str):  # JSON in JSON
            given = json.loads(given)
    except (ValueError, RecursionError):
        return None
    if not isinstance(name, str) or _string(json.dumps(name)) is None or not isinstance(given, dict | None):
        return None
    return name, _dumped(given or {})


def _dumped(value: Any) -> str:
    """As JSON; half a surrogate pair is escaped. Raises ValueError or TypeError where JSON has no such value."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


class TaggedReader(_Base):
    """Arguments between tags. A string is passed on as it arrives, any other value when it is complete."""

    def __init__(
        self, name: str, schema: Mapping[str, Any], tags: tuple["regex.Pattern[str]", ...], before: str
    ) -> None:
        """schema: of the parameters. tags: of a key, of the end of a value, of the end of the call. before: a value."""
        super().__init__()
        self._name = html.unescape(name)
        self._schema = schema
        self._key, self._close, end = tags
        self._key_or_end = regex.compile(f"(?P<end>{end.pattern})|{self._key.pattern}", regex.DOTALL)
        self._before = before
        self._value: _Value | None = None
        self._count = 0

    def feed(self, text: str) -> Iterator[Event]:
        self.rest = text
        if not self.certain:
            self.certain = True
            yield CallStart(self._name)
        while self.state is ReaderState.READING:
            value = self._value
            found = (self._key_or_end if value is None else self._close).search(self.rest, partial=True)
            before = self._take(len(self.rest) if found is None else found.start())
            if value is not None and (part := value.add(before)):
                yield Args(part)
            else:
                self._unsent.append(before)
            if found is None or found.partial:
                return
            self._take(len(found[0]))
            self._unsent.clear()
            if value is not None:
                self._value = None
                yield Args(value.finish())
            elif found["end"] is not None:
                self.state = ReaderState.DONE
                yield Args("}" if self._count else "{}")
                yield CallEnd()
            else:
                yield Args(self._begin(found))

    def _begin(self, found: "regex.Match[str]") -> str:
        key = html.unescape(found["key"].strip())
        kind = found.groupdict().get("kind")
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        self._value = _Value(kind, value_types(schema, self._schema), self._before)
        self._count += 1
        return ("{" if self._count == 1 else ", ") + json.dumps(key, ensure_ascii=False) + ": "


_DEEPEST = 32  # references and unions in each other


class _Value:
    """One tagged value as JSON."""

    def __init__(self, kind: str | None, types: set[str], before: str) -> None:
        """kind: its type, or whether it is a string, as the model says. types: as the schema says, empty for any.

        before: what it does not begin with.
        """
        self._before = before
        self._text = kind in ("true", "string") or (kind is None and types == {"string"})
        self._types = types if kind is None else {"string", kind} if kind != "false" else set()
        self._buffer = ""
        self._begun = False

    def add(self, text: str) -> str:
        """What is certain of it."""
        if text and self._before:
            text, self._before = text.removeprefix(self._before), ""
        if not self._text:
            self._buffer += text
            return ""
        begun, self._begun = self._begun, True
        return ("" if begun else '"') + json.dumps(text, ensure_ascii=False)[1:-1]

    def finish(self) -> str:
        """The rest of it."""
        return self.add("") + '"' if self._text else _typed(self._buffer, self._types)


def value_types(schema: Any, root: Any = None, depth: int = 0) -> set[str]:
    """That a value of the schema may have; empty if it may have any, or doesn't say. root: of local references."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return value_types(referred(reference, root), root, depth + 1)
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)}
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            return {_type(value) for value in values}
    for branches in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(branches, list):
            types = [value_types(branch, root, depth + 1) for branch in branches]
            return set().union(*types) if all(types) else set()
    return set()


def referred(reference: str, root: Any) -> Any:
    """What a local reference of a schema names; None for nothing."""
    for step in reference.removeprefix("#/").split("/"):
        root = root.get(step) if isinstance(root, Mapping) else None
    return root


def _type(value: Any) -> str:
    for kind, name in ((bool, "boolean"), (str, "string"), (dict, "object"), (list, "array"), (int, "integer")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "number"


def _typed(text: str, types: set[str]) -> str:
    """A tagged value as JSON: a value of one of the types, a string if it is none."""
    bare = text.strip()
    value: Any
    try:
        value, bare = json.loads(bare, parse_constant=_refuse), bare
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(bare)
            bare = _dumped(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
    kind = _type(value)
    fits = not types or kind in types or (kind in ("integer", "number") and types & {"number", "integer"})
    return bare if fits else json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> None:
    raise ValueError(name)


class PythonReader(_Base):
    """A list of calls in Python's syntax. Each is passed on when it is complete."""

    _HEAD = regex.compile(r"\s{0,9}(?:(?P<end>\])|[\[,]?\s{0,9}(?P<name>[A-Za-z_][\w.]{0,256})\()")

    def __init__(self, names: Container[str] | None) -> None:
        """names: of the tools, where it is a call only if it names one."""
        super().__init__()
        self._names = names
        self._end: BracketMatcher | None = None  # finds the end of the call

    def feed(self, text: str) -> Iterator[Event]:
        self.rest = text
        while self.state is ReaderState.READING:
            found = self._HEAD.match(self.rest, partial=True)
            if found is not None and found.partial:
                return
            if found is None or (found["name"] and self._names is not None and found["name"] not in self._names):
                self._fail()
                return
            if found["end"]:
                self.rest = self.rest[found.end() :]
                self.state = ReaderState.DONE
                return
            start = found.end()
            self._end = self._end or BracketMatcher("'\"", depth=1)
            end = self._end.find(self.rest[start:])
            if end < 0:
                return
            broken, self._end = self._end.broken, None
            end += start
            given = None if broken else _python(self.rest[start : end - 1])
            if given is None:
                self._fail()
                return
            self.certain = True
            self.rest = self.rest[end:]
            yield CallStart(found["name"])
            yield Args(given)
            yield CallEnd()

    def _fail(self) -> None:
        self.state = ReaderState.DONE if self.certain else ReaderState.FAILED


def _python(arguments: str) -> str | None:
    """Keyword arguments as a JSON object."""
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        found = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
        return _dumped(found) if len(found) == len(call.keywords) else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


class GemmaReader(_Base):
    """An object with bare keys and bare words, and strings between quote markers."""

    def __init__(self, name: str, quote: str) -> None:
        super().__init__()
        self._name = name
        self._quote = regex.compile(regex.escape(quote))
        self._part = regex.compile(rf"(?P<quote>{regex.escape(quote)})|[{{}}\[\],:]")
        self._in_string = False
        self._word = ""  # not passed on: it may be a key
        self._depth: list[str] = []

    def feed(self, text: str) -> Iterator[Event]:
        self.rest = text
        if not self.certain:
            self.certain = True
            yield CallStart(self._name)
        found: list[str] = []
        while self.state is ReaderState.READING and (part := self._next()) is not None:
            found.append(part)
        if text := "".join(found):
            yield Args(text)
        if self.state is ReaderState.DONE:
            yield CallEnd()

    def unsent(self) -> str:
        return self._word

    def _next(self) -> str | None:
        """The next part as JSON; None if more text is needed."""
        found = (self._quote if self._in_string else self._part).search(self.rest, partial=True)
        end = len(self.rest) if found is None else found.start()
        before = self._take(end)
        if self._in_string:
            shown = json.dumps(before, ensure_ascii=False)[1:-1]
            if found is None or found.partial:
                return shown or None
            self._take(len(found[0]))
            self._in_string = False
            return shown + '"'
        self._word += before
        if found is None or found.partial:
            return None
        self._take(len(found[0]))
        if found["quote"]:
            self._in_string, self._word = True, ""
            return '"'
        word, self._word = self._word.strip(), ""
        sign = found[0]
        if sign == ":" and self._depth and self._depth[-1] == "{" and word:
            return json.dumps(word, ensure_ascii=False) + sign
        if sign in "{[":
            self._depth.append(sign)
        elif sign in "}]":
            self._depth = self._depth[:-1]
            if not self._depth:
                self.state = ReaderState.DONE
        return (_typed(word, set()) if word else "") + sign
