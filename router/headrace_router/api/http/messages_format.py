"""Anthropic's message objects and events, from the updates that OpenAI's are made of: one block at a time."""

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from headrace_router.answer.events import Args, CallStart, Event, Reasoning, Text
from headrace_router.api.http.formats import dumps
from headrace_router.core.errors import ApiError
from headrace_router.dispatch.choice import LENGTH, TOOL_CALLS, ChoiceUpdate
from headrace_router.dispatch.running_request import RunningRequest
from headrace_router.text.detokenize import line_json
from headrace_router.validation.bodies import ChatBody

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def messages_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """The error object of this API."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


class MessagesFormat:
    """`message` and its stream: a block of content opens with the first part of its kind and closes with the next kind.

    Text that is white space alone opens no block.
    """

    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, body: ChatBody, running: RunningRequest, ident: str, _created: int) -> None:
        self._ident = f"msg_{ident}"
        self._model = body.model
        self._reasoning = body.include_reasoning is not False
        self._running = running
        self._label = running.request.label
        self._block: type[Event] | None = None  # the kind of the open block
        self._index = -1
        self._calls = 0
        self._space = ""  # white space that may be the beginning of a text

    def head(self) -> Iterator[bytes]:
        """The message without content."""
        yield _event("message_start", message=self._message([], None, None))
        yield self.keep_alive

    def chunk(self, update: ChoiceUpdate) -> Iterator[bytes]:
        for event in _events(update):
            if isinstance(event, CallStart):
                yield from self._open(CallStart, self._call(update))
            elif isinstance(event, Args):
                yield self._delta(type="input_json_delta", partial_json=event.text)
            elif isinstance(event, Reasoning) and self._reasoning:
                if self._block is not Reasoning:
                    yield from self._open(Reasoning, {"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta(type="thinking_delta", thinking=event.text)
            elif isinstance(event, Text):
                text, self._space = self._space + event.text, ""
                if self._block is not Text:
                    if text.isspace():
                        self._space = text
                        continue
                    yield from self._open(Text, {"type": "text", "text": ""})
                yield self._delta(type="text_delta", text=text)
        if update.finish_reason is not None:
            yield from self._close()
            stop = {"stop_reason": _stop_reason(update), "stop_sequence": update.stop_string}
            yield _event("message_delta", delta=stop, usage=self._usage())

    def tail(self, _running: RunningRequest) -> bytes:
        """The end of a stream."""
        return _event("message_stop")

    def error(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""
        return b"event: error\ndata: " + line_json(messages_error(error, self._label)) + b"\n\n"

    def response(self, updates: Sequence[ChoiceUpdate], _running: RunningRequest) -> Iterator[bytes]:
        (update,) = updates
        content: list[dict[str, Any]] = []
        arguments: list[str] = []
        for event in _events(update):
            last = content[-1] if content else {"type": ""}
            if isinstance(event, CallStart):
                content.append(self._call(update))
                arguments.append("")
                self._space = ""
            elif isinstance(event, Args):
                arguments[-1] += event.text
            elif isinstance(event, Reasoning) and self._reasoning:
                if last["type"] != "thinking":
                    last = {"type": "thinking", "thinking": "", "signature": ""}
                    content.append(last)
                    self._space = ""
                last["thinking"] += event.text
            elif isinstance(event, Text):
                text, self._space = self._space + event.text, ""
                if last["type"] == "text":
                    last["text"] += text
                elif text.isspace():
                    self._space = text
                else:
                    content.append({"type": "text", "text": text})
        calls = [block for block in content if block["type"] == "tool_use"]
        for block, text in zip(calls, arguments, strict=True):
            block["input"] = _object(text)
        yield dumps(self._message(content, _stop_reason(update), update.stop_string))

    def _call(self, update: ChoiceUpdate) -> dict[str, Any]:
        assert update.parsed is not None
        part = update.parsed.calls[self._calls]
        self._calls += 1
        return {"type": "tool_use", "id": part.ident, "name": part.name, "input": {}}

    def _open(self, kind: type[Event], block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._block = kind
        self._index += 1
        self._space = ""
        yield _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self._block is not None:
            self._block = None
            yield _event("content_block_stop", index=self._index)

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _message(self, content: list[dict[str, Any]], reason: str | None, stop: str | None) -> dict[str, Any]:
        return {
            "id": self._ident,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        """`input_tokens` are those that were not cached, as this API counts them."""
        cached = self._running.cached_tokens
        return {
            "input_tokens": self._running.request.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._running.completion_tokens,
        }


def _events(update: ChoiceUpdate) -> Sequence[Event]:
    if update.parsed is not None:
        return update.parsed.events
    return [Text(update.text)] if update.text else []


def _stop_reason(update: ChoiceUpdate) -> str:
    if update.finish_reason == TOOL_CALLS:
        return "tool_use"
    if update.finish_reason == LENGTH:
        return "max_tokens"
    return "stop_sequence" if update.stop_string is not None else "end_turn"


def _object(arguments: str) -> dict[str, Any]:
    """The input of a call; of a call that was cut off, what can be read as an object: nothing."""
    try:
        value = orjson.loads(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), line_json({"type": kind, **fields}))
