"""The response format of /v1/completions."""

from collections.abc import Iterator, Sequence

from headrace_proto.replica_pb2 import TokenLogprobs
from headrace_router.api.http.formats import TokenFormat, array, clean, dumps, event, usage
from headrace_router.dispatch.choice import ChoiceUpdate
from headrace_router.dispatch.running_request import RunningRequest
from headrace_router.text.line_json import line_json
from headrace_router.validation.bodies import CompletionBody


class CompletionFormat:
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

    def usage_chunk(self, running: RunningRequest) -> bytes:
        return event({**self._head, "system_fingerprint": None, "choices": [], "usage": usage(running)})

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
