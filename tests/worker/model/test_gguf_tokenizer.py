"""Added tokens of a GGUF tokenizer, whatever their characters: as of the tokenizer that the file was made of."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from headrace_base.errors import ModelLoadError
from headrace_worker.model.gguf_tokenizer import _SPLITS, byte_tokenizer, gguf_tokenizer

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
BYTES = [byte_tokenizer(256).id_to_token(byte) or "" for byte in range(256)]
# DeepSeek's markers are spelled with U+FF5C and U+2581; no byte of a byte-level vocabulary has these characters.
ADDED = {
    "<｜begin▁of▁sentence｜>": CONTROL,
    "<｜end▁of▁sentence｜>": CONTROL,
    "<｜User｜>": CONTROL,
    "<｜Assistant｜>": CONTROL,
    "<|im_end|>": CONTROL,
    "<think>": USER_DEFINED,
    "思考": USER_DEFINED,
    "    ": USER_DEFINED,
    "Grüße": USER_DEFINED,
}
PIECES = [*ADDED, "<｜", "User", "｜>", "▁", "思", " ", "a", "é", "\n", "1234", "ï½ľ"]


def _metadata(tokens: list[str], types: list[int], pre: str = "default") -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": types,
    }


def _found(pre: str) -> Tokenizer:
    made = gguf_tokenizer(_metadata([*BYTES, *ADDED], [NORMAL] * 256 + list(ADDED.values()), pre))
    return Tokenizer.from_str(made.to_str())  # as a router receives it


def _original(pre: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose model has the bytes only, with the same added tokens."""
    made = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(BYTES)}, merges=[]))
    split = GGUF_PRE_TOKENIZER_SPLITS.get(pre)
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    splits = [] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, by_bytes])
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(text, normalized=False, special=kind == CONTROL) for text, kind in ADDED.items()])
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("pre", sorted(_SPLITS))
def test_added_tokens_have_their_own_ids(pre: str) -> None:
    found = _found(pre)
    for offset, (text, kind) in enumerate(ADDED.items()):
        assert found.encode(f"a{text}b").ids == [ord("a"), 256 + offset, ord("b")]
        added = found.get_added_tokens_decoder()[256 + offset]
        assert (added.content, added.special) == (text, kind == CONTROL)


@pytest.mark.parametrize("pre", sorted(_SPLITS))
def test_text_is_encoded_and_decoded_as_by_the_original(pre: str) -> None:
    found, original = _found(pre), _original(pre)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join) | st.text(max_size=12))
    def check(text: str) -> None:
        ids = original.encode(text, add_special_tokens=False)
        assert found.encode(text).ids == ids
        for skip in (False, True):
            assert found.decode(ids, skip_special_tokens=skip) == original.decode(ids, skip_special_tokens=skip)
        if "Grüße" not in text:  # the decoder takes its letters for bytes
            assert found.decode(ids, skip_special_tokens=False) == text

    check()


@pytest.mark.parametrize(
    ("tokens", "types"),
    [
        (["<｜a｜>", "<｜a｜>"], [CONTROL, CONTROL]),
        (["<a>", "<a>"], [CONTROL, NORMAL]),
        (["<a>", "<a>"], [USER_DEFINED, NORMAL]),
    ],
)
def test_an_added_token_that_would_have_another_id_is_refused(tokens: list[str], types: list[int]) -> None:
    with pytest.raises(ModelLoadError, match=r"spells the token '<.*a.*>' more than once"):
        gguf_tokenizer(_metadata([*BYTES, *tokens], [NORMAL] * 256 + types))


@pytest.mark.parametrize("types", [[], [NORMAL] * 256, [NORMAL] * 258])
def test_a_file_that_does_not_type_each_token_is_refused(types: list[int]) -> None:
    """Else its control tokens would be plain text, for the template and for users."""
    with pytest.raises(ModelLoadError, match=rf"{len(types)} token types for 257 tokens"):
        gguf_tokenizer(_metadata([*BYTES, "<｜User｜>"], types))
