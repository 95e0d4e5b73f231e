"""The response format of /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from headrace_router.api.http.formats import TokenFormat, event, line_json, usage
from headrace_router.dispatch.choice import ChoiceUpdate
from headrace_router.dispatch.running_request import RunningRequest
from headrace_router.validation.bodies import ChatBody


class ChatFormat:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, body: ChatBody, running: RunningRequest, ident: str, created: int) -> None:
        card = running.request.card
        self._choices = len(running.choices)
        self._common = {"id": f"chatcmpl-{ident}", "created": created, "model": card.model}
        self._tokens = TokenFormat(card)
        self._logprobs = bool(body.logprobs)
        self._ids = bool(body.return_token_ids)
        opening = {
            "id": self._common["id"],
            "object": "chat.completion.chunk",
            **self._common,
            "system_fingerprint": None,
        }
        self._before = b"data: " + line_json(opening)[:-1] + b',"choices":[{"index":'
        self._after = b'],"usage":null}\n\n' if body.includes_usage else b"]}\n\n"

    def head(self) -> list[bytes]:
        """The role of every choice."""
        delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return [self._before + b"%d" % index + delta + self._after for index in range(self._choices)]

    def chunk(self, update: ChoiceUpdate) -> bytes:
        pieces: list[bytes] = []
        if update.text or update.token_ids:
            entries = self._entries(update)
            pieces += [
                self._before,
                b"%d" % update.index,
                b',"delta":{"content":',
                line_json(update.text),
                b'},"logprobs":',
                b"null" if entries is None else line_json(entries),
            ]
            if self._ids:
                pieces += [b',"token_ids":', line_json(update.token_ids)]
            pieces += [b',"finish_reason":null}', self._after]
        if update.finish_reason is not None:
            pieces += [
                self._before,
                b"%d" % update.index,
                b',"delta":{},"logprobs":null,"finish_reason":"',
                update.finish_reason.encode(),
                b'"}',
                self._after,
            ]
        return b"".join(pieces)

    def usage_chunk(self, running: RunningRequest) -> bytes:
        return event(
            {
                "id": self._common["id"],
                "object": "chat.completion.chunk",
                **self._common,
                "system_fingerprint": None,
                "choices": [],
                "usage": usage(running),
            }
        )

    def response_object(self, updates: Sequence[ChoiceUpdate], running: RunningRequest) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for update in updates:
            choice: dict[str, Any] = {
                "index": update.index,
                "message": {"role": "assistant", "content": update.text, "refusal": None},
                "logprobs": self._entries(update),
                "finish_reason": update.finish_reason,
            }
            if self._ids:
                choice["token_ids"] = update.token_ids
            choices.append(choice)
        return {
            "id": self._common["id"],
            "object": "chat.completion",
            **self._common,
            "system_fingerprint": None,
            "choices": choices,
            "usage": usage(running),
        }

    def _entries(self, update: ChoiceUpdate) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        pairs = zip(update.token_ids, update.logprobs, strict=False)  # the ending token has no entry
        return {"content": [self._tokens.chat_entry(*pair) for pair in pairs], "refusal": None}
