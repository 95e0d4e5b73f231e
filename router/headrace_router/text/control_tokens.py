"""The tokens of a model that text of a client must not become."""

from collections.abc import Iterable, Iterator, Sequence

from tokenizers import Encoding, Tokenizer


class ControlTokens:
    """The tokenizer's special tokens, and the other added tokens that the chat template writes."""

    def __init__(self, tokenizer: Tokenizer, template_source: str, unknown: str | None) -> None:
        """unknown: the token for what the vocabulary lacks; it is a control token only where its name is spelled."""
        added = tokenizer.get_added_tokens_decoder()
        self._names = {
            token_id: token.content
            for token_id, token in added.items()
            if token.content and (token.special or (not token.content.isspace() and token.content in template_source))
        }
        self._takes_space = {token_id for token_id, token in added.items() if token.lstrip or token.rstrip}
        # Added tokens that are not special, such as tags around thoughts and calls: an assistant's message has them.
        self.tags = sorted(
            (token.content for token_id, token in added.items() if token_id in self._names and not token.special),
            key=len,
            reverse=True,
        )
        self._unknown = unknown
        self._normalizer = tokenizer.normalizer
        spelled = {form for name in self._names.values() for form in (name, self._normalized(name)) if form}
        self._spellings = sorted(spelled)

    def isdisjoint(self, ids: Iterable[int]) -> bool:
        """Whether none of the ids is one of them, or that of the unknown token."""
        return self._names.keys().isdisjoint(ids)

    def are_spelled(self, texts: Iterable[str]) -> bool:
        """Whether a text contains the name of a control token."""
        forms = (form for text in texts for form in {text, self._normalized(text)})
        return any(name in form for form in forms for name in self._spellings)

    def spans(self, text: str, ids: Sequence[int], encoding: Encoding) -> Iterator[tuple[int, int]]:
        """Where control tokens come from in the text: [start, end) each, in order; (0, 0) where that is not known.

        ids: those of the encoding, which makes another list of them at each access.
        """
        for place, token_id in enumerate(ids):
            if token_id in self._names:
                span = encoding.token_to_chars(place) or (0, 0)
                if token_id in self._takes_space:
                    span = self._without_space(text, *span)
                if self._names[token_id] != self._unknown or self._is_unknown(text[slice(*span)]):
                    yield span

    def _without_space(self, text: str, start: int, end: int) -> tuple[int, int]:
        """The span of a token without the characters around its name that are normalized to white space."""
        part = text[start:end]
        start, end = end - len(part.lstrip()), start + len(part.rstrip())  # most of it, at once
        while start < end and not self._normalized(text[start]):
            start += 1
        while start < end and not self._normalized(text[end - 1]):
            end -= 1
        return start, max(start, end)

    def _is_unknown(self, part: str) -> bool:
        """Whether the text is the name of the unknown token, not something that the vocabulary lacks."""
        name = self._unknown or ""
        return part.strip() == name or self._normalized(part) == self._normalized(name)

    def _normalized(self, part: str) -> str:
        """Without white space around it."""
        return str(part if self._normalizer is None else self._normalizer.normalize_str(part)).strip()
