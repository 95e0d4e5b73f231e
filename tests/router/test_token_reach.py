"""A prompt with more characters than any tokens of the context stand for is refused before it is tokenized."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from headrace_proto.replica_pb2 import ModelFacts
from headrace_router.core.errors import ContextLengthError
from headrace_router.text.context_size import ContextSize
from headrace_router.text.control_tokens import ControlTokens
from headrace_router.text.model_card import LoadedTokenizer, ModelCard
from headrace_router.text.normalized_size import NormalizedSize
from headrace_router.text.text_encoder import TextEncoder
from headrace_router.text.token_reach import token_reach

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
NORMALIZERS = {
    "none": None,
    "NFC": normalizers.NFC(),
    "NFKC": normalizers.NFKC(),
    "NFD": normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]),
    "spaces": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
}


def make(normalizer: str = "none", *, fallback: bool = False, **added: bool) -> Tokenizer:
    vocab = {char: number for number, char in enumerate([*BYTES, "aa", "aaaa"])}
    if fallback:
        vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "aa": 257, "aaaa": 258}
    merges: Any = [("a", "a"), ("aa", "aa")]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=fallback))
    if not fallback:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if NORMALIZERS[normalizer] is not None:
        made.normalizer = NORMALIZERS[normalizer]
    made.add_tokens(["<é>"])
    return made


def reach_of(tokenizer: Tokenizer) -> int | None:
    return token_reach(json.loads(tokenizer.to_str()))


@settings(max_examples=200, deadline=None)
@given(
    normalizer=st.sampled_from(sorted(NORMALIZERS)),
    fallback=st.booleans(),
    text=st.text(max_size=20) | st.text(alphabet="aα\u0313\u0300\u0345e\u0301<>é가ᄀ\u1161\u11a8", max_size=40),
)
def test_no_text_has_fewer_tokens(normalizer: str, fallback: bool, text: str) -> None:
    tokenizer = make(normalizer, fallback=fallback)
    reach = reach_of(tokenizer)
    assert reach is not None
    assert len(text) <= reach * len(tokenizer.encode(text).ids)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": normalizers.StripAccents()},
        {"normalizer": normalizers.Replace(Regex("a+"), "a")},
        {"normalizer": normalizers.Replace("aa", "a")},
        {"normalizer": normalizers.Strip()},
        {"pre_tokenizer": pre_tokenizers.WhitespaceSplit()},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "removed")},
        {"model": models.BPE(vocab={"a": 0}, merges=[])},
        {"model": models.WordLevel({"a": 0}, unk_token="a")},
    ],
    ids=repr,
)
def test_where_text_may_vanish_no_bound_is_known(change: dict[str, Any]) -> None:
    tokenizer = make()
    for name, value in change.items():
        setattr(tokenizer, name, value)
    assert reach_of(tokenizer) is None


def test_an_added_token_that_includes_white_space_has_no_bound() -> None:
    spec = json.loads(make().to_str())
    spec["added_tokens"][0]["rstrip"] = True
    assert token_reach(spec) is None


@pytest.mark.parametrize("word", ["a ", "aaa", "word, ", "é"])
def test_a_far_too_long_text_is_not_tokenized_whole(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million characters took 150 MiB, whatever the context: the longest token of this vocabulary has 16."""
    tokenizer = make()
    encoder = TextEncoder(
        tokenizer, ControlTokens(tokenizer, "", None), ContextSize(100, None), NormalizedSize([]), None
    )
    sizes: list[int] = []

    class Counting:
        def encode_batch_fast(self, texts: list[str], **options: bool) -> Any:
            sizes.extend(map(len, texts))
            return tokenizer.encode_batch_fast(texts, **options)

    monkeypatch.setattr(encoder, "_tokenizer", Counting())
    with pytest.raises(ContextLengthError, match="the first 800 of the prompt's 600000 characters"):
        encoder.encode_prompt(word * (600_000 // len(word)))
    assert sizes == [800]
    encoder.encode_prompt("a " * 800)
    assert sizes == [800, 1600], "it may be shorter than its beginning suggests"


@settings(max_examples=200, deadline=None)
@given(
    normalizer=st.sampled_from(sorted(NORMALIZERS)), text=st.text(alphabet="a <>é가ᄀ\u1161\u11a8e\u0301", max_size=60)
)
def test_the_rest_of_a_text_takes_few_tokens_from_its_beginning(normalizer: str, text: str) -> None:
    tokenizer = make(normalizer)
    counts = [len(tokenizer.encode(text[:end]).ids) for end in range(len(text) + 1)]
    assert all(count <= counts[-1] + 8 for count in counts)


def test_prompt_and_chat_are_refused_with_the_error_of_a_long_context() -> None:
    template = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    loaded = LoadedTokenizer(make().to_str().encode())
    card = ModelCard(ModelFacts(max_model_len=10, chat_template=template), loaded)
    fits = "a" * (10 * (loaded.reach or 0))
    assert card.encoder.encode_prompt(fits)
    with pytest.raises(ContextLengthError):
        card.encoder.encode_prompt(fits + "a")
    assert card.encode_chat([{"role": "user", "content": fits + " " * 50}])
    with pytest.raises(ContextLengthError):
        card.encode_chat([{"role": "user", "content": fits}, {"role": "user", "content": "a"}])
