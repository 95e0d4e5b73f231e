"""OpenAI's objects and events of /v1/responses: an item has one id from its first event to the whole answer."""

from collections.abc import Iterator, Sequence
from typing import Any

from headrace_router.api.http.blocks import Added, Block, BlockReader, Closed, Opened
from headrace_router.api.http.formats import EVENTS, dumps
from headrace_router.core.errors import ApiError
from headrace_router.dispatch.choice import LENGTH, ChoiceUpdate
from headrace_router.dispatch.running_request import RunningRequest
from headrace_router.text.detokenize import line_json
from headrace_router.validation.bodies import ChatBody
from headrace_router.validation.responses_body import Echo, sealed, without_namespace


class ResponsesFormat:
    """`response` and its stream."""

    media_type = EVENTS
    keep_alive = b": keep-alive\n\n"

    def __init__(self, body: ChatBody, echo: Echo, running: RunningRequest, ident: str, created: int) -> None:
        self._ident = ident
        self._created = created
        self._model = body.model
        self._repeated = echo.fields
        self._encrypts = echo.encrypts
        # The whole reasoning, in the form that clients show, where they ask for a summary.
        self._summary = bool(echo.fields["reasoning"]["summary"])
        self._running = running
        self._blocks = BlockReader()
        self._number = 0  # sequence number of the next event
        self._output: list[dict[str, Any]] = []  # items that are complete
        self._finish = ""

    def head(self) -> Iterator[bytes]:
        """The response without output."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def chunk(self, update: ChoiceUpdate) -> Iterator[bytes]:
        for step in self._blocks.read(update):
            if isinstance(step, Opened):
                yield from self._begin(step.block)
            elif isinstance(step, Added):
                added = {"delta": step.text, **({"logprobs": []} if step.block.kind == "text" else {})}
                yield self._event(f"response.{self._kind(step.block)}.delta", **self._place(step.block), **added)
            else:
                yield from self._end(step.block, _status(step, update))
        self._finish = update.finish_reason or self._finish

    def tail(self, _running: RunningRequest) -> bytes:
        """The whole response."""
        status = "incomplete" if self._finish == LENGTH else "completed"
        return self._event(f"response.{status}", response=self._response(status))

    def error(self, error: ApiError) -> bytes:
        """The response with its error."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"  # this API knows no other that fits
        failure = {"code": code, "message": error.message}
        return self._event("response.failed", response={**self._response("failed"), "error": failure})

    def response(self, updates: Sequence[ChoiceUpdate], _running: RunningRequest) -> Iterator[bytes]:
        (update,) = updates
        for step in self._blocks.read(update):
            if isinstance(step, Closed):
                self._output.append(self._item(step.block, _status(step, update)))
        yield dumps(self._response("incomplete" if update.finish_reason == LENGTH else "completed"))

    def _begin(self, block: Block) -> Iterator[bytes]:
        item = self._item(block, "in_progress")
        part = item[self._member(block)].pop() if block.kind != "call" else None
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if part is not None:
            yield self._event(f"response.{self._part(block)}.added", **self._place(block), part=part)

    def _end(self, block: Block, status: str) -> Iterator[bytes]:
        item = self._item(block, status)
        place = self._place(block)
        member = "text" if block.kind != "call" else "input" if _is_custom(block) else "arguments"
        done: dict[str, Any] = {member: block.text}
        if block.kind == "call":
            done["name"] = item["name"]
        elif block.kind == "text":
            done["logprobs"] = []
        yield self._event(f"response.{self._kind(block)}.done", **place, **done)
        if block.kind != "call":
            yield self._event(f"response.{self._part(block)}.done", **place, part=item[self._member(block)][0])
        yield self._event("response.output_item.done", output_index=block.index, item=item)
        self._output.append(item)

    def _place(self, block: Block) -> dict[str, Any]:
        found: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        return found if block.kind == "call" else found | {f"{self._member(block)}_index": 0}

    def _member(self, block: Block) -> str:
        """The list of an item that has the block's text."""
        return "summary" if block.kind == "reasoning" and self._summary else "content"

    def _part(self, block: Block) -> str:
        return "content_part" if self._member(block) == "content" else "reasoning_summary_part"

    def _kind(self, block: Block) -> str:
        """The name of the block's own events."""
        if block.kind == "call":
            return "custom_tool_call_input" if _is_custom(block) else "function_call_arguments"
        if block.kind == "text":
            return "output_text"
        return "reasoning_text" if self._member(block) == "content" else "reasoning_summary_text"

    def _item_id(self, block: Block) -> str:
        before = {"text": "msg", "reasoning": "rs", "call": "ctc" if _is_custom(block) else "fc"}[block.kind]
        return f"{before}_{self._ident}_{block.index}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        ident = self._item_id(block)
        if block.kind == "text":
            content = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
            return {"id": ident, "type": "message", "status": status, "role": "assistant", "content": [content]}
        if block.kind == "reasoning":
            member = self._member(block)
            kind = "reasoning_text" if member == "content" else "summary_text"
            texts: dict[str, Any] = {"summary": [], "content": []} | {member: [{"type": kind, "text": block.text}]}
            found = {"id": ident, "type": "reasoning", "status": status, **texts}
            seals = self._encrypts and status != "in_progress"
            return {**found, "encrypted_content": sealed(block.text)} if seals else found
        assert block.call is not None
        name, space = without_namespace(block.call.name, self._repeated["tools"])
        named = {"id": ident, "call_id": block.call.ident, "name": name, "status": status}
        if space is not None:
            named["namespace"] = space
        if _is_custom(block):
            return {"type": "custom_tool_call", **named, "input": block.text}
        return {"type": "function_call", **named, "arguments": block.text}

    def _response(self, status: str) -> dict[str, Any]:
        running = self._running
        prompt, output = running.request.prompt_tokens, running.completion_tokens
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": running.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": running.reasoning_tokens},
            "total_tokens": prompt + output,
        }
        return {
            "id": f"resp_{self._ident}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "output": self._output,
            **self._repeated,
            "usage": None if status == "in_progress" else usage,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = line_json({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _is_custom(block: Block) -> bool:
    return block.call is not None and block.call.custom


def _status(closed: Closed, update: ChoiceUpdate) -> str:
    return "incomplete" if closed.last and update.finish_reason == LENGTH else "completed"
