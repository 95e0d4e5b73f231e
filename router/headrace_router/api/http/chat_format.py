"""The response format of /v1/chat/completions."""

from collections.abc import Iterator, Sequence
from typing import Any

from headrace_router.api.http.formats import TokenFormat, array, chat_usage, dumps, event
from headrace_router.dispatch.choice import CallPart, ChoiceUpdate, ParsedParts
from headrace_router.dispatch.running_request import RunningRequest
from headrace_router.text.line_json import line_json
from headrace_router.validation.bodies import ChatBody


class ChatFormat:
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

    def usage_chunk(self, running: RunningRequest) -> bytes:
        return event(
            {
                "id": self._common["id"],
                "object": "chat.completion.chunk",
                **self._common,
                "system_fingerprint": None,
                "choices": [],
                "usage": chat_usage(running),
            }
        )

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
