"""The response format of /v1/completions."""

from collections.abc import Sequence
from typing import Any

from headrace_router.api.http.formats import TokenFormat, event, line_json, usage
from headrace_router.dispatch.choice import ChoiceUpdate
from headrace_router.dispatch.running_request import RunningRequest
from headrace_router.validation.bodies import CompletionBody


class CompletionFormat:
    """`text_completion`, which streams the same object piece by piece."""

    def __init__(self, body: CompletionBody, running: RunningRequest, ident: str, created: int) -> None:
        card = running.request.card
        self._head = {"id": f"cmpl-{ident}", "object": "text_completion", "created": created, "model": card.model}
        self._tokens = TokenFormat(card)
        self._logprobs = body.logprobs is not None
        self._ids = bool(body.return_token_ids)
        self._echoes = running.request.echoes or ("",) * len(running.choices)
        self._offsets = [len(text) for text in self._echoes]
        self._before = b"data: " + line_json({**self._head, "system_fingerprint": None})[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if body.includes_usage else b"]}\n\n"

    def head(self) -> list[bytes]:
        """The prompts, when they are to be echoed."""
        return [
            self._line({"index": index, "text": text, "logprobs": None, "finish_reason": None})
            for index, text in enumerate(self._echoes)
            if text
        ]

    def chunk(self, update: ChoiceUpdate) -> bytes:
        choice: dict[str, Any] = {"index": update.index, "text": update.text, "logprobs": self._entries(update)}
        if self._ids:
            choice["token_ids"] = update.token_ids
        return self._line({**choice, "finish_reason": update.finish_reason})

    def usage_chunk(self, running: RunningRequest) -> bytes:
        return event({**self._head, "system_fingerprint": None, "choices": [], "usage": usage(running)})

    def response_object(self, updates: Sequence[ChoiceUpdate], running: RunningRequest) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for update in updates:
            choice = {"index": update.index, "text": self._echoes[update.index] + update.text}
            choice["logprobs"] = self._entries(update)
            if self._ids:
                choice["token_ids"] = update.token_ids
            choices.append({**choice, "finish_reason": update.finish_reason})
        return {**self._head, "system_fingerprint": None, "choices": choices, "usage": usage(running)}

    def _line(self, choice: dict[str, Any]) -> bytes:
        return self._before + line_json(choice) + self._after

    def _entries(self, update: ChoiceUpdate) -> dict[str, Any] | None:
        """The legacy format: parallel lists. Offsets count characters from the start of the choice's text."""
        if not self._logprobs:
            return None
        tokens: list[str] = []
        offsets: list[int] = []
        top: list[dict[str, float]] = []
        for token_id, entry in zip(update.token_ids, update.logprobs, strict=False):  # the ending token has no entry
            tokens.append(self._tokens.key(token_id))
            offsets.append(self._offsets[update.index])
            self._offsets[update.index] += len(self._tokens.text(token_id))
            best = zip(entry.top_ids, entry.top_logprobs, strict=True)
            # The token that was chosen is always listed, as an extra one if it is not among the best.
            listed = {self._tokens.key(other): self._tokens.clean(logprob) for other, logprob in best}
            top.append({**listed, tokens[-1]: self._tokens.clean(entry.logprob)})
        return {
            "tokens": tokens,
            "token_logprobs": [self._tokens.clean(entry.logprob) for entry in update.logprobs],
            "top_logprobs": top,
            "text_offset": offsets,
        }
