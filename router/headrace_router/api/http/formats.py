"""OpenAI's response objects, as bytes. They are assembled by hand, for speed: a chunk is made for every token."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import orjson
from starlette.responses import Response

from headrace_proto.replica_pb2 import TokenLogprobs
from headrace_router.core.errors import ApiError
from headrace_router.dispatch.choice import CallPart, ChoiceUpdate, ParsedParts
from headrace_router.dispatch.running_request import RunningRequest
from headrace_router.text.detokenize import line_json
from headrace_router.text.model_card import ModelCard
from headrace_router.validation.bodies import ChatBody, CompletionBody

DONE = b"data: [DONE]\n\n"
EVENTS = b"text/event-stream; charset=utf-8"


class _OpenAIStream:
    """What streams of both OpenAI APIs have in common."""

    media_type = EVENTS
    keep_alive = b": keep-alive\n\n"

    def error(self, error: ApiError) -> bytes:
        """An event; `[DONE]` does not follow."""
        return event(error.body())


class CompletionFormat(_OpenAIStream):
    """`text_completion`, which streams the same object piece by piece."""

    def __init__(self, body: CompletionBody, running: RunningRequest, ident: str, created: int) -> None:
        card = running.request.card
        self._head = {"id": f"cmpl-{ident}", "object": "text_completion", "created": created, "model": body.model}
        self._tokens = TokenFormat(card)
        self._logprobs = body.logprobs
        self._prompt_logprobs = body.prompt_logprobs
        self._choices = running.request.choices
        self._table = card.tokens
        self._special = running.request.special
        self._ids = bool(body.return_token_ids)
        self._echoes = running.request.echoes or ("",) * len(running.choices)
        self._before = b"data: " + line_json({**self._head, "system_fingerprint": None})[:-1] + b',"choices":['
        self._includes_usage = body.includes_usage
        self._after = b'],"usage":null}\n\n' if body.includes_usage else b"]}\n\n"

    def head(self) -> Iterator[bytes]:
        """The prompts, when they are to be echoed; those with log-probabilities come with the first tokens."""
        for index, text in enumerate(self._echoes):
            if text and self._logprobs is None:
                yield self._before + line_json({"index": index, "text": text, "logprobs": None, "finish_reason": None})
                yield self._after

    def chunk(self, update: ChoiceUpdate) -> Iterator[bytes]:
        echoed = self._echoes[update.index] if update.prompt_logprobs is not None else ""
        pieces = self._choice(update, echoed + update.text)
        if self._logprobs is not None:
            yield self._before
            yield from pieces
            yield self._after
        else:
            yield b"".join([self._before, *pieces, self._after])

    def tail(self, running: RunningRequest) -> bytes:
        if not self._includes_usage:
            return DONE
        return event({**self._head, "system_fingerprint": None, "choices": [], "usage": usage(running)}) + DONE

    def response(self, updates: Sequence[ChoiceUpdate], running: RunningRequest) -> Iterator[bytes]:
        yield line_json({**self._head, "system_fingerprint": None})[:-1] + b',"choices":'
        yield from array(self._choice(update, self._echoes[update.index] + update.text) for update in updates)
        yield b',"usage":' + dumps(usage(running)) + b"}"

    def _choice(self, update: ChoiceUpdate, text: str) -> Iterator[bytes]:
        yield b'{"index":%d,"text":%b,"logprobs":' % (update.index, line_json(text))
        yield from self._entries(update) if self._logprobs is not None else (b"null",)
        if self._prompt_logprobs is not None:
            prompt_ids = self._choices[update.index].prompt_token_ids
            yield b',"prompt_logprobs":'
            yield from self._tokens.prompt_entries(prompt_ids, update.prompt_logprobs, self._prompt_logprobs)
        if self._ids:
            yield b',"token_ids":' + dumps(update.token_ids)
        yield b',"finish_reason":' + dumps(update.finish_reason) + b"}"

    def _entries(self, update: ChoiceUpdate) -> Iterator[bytes]:
        """The legacy format: parallel lists. Offsets count characters from the start of the choice's text."""
        entries: list[TokenLogprobs | None] = list(update.logprobs)
        if update.ending is not None:  # tools that count one more entry than the prompt has rely on it
            entries.append(update.ending)
        token_ids = update.token_ids[: len(entries)]
        echo = self._echoes[update.index]
        offsets = [len(echo) + offset for offset in update.offsets]
        if echo and update.prompt_logprobs is not None:
            prompt = self._choices[update.index].prompt_token_ids
            token_ids = [*prompt, *token_ids]
            offsets = [min(offset, len(echo)) for offset in self._table.offsets(prompt, self._special)] + offsets
            entries = [None, *update.prompt_logprobs, *entries]
        yield b'{"tokens":'
        yield from array((line_json(self._tokens.token(token_id).key),) for token_id in token_ids)
        yield b',"token_logprobs":'
        yield from array((b"null" if entry is None else dumps(clean(entry.logprob)),) for entry in entries)
        yield b',"top_logprobs":'
        yield from array((self._top(*pair),) for pair in zip(token_ids, entries, strict=True))
        yield b',"text_offset":' + dumps(offsets) + b"}"

    def _top(self, token_id: int, entry: TokenLogprobs | None) -> bytes:
        if entry is None:
            return b"null"
        listed = {
            self._tokens.token(other).key: clean(logprob)
            for other, logprob in list(zip(entry.top_ids, entry.top_logprobs, strict=True))[: self._logprobs]
        }
        # The token that was chosen is always listed, as an extra one if it is not among the best.
        return line_json({**listed, self._tokens.token(token_id).key: clean(entry.logprob)})


class ChatFormat(_OpenAIStream):
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(
        self,
        body: ChatBody,
        running: RunningRequest,
        ident: str,
        created: int,
        *,
        reasoning_field: str = "reasoning_content",
    ) -> None:
        """reasoning_field: of the model's reasoning, in deltas and messages."""
        card = running.request.card
        self._reasoning_field = reasoning_field if body.include_reasoning is not False else ""
        self._choices = len(running.choices)
        self._common = {"id": f"chatcmpl-{ident}", "created": created, "model": body.model}
        self._tokens = TokenFormat(card)
        self._logprobs = bool(body.logprobs)
        self._prompt_logprobs = body.prompt_logprobs
        self._prompt = running.request.choices[0].prompt_token_ids
        self._ids = bool(body.return_token_ids)
        opening = {
            "id": self._common["id"],
            "object": "chat.completion.chunk",
            **self._common,
            "system_fingerprint": None,
        }
        self._before = b"data: " + line_json(opening)[:-1] + b',"choices":[{"index":'
        self._includes_usage = body.includes_usage
        self._after = b'],"usage":null}\n\n' if body.includes_usage else b"]}\n\n"

    def head(self) -> Iterator[bytes]:
        """The role of every choice."""
        delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        for index in range(self._choices):
            yield self._before + b"%d" % index + delta + self._after

    def chunk(self, update: ChoiceUpdate) -> Iterator[bytes]:
        if update.parsed is not None:
            delta = self._delta(update, update.parsed)
            listed = update.token_ids and (self._ids or self._logprobs)
            visible = bool(listed) or delta != b"{}"
        else:
            delta = b'{"content":%b}' % line_json(update.text)
            visible = bool(update.text or update.token_ids)
        if visible:
            beginning = self._before + b'%d,"delta":%b,"logprobs":' % (update.index, delta)
            ids = b',"token_ids":' + line_json(update.token_ids) if self._ids else b""
            end = ids + b',"finish_reason":null}' + self._after
            if self._logprobs:
                yield beginning
                yield from self._entries(update)
                yield end
            else:
                yield beginning + b"null" + end
        if update.finish_reason is not None:
            finish = b',"delta":{},"logprobs":null,"finish_reason":"%b"}' % update.finish_reason.encode()
            yield self._before + b"%d" % update.index + finish + self._after

    def _delta(self, update: ChoiceUpdate, parsed: ParsedParts) -> bytes:
        """What is new of an answer's reasoning, text and calls."""
        delta: dict[str, Any] = {}
        if parsed.reasoning and self._reasoning_field:
            delta[self._reasoning_field] = "".join(parsed.reasoning)
        if update.pieces:
            delta["content"] = update.text
        if parsed.calls:
            delta["tool_calls"] = [{"index": part.index, **_call(part)} for part in parsed.calls.values()]
        return line_json(delta)

    def tail(self, running: RunningRequest) -> bytes:
        if not self._includes_usage:
            return DONE
        chunk = {
            "id": self._common["id"],
            "object": "chat.completion.chunk",
            **self._common,
            "system_fingerprint": None,
            "choices": [],
            "usage": chat_usage(running),
        }
        return event(chunk) + DONE

    def response(self, updates: Sequence[ChoiceUpdate], running: RunningRequest) -> Iterator[bytes]:
        opening = {
            "id": self._common["id"],
            "object": "chat.completion",
            **self._common,
            "system_fingerprint": None,
        }
        yield line_json(opening)[:-1] + b',"choices":'
        yield from array(self._choice(update) for update in updates)
        if self._prompt_logprobs is not None:
            yield b',"prompt_logprobs":'
            yield from self._tokens.prompt_entries(self._prompt, updates[0].prompt_logprobs, self._prompt_logprobs)
        yield b',"usage":' + dumps(chat_usage(running)) + b"}"

    def _choice(self, update: ChoiceUpdate) -> Iterator[bytes]:
        message: dict[str, Any] = {"role": "assistant", "content": update.text, "refusal": None}
        parsed = update.parsed or ParsedParts()
        if parsed.reasoning and self._reasoning_field:
            message[self._reasoning_field] = "".join(parsed.reasoning)
        if parsed.calls:
            message["content"] = update.text or None
            message["tool_calls"] = [_call(part) for part in parsed.calls.values()]
        yield b'{"index":%d,"message":%b,"logprobs":' % (update.index, line_json(message))
        yield from self._entries(update) if self._logprobs else (b"null",)
        yield b',"finish_reason":' + dumps(update.finish_reason)
        if self._ids:
            yield b',"token_ids":' + dumps(update.token_ids)
        yield b"}"

    def _entries(self, update: ChoiceUpdate) -> Iterator[bytes]:
        pairs = zip(update.token_ids, update.logprobs, strict=False)  # the ending token has no entry
        yield b'{"content":'
        yield from array((self._tokens.chat_entry(*pair),) for pair in pairs)
        yield b',"refusal":null}'


def _call(part: CallPart) -> dict[str, Any]:
    """A call, or what is new of it: after its first part the arguments alone."""
    kind, field = ("custom", "input") if part.custom else ("function", "arguments")
    if not part.name:
        return {kind: {field: part.arguments}}
    return {"id": part.ident, "type": kind, kind: {"name": part.name, field: part.arguments}}


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

    media_type: bytes
    """Of a stream."""

    keep_alive: bytes
    """Sent when no token has come for a while."""

    def head(self) -> Iterator[bytes]:
        """Events before the first token."""

    def chunk(self, update: ChoiceUpdate) -> Iterator[bytes]:
        """Events for one update of one choice."""

    def tail(self, running: RunningRequest) -> bytes:
        """The end of a stream, with the usage where it is asked for."""

    def error(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""

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
