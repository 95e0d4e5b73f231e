"""OpenAI's response objects, as bytes. They are assembled by hand, for speed: a chunk is made for every token."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import orjson
from starlette.responses import Response

from headrace_proto.replica_pb2 import TokenLogprobs
from headrace_router.dispatch.choice import ChoiceUpdate
from headrace_router.dispatch.running_request import RunningRequest
from headrace_router.text.line_json import line_json
from headrace_router.text.model_card import ModelCard

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def dumps(value: Any) -> bytes:
    """JSON bytes; keys in the order given."""
    return orjson.dumps(value)


def json_response(value: Any) -> Response:
    """A complete response of one JSON value."""
    return Response(dumps(value), media_type="application/json")


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


def chat_usage(running: RunningRequest) -> dict[str, Any]:
    """The same of a chat, whose reasoning is known."""
    return {**usage(running), "completion_tokens_details": {"reasoning_tokens": running.reasoning_tokens}}


class Format(Protocol):
    """The response format of one API. One object per request: it keeps text offsets.

    What may be large is made in pieces: each is cheap to make, and may be the end of one event and the beginning of
    the next.
    """

    def head(self) -> Iterator[bytes]:
        """Events before the first token."""

    def chunk(self, update: ChoiceUpdate) -> Iterator[bytes]:
        """Events for one update of one choice."""

    def usage_chunk(self, running: RunningRequest) -> bytes:
        """The event with the usage and no choices."""

    def response(self, updates: Sequence[ChoiceUpdate], running: RunningRequest) -> Iterator[bytes]:
        """The object of a request without streaming, from one merged update per choice."""


class TokenFormat:
    """Tokens and log-probabilities, as responses list them."""

    def __init__(self, card: ModelCard) -> None:
        self.token = card.tokens.token_json

    def chat_entry(self, token_id: int, entry: TokenLogprobs) -> bytes:
        """One element of a chat's logprobs.content."""
        top = [
            self._chat_token(other, logprob) + b"}"
            for other, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        return self._chat_token(token_id, entry.logprob) + b',"top_logprobs":[' + b",".join(top) + b"]}"

    def prompt_entries(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs] | None, best: int
    ) -> Iterator[bytes]:
        """`prompt_logprobs` as in vLLM's API: null, then an object by token id for each token after the first.

        best: alternatives to list. A token has a rank where it is among these.
        """
        yield b"[null"
        for token_id, entry in zip(token_ids[1:], entries or (), strict=True):
            listed = {token_id: (entry.logprob, None)} | {
                other: (logprob, place + 1)
                for place, (other, logprob) in enumerate(
                    zip(entry.top_ids[:best], entry.top_logprobs[:best], strict=True)
                )
            }
            yield b"," + line_json(
                {
                    str(other): {"logprob": clean(logprob), "rank": rank, "decoded_token": self.token(other).text}
                    for other, (logprob, rank) in listed.items()
                }
            )
        yield b"]"

    def _chat_token(self, token_id: int, logprob: float) -> bytes:
        token = self.token(token_id)
        return b'{"token":%b,"logprob":%b,"bytes":%b' % (token.text_json, dumps(clean(logprob)), token.bytes_json)


def clean(logprob: float) -> float:
    """JSON has no infinity: an impossible token has -9999, as in OpenAI's API."""
    return max(logprob, -9999.0)


def array(entries: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """A JSON array, of entries that are in pieces themselves."""
    before = b"["
    for entry in entries:
        yield before
        yield from entry
        before = b","
    yield b"[]" if before == b"[" else b"]"
