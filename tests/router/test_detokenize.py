"""Tokens to text with decoders other than byte-level: bytes that are no characters, growth, long tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from headrace_router.text.detokenize import HELD_TOKENS
from headrace_router.text.model_card import LoadedTokenizer

WORD, LETTER, SPECIAL = 256, 257, 259


def byte_fallback() -> Tokenizer:
    """As of Llama 2: the ids below 256 are bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": WORD, "b": LETTER, "<unk>": 258}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.add_special_tokens(["<s>"])
    strip = decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return made


TOKENIZER = byte_fallback()
TABLE = LoadedTokenizer(TOKENIZER.to_str().encode()).tokens


def pieces(ids: list[int], context: list[int] | None = None) -> str:
    stream = TABLE.stream([WORD] if context is None else context)
    return "".join(stream.push([token]) for token in ids)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([0xC3, 0xA9, 0xFF, LETTER, WORD], "é\ufffdb a"),  # the library's stream fails here
        ([0xC3, 0xA9, 0xFF, 0xE2, 0x82, 0xAC, LETTER, WORD], "é\ufffd\ufffd\ufffd\ufffdb a"),
        ([WORD, 0xFF, 0xFF, LETTER, WORD], " a\ufffd\ufffdb a"),
        ([SPECIAL, WORD, SPECIAL, SPECIAL, LETTER], " ab"),
        ([SPECIAL] * 100 + [WORD], " a"),
    ],
)
def test_bytes_that_are_no_characters(ids: list[int], text: str) -> None:
    assert pieces(ids) == text


@settings(deadline=None)
@given(st.lists(st.sampled_from([(WORD,), (LETTER,), (SPECIAL,), (0xC3, 0xA9)]), max_size=40))
def test_special_tokens_are_shown_as_transformers_shows_them(groups: list[tuple[int, ...]]) -> None:
    ids = [token for group in groups for token in group]
    stream = TABLE.stream([WORD], special=True)
    shown = "".join(stream.push([token]) for token in [*ids, LETTER])
    whole = TOKENIZER.decode([WORD, *ids, LETTER], skip_special_tokens=False)
    assert TOKENIZER.decode([WORD], skip_special_tokens=False) + shown == whole
    assert shown.count("<s>") == ids.count(SPECIAL)


def test_what_is_held_back_is_bounded() -> None:
    """Each step decodes all of it again: 4,000 such tokens took 3 s of the event loop."""
    stream = TABLE.stream([WORD])
    assert stream.push([0xFF] * (HELD_TOKENS - 1)) == ""
    assert stream.push([0xFF]) == "\ufffd" * HELD_TOKENS
    assert len(stream.push([0xFF] * 40 * HELD_TOKENS)) == 40 * HELD_TOKENS
    assert stream.push([WORD, 0xC3, 0xA9, LETTER]) == " aéb"


@settings(deadline=None)
@given(st.lists(st.sampled_from([WORD, LETTER, SPECIAL, 0xC3, 0xA9, 0xFF, 0xE2, 0x82]), max_size=60))
def test_no_tokens_fail_or_lose_letters(ids: list[int]) -> None:
    text = pieces([*ids, LETTER])
    assert text.count("b") == ids.count(LETTER) + 1 and text.count(" a") == ids.count(WORD)
