"""Text to token ids as transformers does, except that users cannot write control tokens (docs/reliability.md R8)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

_PRIVATE_USE = range(0x100000, 0x10FFFD)  # plane 16: no assigned characters


class TextEncoder:
    """Encodes prompts and chats. Spans of user text that spell a control token become ordinary text tokens.

    Control tokens are the tokenizer's special tokens and the other added tokens that the chat template writes.
    """

    def __init__(self, tokenizer: Tokenizer, template_source: str, bos_token_id: int | None, add_bos: bool) -> None:
        self._tokenizer = tokenizer
        control = [
            token.content
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.content and (token.special or (not token.content.isspace() and token.content in template_source))
        ]
        longest_first = sorted(control, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first))) if control else None
        self._prefix, self._suffix = self._added_around()
        if add_bos and bos_token_id is not None and self._prefix[:1] != [bos_token_id]:
            self._prefix = [bos_token_id, *self._prefix]
        self._newline = self._encode("\n")

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a bare prompt, with the tokens that the tokenizer itself adds around one."""
        pieces = self._control.split(text) if self._control else [text]
        if len(pieces) == 1:
            ids = self._encode(text)
        else:
            assert self._control is not None
            spelled = self._control.findall(text)
            marked = [part for pair in zip(pieces, [*spelled, ""], strict=True) for part in pair]
            ids = self._encode_alternating(marked)
        return [*self._prefix, *ids, *self._suffix]

    def mark(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """Messages with marker characters around spelled control tokens, and the two markers.

        The markers are characters that do not occur in the messages. With nothing to mark, the markers are empty.
        """
        if self._control is None or not any(self._control.search(text) for text in _strings(messages)):
            return [dict(message) for message in messages], ""
        used = set().union(*map(set, _strings(messages)))
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        opening, closing = next(free), next(free)
        pattern, around = self._control, f"{opening}\\g<0>{closing}"
        marked = [
            {key: value if key == "role" or not isinstance(value, str) else pattern.sub(around, value)
             for key, value in message.items()}
            for message in messages
        ]  # fmt: skip
        return marked, opening + closing

    def encode_chat(self, rendered: str, markers: str) -> list[int]:
        """Ids of a rendered chat; the template has written all of its special tokens."""
        if not markers:
            return self._encode(rendered)
        opening, closing = map(re.escape, markers)
        assert self._control is not None
        # A template may split a string between its markers: a single marker separates parts and is dropped.
        parts = re.split(f"{opening}({self._control.pattern}){closing}|[{opening}{closing}]", rendered)
        return self._encode_alternating([part or "" for part in parts] + [""])

    def _encode(self, text: str) -> list[int]:
        # Unlike `encode`, this lets other threads run meanwhile.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _encode_alternating(self, parts: Sequence[str]) -> list[int]:
        """Ids of [text, spelled control token, text, ...]."""
        ids: list[int] = []
        for place, part in enumerate(parts):
            if part:
                ids += self._encode_part(part, as_text=place % 2 == 1, first=not ids)
        return ids

    def _encode_part(self, part: str, *, as_text: bool, first: bool) -> list[int]:
        encode = self._encode_as_text if as_text else self._encode
        if first:
            return encode(part)
        # Some tokenizers add a space before the first word: encode after a newline, then remove the newline's ids.
        ids = encode("\n" + part)
        if self._newline and ids[: len(self._newline)] == self._newline:
            return ids[len(self._newline) :]
        return encode(part)

    def _encode_as_text(self, text: str) -> list[int]:
        """Ids from the tokenizer's pipeline without its added tokens."""
        tokenizer = self._tokenizer
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        words = [text]
        if tokenizer.pre_tokenizer is not None:
            words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in tokenizer.model.tokenize(word)]

    def _added_around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer's post-processor puts before and after a bare prompt."""
        bare = self._encode("a")
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
        return [], []


def _strings(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        for key, value in message.items():
            if key != "role" and isinstance(value, str):
                yield value
