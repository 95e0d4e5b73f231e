"""OpenAI's response objects, as bytes. Chunks are put together by hand: they are made for every token."""

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from headrace_proto.replica_pb2 import TokenLogprobs
from headrace_router.choice import ChoiceUpdate
from headrace_router.generation import Generation
from headrace_router.model_card import ModelCard

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def dumps(value: Any) -> bytes:
    """JSON bytes; keys in the order given."""
    return orjson.dumps(value)


def line_json(value: Any) -> bytes:
    """JSON that stays one line for every reader of lines.

    JSON lets three characters stand as they are at which Unicode, and with it Python's `str.splitlines` and the line
    readers of HTTP clients, end a line: NEL, LINE SEPARATOR, PARAGRAPH SEPARATOR. A model may well say them.
    """
    data = orjson.dumps(value)
    if data.isascii():
        return data
    for spelled, escaped in _LINE_ENDS:
        data = data.replace(spelled, escaped)
    return data


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + line_json(value) + b"\n\n"


def usage(generation: Generation) -> dict[str, Any]:
    """The usage object of what was generated so far."""
    prompt, completion = generation.request.prompt_tokens, generation.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


class Format(Protocol):
    """How one API shows a generation. One object per request: it keeps running text offsets."""

    def head(self) -> list[bytes]:
        """Events before the first token."""

    def chunk(self, update: ChoiceUpdate) -> bytes:
        """Events for one update of one choice."""

    def usage_chunk(self, generation: Generation) -> bytes:
        """The event with the usage and no choices."""

    def whole(self, updates: Sequence[ChoiceUpdate], generation: Generation) -> dict[str, Any]:
        """The object of a request without streaming, from one merged update per choice."""


class TokenShape:
    """Token strings and bytes as logprobs list them."""

    def __init__(self, card: ModelCard) -> None:
        self._spelled = card.tokens.spelled

    def text(self, token_id: int) -> str:
        """The token as text; a piece of a character shows as U+FFFD, as its bytes tell the truth."""
        return self._spelled(token_id).decode("utf-8", "replace")

    def key(self, token_id: int) -> str:
        """The token as text, or its bytes spelled out, so that pieces of different characters stay apart."""
        raw = self._spelled(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def raw(self, token_id: int) -> list[int]:
        return list(self._spelled(token_id))

    def clean(self, logprob: float) -> float:
        """JSON has no infinity: a token that cannot be has -9999, as OpenAI writes it."""
        return max(logprob, -9999.0)

    def chat_entry(self, token_id: int, entry: TokenLogprobs) -> dict[str, Any]:
        """One element of a chat's logprobs.content."""
        return {
            "token": self.text(token_id),
            "logprob": self.clean(entry.logprob),
            "bytes": self.raw(token_id),
            "top_logprobs": [
                {"token": self.text(other), "logprob": self.clean(logprob), "bytes": self.raw(other)}
                for other, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ],
        }
