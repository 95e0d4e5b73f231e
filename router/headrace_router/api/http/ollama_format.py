"""The objects of Ollama's API: one JSON object per line."""

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from headrace_router.api.http.blocks import Added, Block, BlockReader, Closed
from headrace_router.core.errors import ApiError
from headrace_router.core.fleet import ServedModel
from headrace_router.dispatch.choice import LENGTH, ChoiceUpdate
from headrace_router.dispatch.running_request import RunningRequest
from headrace_router.text.detokenize import line_json
from headrace_router.text.model_card import ModelCard
from headrace_router.validation.bodies import ChatBody, CompletionBody

VERSION = "0.12.6"  # of Ollama, whose API this is: clients compare it
_FAMILY = "headrace"  # that of the weights is not known to a router


def tags(models: Sequence[ServedModel]) -> dict[str, Any]:
    """GET /api/tags."""
    return {"models": [_tag(model, name) for model in models for name in model.names]}


def _tag(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": _written(model.created),
        "size": 0,
        "digest": "",
        "details": _details(),
    }


def _details() -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "",
        "family": _FAMILY,
        "families": [_FAMILY],
        "parameter_size": "",
        "quantization_level": "",
    }


def shown(model: ServedModel, card: ModelCard) -> dict[str, Any]:
    """POST /api/show."""
    form = card.form({"tools": []})
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value:g}" for name, value in (model.defaults or {}).items()),
        "template": "",
        "details": _details(),
        "model_info": {"general.architecture": _FAMILY, f"{_FAMILY}.context_length": card.max_model_len},
        "capabilities": [
            "completion",
            *(["tools"] if form.syntax.tools is not None else []),
            *(["thinking"] if form.syntax.reasoning is not None else []),
        ],
        "modified_at": _written(model.created),
    }


def loaded(model: str, *, chat: bool) -> dict[str, Any]:
    """The answer to a request without a prompt, which loads the model in Ollama."""
    text: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    return {"model": model, "created_at": _written(int(time.time())), **text, "done": True, "done_reason": "load"}


def ollama_error(error: ApiError) -> dict[str, Any]:
    """The error object of this API."""
    return {"error": error.message}


class OllamaFormat:
    """Answers of /api/chat and, with `chat` false, of /api/generate."""

    media_type = b"application/x-ndjson"

    def __init__(
        self, body: ChatBody | CompletionBody, _running: RunningRequest, _ident: str, created: int, *, chat: bool
    ) -> None:
        self._chat = chat
        self._common = {"model": body.model, "created_at": _written(created)}
        shows = not isinstance(body, ChatBody) or body.include_reasoning is not False
        self._blocks = BlockReader(reasoning=shows)
        self._reason = ""
        self.keep_alive = self._line({}, done=False)

    def head(self) -> Iterator[bytes]:
        """Nothing."""
        yield from ()

    def chunk(self, update: ChoiceUpdate) -> Iterator[bytes]:
        for step in self._blocks.read(update):
            if isinstance(step, Added) and step.block.kind != "call":
                yield self._line({_MEMBERS[step.block.kind]: step.text}, done=False)
            elif isinstance(step, Closed) and step.block.kind == "call":
                yield self._line({"tool_calls": [_call(step.block)]}, done=False)
        self._reason = update.finish_reason or ""

    def tail(self, running: RunningRequest) -> bytes:
        """The line that says that the answer is complete."""
        return self._line({}, done=True, **self._numbers(running))

    def error(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""
        return line_json(ollama_error(error)) + b"\n"

    def response(self, updates: Sequence[ChoiceUpdate], running: RunningRequest) -> Iterator[bytes]:
        (update,) = updates
        self._reason = update.finish_reason or ""
        found: dict[str, Any] = {}
        for step in self._blocks.read(update):
            if isinstance(step, Closed) and step.block.kind == "call":
                found.setdefault("tool_calls", []).append(_call(step.block))
            elif isinstance(step, Closed):
                member = _MEMBERS[step.block.kind]
                found[member] = found.get(member, "") + step.block.text
        yield self._line(found, done=True, **self._numbers(running))

    def _line(self, found: Mapping[str, Any], *, done: bool, **numbers: Any) -> bytes:
        if self._chat:
            message = {"role": "assistant", "content": "", **found}
            return line_json({**self._common, "message": message, "done": done, **numbers}) + b"\n"
        text = {"response": found.get("content", "")}
        others = {name: value for name, value in found.items() if name != "content"}
        return line_json({**self._common, **text, **others, "done": done, **numbers}) + b"\n"

    def _numbers(self, running: RunningRequest) -> dict[str, Any]:
        """Why the answer ended, tokens, and nanoseconds."""
        account = running.account
        total = time.monotonic() - account.began
        first = total if account.first_token is None else account.first_token
        return {
            "done_reason": "length" if self._reason == LENGTH else "stop",
            "total_duration": _nanoseconds(total),
            "load_duration": 0,
            "prompt_eval_count": running.request.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first),
            "eval_count": running.completion_tokens,
            "eval_duration": _nanoseconds(total - first),
        }


_MEMBERS = {"text": "content", "reasoning": "thinking"}


def _call(block: Block) -> dict[str, Any]:
    assert block.call is not None
    try:
        arguments = orjson.loads(block.text)
    except ValueError:  # it was cut off
        arguments = {}
    return {"function": {"name": block.call.name, "arguments": arguments}}


def _nanoseconds(seconds: float) -> int:
    return max(0, int(seconds * 1e9))


def _written(seconds: int) -> str:
    """Unix seconds, as this API writes them."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
