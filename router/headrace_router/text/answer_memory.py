"""Tokens of answers that this router gave, so that the next turn of a conversation repeats them token by token.

A model does not always write a text with the tokens that a tokenizer makes of it. Encoded again, the text of an answer
then parts from the KV blocks of its first computation, and all that follows is computed again.

An answer is found by what the client was given: the messages before it, its text and its calls. Its tokens are used as
far as the template writes the same text at the same place, after the same beginning.
"""

import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from threading import Lock
from typing import Any

ANSWER_BYTES = 64 << 20  # of all answers that are kept; the longest unused ones are dropped
ENTRY_BYTES = 400  # of an answer, beside its tokens
_DIGEST = 16  # bytes


@dataclass(frozen=True, slots=True)
class Known:
    """A part of a rendered chat, from one character to another, of which the tokens are known."""

    start: int
    end: int
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class AnswerPlace:
    """Where an answer to a chat begins. key: of the messages before it; chars, digest: of the rendered text."""

    key: bytes
    chars: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Answer:
    chars: int
    digest: bytes
    token_ids: "array[int]"

    @property
    def bytes(self) -> int:
        return ENTRY_BYTES + 4 * len(self.token_ids)


def message_digest(message: Mapping[str, Any]) -> bytes:
    """Of what a client gives back of a message: ids of calls and the reasoning may be left out, JSON written anew, and
    the white space of an answer be another.
    """
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    content = message.get("content") or ""
    if message["role"] == "assistant":
        content = "".join(content.split())
    return digest_of([message["role"], message.get("name"), content, calls])


def message_keys(root: bytes, digests: Sequence[bytes]) -> list[bytes]:
    """The key after each number of messages, from none to all of them. root: of the tenant, the model and the tools."""
    keys = [root]
    for digest in digests:
        keys.append(key_after(keys[-1], digest))
    return keys


def key_after(key: bytes, digest: bytes) -> bytes:
    """The key after one more message."""
    return blake2b(digest, key=key[:64], digest_size=_DIGEST).digest()


def digest_of(value: Any) -> bytes:
    """Of a JSON value. Half a surrogate pair is escaped, as all that is not ASCII."""
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=_DIGEST).digest()


class AnswerMemory:
    """The newest answers of one router. Safe to use from several threads."""

    def __init__(self, most_bytes: int = ANSWER_BYTES) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        self._lock = Lock()

    def add(self, place: AnswerPlace, message: Mapping[str, Any], token_ids: Sequence[int]) -> None:
        """message: of the assistant, as the client was given it. token_ids: all that the model wrote."""
        answer = _Answer(place.chars, place.digest, array("I", token_ids))
        key = key_after(place.key, message_digest(message))
        with self._lock:
            known = self._answers.pop(key, None)
            self._bytes += answer.bytes - (known.bytes if known is not None else 0)
            self._answers[key] = answer
            while self._bytes > self._most:
                _, dropped = self._answers.popitem(last=False)
                self._bytes -= dropped.bytes

    def known(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        keys: Sequence[bytes],
        token_bytes: Callable[[int], bytes],
    ) -> list[Known]:
        """The parts of a rendered chat that answers of the memory wrote, in order. keys: see `message_keys`.

        Slow for long texts: call it off the event loop.
        """
        found: list[Known] = []
        digests = _Prefixes(text)
        for answer in self._of(messages, keys):
            start = answer.chars
            if (not found or start >= found[-1].end) and digests.of(start) == answer.digest:
                chars, count = _matching(text, start, answer.token_ids, token_bytes)
                if count:
                    found.append(Known(start, start + chars, answer.token_ids[:count]))
        return found

    def _of(self, messages: Sequence[Mapping[str, Any]], keys: Sequence[bytes]) -> Iterator[_Answer]:
        with self._lock:
            for message, (_, key) in zip(messages, pairwise(keys), strict=True):
                if message["role"] == "assistant" and key in self._answers:
                    self._answers.move_to_end(key)
                    yield self._answers[key]


def answer_place(text: str, key: bytes) -> AnswerPlace:
    """Of an answer to this rendered chat."""
    return AnswerPlace(key, len(text), _Prefixes(text).of(len(text)))


class _Prefixes:
    """Digests of beginnings of a text, of growing length."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._hash = blake2b(digest_size=_DIGEST)
        self._done = 0

    def of(self, chars: int) -> bytes:
        """Of the first so many characters, no fewer than before. Of a text that is shorter: empty."""
        if not self._done <= chars <= len(self._text):
            return b""
        self._hash.update(self._text[self._done : chars].encode())
        self._done = chars
        return self._hash.digest()


def _matching(text: str, start: int, token_ids: Sequence[int], token_bytes: Callable[[int], bytes]) -> tuple[int, int]:
    """How many characters of the text from here on, and how many of the tokens, are the same."""
    written = [token_bytes(token_id) for token_id in token_ids]
    there = text[start : start + sum(map(len, written))].encode()
    place = count = whole = 0
    for number, piece in enumerate(written, 1):
        if not piece or not there.startswith(piece, place):
            break
        place += len(piece)
        if place == len(there) or there[place] & 0xC0 != 0x80:  # not inside of a character
            count, whole = number, place
    return len(there[:whole].decode()), count
