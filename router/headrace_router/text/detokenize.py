"""Token ids to text as they arrive: incomplete characters are held back, and what may become a stop string."""

import codecs
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import orjson
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from headrace_base.errors import panics_as_errors


class _Stop:
    """One stop string, and how much of it the text so far ends with (Knuth, Morris, Pratt 1977).

    The cost of a piece is proportional to its length, whatever the text and the string are. The table is made as far as
    it is needed: few texts reach far into a stop string.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0  # characters of `text` that the stream ends with
        self._borders = [0]  # for each beginning of `text`: the longest shorter one that it ends with

    def push(self, piece: str) -> int:
        """The end of the first match in the piece, -1 if there is none."""
        text, state, position = self.text, self.state, 0
        while position < len(piece):
            if not state:
                position = piece.find(text[0], position)
                if position < 0:
                    break
            while state and text[state] != piece[position]:
                state = self._border(state)
            state += text[state] == piece[position]
            position += 1
            if state == len(text):
                return position
        self.state = state
        return -1

    def _border(self, length: int) -> int:
        text, borders = self.text, self._borders
        while len(borders) < length:
            border, character = borders[-1], text[len(borders)]
            while border and text[border] != character:
                border = borders[border - 1]
            borders.append(border + (text[border] == character))
        return borders[length - 1]


class StopMatcher:
    """Receives pieces of text, returns the text that is safe to send.

    Text that may be the beginning of a stop string is held back until the next piece decides. Of several matches the
    one that ends first is taken (the longest of several), so the result does not depend on how the text was split.

        >>> matcher = StopMatcher(["END"])
        >>> matcher.push("the E"), matcher.push("ND of it"), matcher.matched
        ('the ', '', 'END')
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: none is empty."""
        self._stops = [_Stop(stop) for stop in stops]
        self._held = ""
        self.matched = ""  # the stop string

    @property
    def holding(self) -> bool:
        """Whether text is held back."""
        return bool(self._held)

    def push(self, piece: str) -> str:
        """Adds a piece and returns what may be sent. Returns nothing more after a match."""
        if self.matched:
            return ""
        before, text = len(self._held), self._held + piece
        ends = [(end, before + end - len(stop.text), stop) for stop in self._stops if (end := stop.push(piece)) >= 0]
        if ends:
            _, start, stop = min(ends, key=lambda entry: entry[:2])
            self._held, self.matched = "", stop.text
            return text[:start]
        shown = len(text) - max((stop.state for stop in self._stops), default=0)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text still held back: it was no stop string after all."""
        for stop in self._stops:
            stop.state = 0
        held, self._held = self._held, ""
        return held


_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def line_json(value: Any) -> bytes:
    """JSON bytes; keys in the order given.

    JSON does not escape three characters that end a line in Unicode, and so in Python's `str.splitlines` and in line
    readers of HTTP clients: NEL, LINE SEPARATOR, PARAGRAPH SEPARATOR. A model may generate them.
    """
    data = orjson.dumps(value)
    if data.isascii():
        return data
    for raw, escaped in _LINE_ENDS:
        data = data.replace(raw, escaped)
    return data


KNOWN_TOKENS = 1 << 15  # whose JSON is kept
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
HELD_TOKENS = 16  # without a complete character: they are none
CONTEXT_TOKENS = 8  # tokens of the prompt: they determine whether the first word keeps its leading space


class Detokenizer(Protocol):
    """State of one choice."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; bytes of an incomplete character are kept for the next call."""


@dataclass(frozen=True, slots=True)
class TokenJson:
    """A token as logprobs list it."""

    text: str  # a part of a character is U+FFFD
    key: str  # the text, or else the bytes in hexadecimal, so that parts of different characters stay distinct
    text_json: bytes
    bytes_json: bytes


class TokenTable:
    """The bytes of each token. One per tokenizer, shared by all requests."""

    def __init__(self, tokenizer: Tokenizer, byte_level: bool) -> None:
        self._tokenizer = tokenizer
        self._byte_level = byte_level
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._text_bytes: dict[int, bytes] = {}
        self.token_json = lru_cache(KNOWN_TOKENS)(self._token_json)
        self.token_bytes = lru_cache(KNOWN_TOKENS)(self._token_bytes)

    def text_bytes(self, token_id: int) -> bytes:
        """Bytes of a token inside a text; empty for special tokens. Exact for byte-level tokenizers only."""
        known = self._text_bytes.get(token_id)
        if known is None:
            known = b"" if token_id in self._special else self.token_bytes(token_id)
            self._text_bytes[token_id] = known
        return known

    def _token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token by itself, special ones included: what logprobs list."""
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            mapping = byte_of_char()
            try:
                return bytes(mapping[char] for char in piece)
            except KeyError:
                return piece.encode()
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(byte[1])
        return piece.replace("▁", " ").encode()

    def _token_json(self, token_id: int) -> TokenJson:
        raw = self.token_bytes(token_id)
        text = raw.decode("utf-8", "replace")
        try:
            key = raw.decode()
        except UnicodeDecodeError:
            key = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return TokenJson(text, key, line_json(text), orjson.dumps(list(raw)))

    def offsets(self, token_ids: Sequence[int], special: bool = False) -> Iterator[int]:
        """For each token of a whole text, the number of characters that are complete before it.

        special: as in `stream`.
        """
        stream, complete = self.stream((), special=special), 0
        for token_id in token_ids:
            yield complete
            complete += len(stream.push((token_id,)))

    def stream(
        self, prompt_token_ids: Sequence[int], shown: Mapping[int, str] | None = None, *, special: bool = False
    ) -> Detokenizer:
        """A detokenizer for the tokens that follow a prompt.

        shown: the text of tokens that are shown in another way. special: special tokens are part of the text.
        """
        stream: Detokenizer
        if self._byte_level:
            stream = _ByteLevel(self.token_bytes if special else self.text_bytes)
        else:
            skipped: Set[int] = frozenset() if special else self._special
            stream = _General(self._tokenizer, skipped, prompt_token_ids[-CONTEXT_TOKENS:], special)
        return _Showing(stream, shown) if shown else stream


class _ByteLevel:
    """Tokens are byte strings, so the incremental UTF-8 decoder determines when a character is complete."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            return self._decoder.decode(self._bytes_of(token_ids[0]))
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))


class _Showing:
    """Shows some tokens by another text than their own."""

    def __init__(self, stream: Detokenizer, shown: Mapping[int, str]) -> None:
        self._stream = stream
        self._shown = shown

    def push(self, token_ids: Sequence[int]) -> str:
        if self._shown.keys().isdisjoint(token_ids):
            return self._stream.push(token_ids)
        shown = self._shown
        return "".join([shown[one] if one in shown else self._stream.push((one,)) for one in token_ids])


class _General:
    """Any other decoder pipeline, through the tokenizer's own stream.

    The stream decodes all tokens again that it has held back, and fails where bytes after a character are none: such
    tokens are decoded by themselves, and a new stream begins.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: Set[int], context: Sequence[int], special: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._skips_special = not special
        self._context: list[int] = []
        self._held: list[int] = []  # since the last piece
        self._begin(context)

    def push(self, token_ids: Sequence[int]) -> str:
        with panics_as_errors():
            return "".join([self._step(token_id) for token_id in token_ids if token_id not in self._skipped])

    def _step(self, token_id: int) -> str:
        self._held.append(token_id)
        try:
            piece: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # raised by the library, which has no other type of exception
            return self._decode_held()
        if piece is not None:
            self._context = [*self._context, *self._held][-CONTEXT_TOKENS:]
            self._held = []
            return piece
        return "" if len(self._held) < HELD_TOKENS else self._decode_held()

    def _decode_held(self) -> str:
        text = self._tokenizer.decode(self._held, skip_special_tokens=self._skips_special)
        complete = text and not text.endswith("\ufffd")  # else the stream would repeat what comes before the next token
        self._begin([*self._context, *self._held][-CONTEXT_TOKENS:] if complete else self._context)
        return text

    def _begin(self, context: Sequence[int]) -> None:
        self._context = list(context)
        self._held = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skips_special)


@lru_cache(maxsize=1)
def byte_of_char() -> dict[str, int]:
    """The characters that represent the 256 bytes in byte-level vocabularies.

    Printable Latin-1 bytes map to themselves; the others, in order, map to characters from U+0100 on (GPT-2's scheme).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
