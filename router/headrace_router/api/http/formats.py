"""OpenAI's response objects, as bytes. Chunks are assembled by hand, for speed: one is made for every token."""

from collections.abc import Sequence
from typing import Any, Protocol

import orjson
from starlette.responses import Response

from headrace_proto.replica_pb2 import TokenLogprobs
from headrace_router.dispatch.choice import ChoiceUpdate
from headrace_router.dispatch.running_request import RunningRequest
from headrace_router.text.model_card import ModelCard

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def dumps(value: Any) -> bytes:
    """JSON bytes; keys in the order given."""
    return orjson.dumps(value)


def json_response(value: Any) -> Response:
    """A complete response of one JSON value."""
    return Response(dumps(value), media_type="application/json")


def line_json(value: Any) -> bytes:
    """JSON that is one line for every line reader.

    JSON does not escape three characters that end a line in Unicode, and so in Python's `str.splitlines` and in line
    readers of HTTP clients: NEL, LINE SEPARATOR, PARAGRAPH SEPARATOR. A model may generate them.
    """
    data = orjson.dumps(value)
    if data.isascii():
        return data
    for raw, escaped in _LINE_ENDS:
        data = data.replace(raw, escaped)
    return data


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + line_json(value) + b"\n\n"


def usage(running: RunningRequest) -> dict[str, Any]:
    """The usage object of the tokens generated so far."""
    prompt, completion = running.request.prompt_tokens, running.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": running.cached_tokens},
    }


class Format(Protocol):
    """The response format of one API. One object per request: it keeps text offsets."""

    def head(self) -> list[bytes]:
        """Events before the first token."""

    def chunk(self, update: ChoiceUpdate) -> bytes:
        """Events for one update of one choice."""

    def usage_chunk(self, running: RunningRequest) -> bytes:
        """The event with the usage and no choices."""

    def response_object(self, updates: Sequence[ChoiceUpdate], running: RunningRequest) -> dict[str, Any]:
        """The object of a request without streaming, from one merged update per choice."""


class TokenFormat:
    """Token strings and bytes, as logprobs list them."""

    def __init__(self, card: ModelCard) -> None:
        self._token_bytes = card.tokens.token_bytes

    def text(self, token_id: int) -> str:
        """The token as text; a part of a character becomes U+FFFD, since its bytes are listed, too."""
        return self._token_bytes(token_id).decode("utf-8", "replace")

    def key(self, token_id: int) -> str:
        """The token as text, or its bytes in hexadecimal, so that parts of different characters stay distinct."""
        raw = self._token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def raw(self, token_id: int) -> list[int]:
        return list(self._token_bytes(token_id))

    def clean(self, logprob: float) -> float:
        """JSON has no infinity: an impossible token has -9999, as in OpenAI's API."""
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
