"""Text to token ids as transformers does, except that users cannot write control tokens (docs/reliability.md R8)."""

import secrets
from collections.abc import Callable
from itertools import pairwise

from tokenizers import AddedToken, Encoding, Tokenizer

from headrace_router.core.errors import ContextLengthError, InvalidRequestError

_ROUNDS = 32  # each one at least halves the spans that it found


class ControlTokenError(InvalidRequestError, code="control_token_in_text"):
    """Text of a user becomes a control token in a way that cannot be undone."""

    def __init__(self, param: str) -> None:
        super().__init__(
            "This text would become a control token of the model, and no other encoding of it was found: "
            "remove what looks like one of the model's control tokens.",
            param=param,
        )


class TextEncoder:
    """Encodes prompts and chats. Where text of a user becomes a control token, it is cut there and encoded again.

    Control tokens are the tokenizer's special tokens and the other added tokens that the chat template writes. The
    token for what the vocabulary lacks is one only where its name is spelled. The check is made on the tokens, so
    normalizers, pre-tokenizers and models of all kinds are covered, and every other text is encoded once, unchanged.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template_source: str,
        bos_token_id: int | None,
        add_bos: bool,
        unknown: str | None = None,
        max_chars: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """unknown: the token for what the vocabulary lacks. max_chars: a longer text has more than max_tokens."""
        self._max_tokens = max_tokens
        self._max_chars = max_chars
        added = tokenizer.get_added_tokens_decoder()
        self._control = {
            token_id: token.content
            for token_id, token in added.items()
            if token.content and (token.special or (not token.content.isspace() and token.content in template_source))
        }
        self._takes_space = {token_id for token_id, token in added.items() if token.lstrip or token.rstrip}
        self._unknown = unknown
        # An added token between two characters keeps the tokenizer from joining them. No text contains its random name.
        self._cut = f"\U0010fffe{secrets.token_hex(16)}\U0010fffe"
        self._tokenizer = _copy(tokenizer)
        self._tokenizer.add_special_tokens([AddedToken(self._cut, normalized=False)])
        self._cut_id = self._tokenizer.token_to_id(self._cut)
        self._normalizer = tokenizer.normalizer
        self._prefix, self._suffix = _added_around(tokenizer)
        if add_bos and bos_token_id is not None and self._prefix[:1] != [bos_token_id]:
            self._prefix = [bos_token_id, *self._prefix]

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a bare prompt, with the tokens that the tokenizer itself adds around one.

        Raises ControlTokenError, ContextLengthError.
        """
        self._check_chars(text, "prompt")
        # Unlike `encode`, the batch functions let other threads run meanwhile; the fast one has no offsets.
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not self._control.keys().isdisjoint(ids):
            ids = self._encode(text, lambda: text, lambda part: True, "prompt")
        return [*self._prefix, *ids, *self._suffix]

    def encode_chat(self, rendered: str, trace: Callable[[], str], is_user: Callable[[str], bool]) -> list[int]:
        """Ids of a rendered chat; the template has written all of its special tokens.

        trace: called if there are control tokens; text of the same length, in parts of which `is_user` recognizes the
        user's characters. Raises ControlTokenError, ContextLengthError.
        """
        self._check_chars(rendered, "messages")
        return self._encode(rendered, trace, is_user, "messages")

    def _check_chars(self, text: str, param: str) -> None:
        if self._max_chars is not None and len(text) > self._max_chars:
            raise ContextLengthError(
                f"The prompt has {len(text)} characters; the model's context holds at most {self._max_chars}. "
                "Shorten it.",
                param=param,
            )

    def _check_tokens(self, count: int, param: str) -> None:
        if self._max_tokens is not None and count > self._max_tokens:
            raise ContextLengthError(
                f"This model's maximum context length is {self._max_tokens} tokens; the prompt has {count}. "
                "Shorten it.",
                param=param,
            )

    def _encode(self, text: str, trace: Callable[[], str], is_user: Callable[[str], bool], param: str) -> list[int]:
        traced: str | None = None
        for _ in range(_ROUNDS):
            encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
            ids = encoding.ids
            spans = self._control_spans(text, encoding, ids)
            if spans and traced is None:
                self._check_tokens(len(ids), param)  # before the text grows with each control token
                traced = trace()
            # A control token without a place in the text may be anyone's.
            spans = [(start, end) for start, end in spans if start == end or is_user((traced or "")[start:end])]
            if not spans:
                return [token_id for token_id in ids if token_id != self._cut_id]
            if any(end - start < 2 for start, end in spans):
                break
            places = [(start + end) // 2 for start, end in spans]
            text, traced = self._with_cuts(text, places), self._with_cuts(traced or "", places)
        raise ControlTokenError(param)

    def _control_spans(self, text: str, encoding: Encoding, ids: list[int]) -> list[tuple[int, int]]:
        """Where control tokens come from in the text: [start, end) each, in order."""
        spans: list[tuple[int, int]] = []
        control = self._control
        for place, token_id in enumerate(ids):
            if token_id in control:
                span = encoding.token_to_chars(place) or (0, 0)
                if token_id in self._takes_space:
                    span = self._without_space(text, *span)
                if control[token_id] != self._unknown or self._is_spelled(text[slice(*span)]):
                    spans.append(span)
        return spans

    def _without_space(self, text: str, start: int, end: int) -> tuple[int, int]:
        """The span of a token without the characters around its name that are normalized to white space."""
        while start < end and not self._normalized(text[start]):
            start += 1
        while start < end and not self._normalized(text[end - 1]):
            end -= 1
        return start, end

    def _is_spelled(self, part: str) -> bool:
        """Whether the text is the name of the unknown token, not something that the vocabulary lacks."""
        name = self._unknown or ""
        return part.strip() == name or self._normalized(part) == self._normalized(name)

    def _normalized(self, part: str) -> str:
        """Without white space around it."""
        return str(part if self._normalizer is None else self._normalizer.normalize_str(part)).strip()

    def _with_cuts(self, text: str, places: list[int]) -> str:
        edges = [0, *places, len(text)]
        return self._cut.join(text[start:end] for start, end in pairwise(edges))


def _copy(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer without its post-processor; the two share the model, which is most of their memory."""
    copy = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        copy.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        copy.pre_tokenizer = tokenizer.pre_tokenizer
    added = tokenizer.get_added_tokens_decoder()
    for _, token in sorted(added.items()):
        (copy.add_special_tokens if token.special else copy.add_tokens)([token])
    if copy.get_added_tokens_decoder().keys() != added.keys():  # ids with gaps are kept by the file only
        return Tokenizer.from_str(tokenizer.to_str())
    return copy


def _added_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer's post-processor puts before and after a bare prompt."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []
