"""Anthropic's message objects and events."""

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from headrace_router.api.http.blocks import Added, Block, BlockReader, Closed, Opened
from headrace_router.api.http.formats import EVENTS, dumps
from headrace_router.core.cache_miss import MissReason, miss_since
from headrace_router.core.errors import ApiError, ContextLengthError
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
    message = error.message
    if isinstance(error, ContextLengthError) and error.lengths is not None:
        # In Anthropic's words, which its clients read to shorten the conversation, and go on.
        message = f"prompt is too long: {error.lengths[0]} tokens > {error.lengths[1]} maximum"
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


class MessagesFormat:
    """`message` and its stream."""

    media_type = EVENTS
    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(
        self,
        body: ChatBody,
        running: RunningRequest,
        ident: str,
        _created: int,
        *,
        previous: str | None = None,
    ) -> None:
        """previous: the answer with which diagnostics compare the request."""
        self._previous = previous
        self._ident = f"msg_{ident}"
        self._model = body.model
        self._running = running
        self._blocks = BlockReader(reasoning=body.include_reasoning is not False)

    def head(self) -> Iterator[bytes]:
        """The message without content."""
        yield _event("message_start", message=self._message([], None, None))
        yield self.keep_alive

    def chunk(self, update: ChoiceUpdate) -> Iterator[bytes]:
        for step in self._blocks.read(update):
            index = step.block.index
            if isinstance(step, Opened):
                yield _event("content_block_start", index=index, content_block=_content(step.block, closed=False))
            elif isinstance(step, Added):
                kind, member = _DELTAS[step.block.kind]
                yield _event("content_block_delta", index=index, delta={"type": kind, member: step.text})
            else:
                if step.block.kind == "reasoning":  # clients drop thinking without one
                    signed = {"type": "signature_delta", "signature": _SIGNED}
                    yield _event("content_block_delta", index=index, delta=signed)
                yield _event("content_block_stop", index=index)
        if update.finish_reason is not None:
            stop = {"stop_reason": _stop_reason(update), "stop_sequence": update.stop_string}
            yield _event("message_delta", delta=stop, usage=self._usage())

    def tail(self, _running: RunningRequest) -> bytes:
        """The end of a stream."""
        return _event("message_stop")

    def error(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""
        return b"event: error\ndata: " + line_json(messages_error(error, self._running.request.label)) + b"\n\n"

    def response(self, updates: Sequence[ChoiceUpdate], _running: RunningRequest) -> Iterator[bytes]:
        (update,) = updates
        content = [_content(step.block) for step in self._blocks.read(update) if isinstance(step, Closed)]
        yield dumps(self._message(content, _stop_reason(update), update.stop_string))

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
            "diagnostics": self._diagnosis(),
        }

    def _diagnosis(self) -> dict[str, Any] | None:
        """Why the cache did not have the whole prompt of the answer that the request names; null where it did.

        See https://platform.claude.com/docs/en/build-with-claude/cache-diagnostics
        """
        request, visits = self._running.request, self._running.visits
        turn = request.turn
        if self._previous is None or turn is None:
            return None
        visit = visits.get(self._previous.removeprefix("msg_"), turn.tenant)
        if visit is None:
            return {"cache_miss_reason": {"type": "previous_message_not_found"}}
        miss = miss_since(visit, turn, request.choices[0].blocks)
        if miss is None or (visit.blocks is not None and not miss.tokens):
            return None
        kind = "model_changed" if visit.model != turn.model else _MISSES.get(miss.reason, "unavailable")
        tokens = {} if kind == "unavailable" else {"cache_missed_input_tokens": miss.tokens}
        return {"cache_miss_reason": {"type": kind, **tokens}}

    def _usage(self) -> dict[str, int]:
        """`input_tokens` are those that were not cached, as this API counts them."""
        cached = self._running.cached_tokens
        return {
            "input_tokens": self._running.request.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._running.completion_tokens,
        }


_SIGNED = "headrace"  # nobody checks it
_MISSES = {
    MissReason.SYSTEM_CHANGED: "system_changed",
    MissReason.TOOLS_CHANGED: "tools_changed",
    MissReason.MESSAGE_CHANGED: "messages_changed",
}
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _content(block: Block, *, closed: bool = True) -> dict[str, Any]:
    """A block of content, with what was read of it. closed: it is complete."""
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": _SIGNED if closed else ""}
    assert block.call is not None
    return {"type": "tool_use", "id": block.call.ident, "name": block.call.name, "input": _object(block.text)}


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
