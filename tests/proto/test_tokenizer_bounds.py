"""Tokenizers that make much text of little are refused before the library reads them; those of models are not."""

import base64
import json
import unicodedata
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from headrace_proto.tokenizer_bounds import (
    _DECODERS,
    _NORMALIZERS,
    TOKEN_CHARS,
    Growth,
    TokenizerBoundsError,
    normalizer_growth,
    read_tokenizer,
)

CHARACTERS = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) not in ("Cn", "Co", "Cs")]
CHARSMAP = base64.b64encode(b"\0\0\0\0" + b"\0".join([b"a", b"x" * 33, b""])).decode()
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def steps(part: str, *given: Any) -> dict[str, Any]:
    made = [{"type": step} if isinstance(step, str) else step for step in given]
    names = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
    return {part: {"type": "Sequence", names[part]: made}}


def spec(**parts: Any) -> str:
    model = {"type": "WordLevel", "vocab": {"a": 0, "u": 1}, "unk_token": "u"}
    return json.dumps({"added_tokens": [], "model": model} | parts)


ALBERT = steps(
    "normalizer", replace("``", '"'), "NFKD", "StripAccents", "Lowercase",
    {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}, replace(" {2,}", " ", "Regex"),
)  # fmt: skip
T5 = steps("normalizer", {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}, replace(" {2,}", "▁", "Regex"))
LLAMA = steps("normalizer", {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))
LLAMA_DECODER = steps(
    "decoder", replace("▁", " "), "ByteFallback", "Fuse", {"type": "Strip", "content": " ", "start": 1, "stop": 0}
)
CLIP = steps("normalizer", "NFC", replace(r"\s+", " ", "Regex"), "Lowercase")
SPLIT = {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False}
LLAMA3 = steps("pre_tokenizer", SPLIT, BYTE_LEVEL)
ACCEPTED: list[dict[str, Any]] = [
    ALBERT, T5 | {"pre_tokenizer": METASPACE, "decoder": METASPACE}, LLAMA | LLAMA_DECODER, CLIP,
    LLAMA3 | {"decoder": BYTE_LEVEL}, steps("normalizer", "NFKC") | {"pre_tokenizer": BYTE_LEVEL},
    steps("pre_tokenizer", "WhitespaceSplit", METASPACE), {"normalizer": None, "pre_tokenizer": None, "decoder": None},
    {"normalizer": {"type": "BertNormalizer"}, "pre_tokenizer": {"type": "BertPreTokenizer"},
     "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
    {"decoder": {"type": "BPEDecoder", "suffix": "</w>"}},
    {"decoder": {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}},
]  # fmt: skip


@pytest.mark.parametrize("parts", ACCEPTED)
def test_tokenizers_of_models_are_accepted(parts: dict[str, Any]) -> None:
    assert read_tokenizer(spec(**parts))["model"]["vocab"] == {"a": 0, "u": 1}


GROWING: list[dict[str, Any]] = [
    steps("normalizer", *[replace("~", "~" * 4000)] * 3),
    steps("normalizer", *[replace("~", "~~")] * 13),
    steps("normalizer", steps("normalizer", *[replace("~", "~~")] * 6)["normalizer"], *[replace("~", "~~")] * 7),
    {"normalizer": replace("", "x" * 5000)},
    steps("normalizer", replace("a", "\u0301" * 9), "StripAccents"),
    {"normalizer": replace("x*", "x" * 5000, "Regex")},
    {"normalizer": {"type": "Prepend", "prepend": "x" * 100}},
    steps("normalizer", {"type": "Prepend", "prepend": "x"}, replace("x", "y" * 100)),
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\0" * 5 + b"x" * 5000).decode()}},
    steps("pre_tokenizer", *[BYTE_LEVEL] * 3),
    steps("pre_tokenizer", *[METASPACE] * 2),
    {"decoder": replace("e", "e" * 300)},
    steps("decoder", *[replace("", " ")] * 3),
    steps("decoder", *[{"type": "BPEDecoder", "suffix": ""}] * 4),
    steps("decoder", *[{"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": False}] * 4),
    steps("decoder", *["WordPiece"] * 9),
]


@pytest.mark.parametrize("parts", GROWING)
def test_growth_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(TokenizerBoundsError, match="can make a text much longer"):
        read_tokenizer(spec(**parts))


def added(content: str, count: int = 1, *, normalized: bool = True) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized, "special": False}
    return [{"id": 2 + index, "content": f"{content}{index}"} | flags for index in range(count)]


def model(**fields: Any) -> dict[str, Any]:
    return {"type": "WordLevel", "vocab": {"a": 0, "u": 1}, "unk_token": "u"} | fields


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"model": model(vocab={"x" * (TOKEN_CHARS + 1): 0})}, "a token of more than"),
        ({"model": model(vocab=[["a", 0.0], ["x" * (TOKEN_CHARS + 1), 0.0]])}, "a token of more than"),
        ({"added_tokens": added("x" * TOKEN_CHARS)}, "a token of more than"),
        ({"added_tokens": added("~" * 2000, 600), **steps("normalizer", *[replace("~", "~~")] * 4)}, "added tokens"),
        ({"model": model(unk_token="u" * 1000)}, "unk_token"),
        ({"model": model(continuing_subword_prefix="#" * 1000)}, "continuing_subword_prefix"),
        ({"model": model(end_of_word_suffix="#" * 1000)}, "end_of_word_suffix"),
        ({"model": model(max_input_chars_per_word=10**9)}, "max_input_chars_per_word"),
        ({"normalizer": {"type": "Unheard"}}, "not known here"),
        ({"normalizer": replace("a", "b") | {"type": None}}, "not known here"),
        ({"pre_tokenizer": {"type": ["ByteLevel"]}}, "not known here"),
        ({"decoder": steps("decoder", "Fuse", "Unheard")["decoder"]}, "not known here"),
        ({"normalizer": {"type": "Sequence"}}, "not valid"),
        ({"normalizer": "NFC"}, "not valid"),
        ({"normalizer": replace("a", 3)}, "not valid"),  # type: ignore[arg-type]
        ({"added_tokens": [3]}, "not valid"),
        ({"model": model(vocab=3)}, "not valid"),
    ],
)
def test_other_refusals(parts: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TokenizerBoundsError, match=sentence):
        read_tokenizer(spec(**parts))


def template(*ids: int, pieces: int = 1, text: int = 1) -> dict[str, Any]:
    special = {"X": {"id": "X", "ids": list(ids), "tokens": ["u"] * len(ids)}}
    single = [{"SpecialToken": {"id": "X", "type_id": 0}}] * pieces + [{"Sequence": {"id": "A", "type_id": 0}}] * text
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}


def sequence(*processors: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "processors": list(processors)}


@pytest.mark.parametrize(
    "processor",
    [
        template(0),
        template(0, pieces=2),
        sequence(BYTE_LEVEL, template(0)),
        {"type": "RobertaProcessing", "sep": ["u", 1], "cls": ["u", 1], "trim_offsets": True, "add_prefix_space": True},
        {"type": "BertProcessing", "sep": ["u", 1], "cls": ["u", 1]},
    ],
)
def test_post_processors_of_models_are_accepted(processor: dict[str, Any]) -> None:
    text = spec(post_processor=processor)
    assert read_tokenizer(text)
    Tokenizer.from_str(text)


@pytest.mark.parametrize(
    ("processor", "sentence"),
    [
        (template(*[0] * 20, pieces=20), "adds more than 256 tokens"),
        (template(pieces=300), "adds more than 256 tokens"),
        (template(0, text=2), "adds more than 256 tokens"),
        (sequence(template(*[0] * 200), sequence(template(*[0] * 200))), "adds more than 256 tokens"),
        (sequence(*[BYTE_LEVEL] * 65), "adds more than 256 tokens"),
        ({"type": "Unheard"}, "post_processor of the kind 'Unheard', which is not known"),
        (template(0) | {"special_tokens": []}, "not valid"),
    ],
)
def test_post_processors_that_add_many_tokens_are_refused(processor: dict[str, Any], sentence: str) -> None:
    """Of a file of 167 KB the library made nine million tokens, when a replica described its model."""
    with pytest.raises(TokenizerBoundsError, match=sentence):
        read_tokenizer(spec(post_processor=processor))


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        (steps("normalizer", *["NFC"] * 65), "normalizer has more than 64 steps"),
        (steps("decoder", *["Fuse"] * 33, steps("decoder", *["Fuse"] * 32)["decoder"]), "decoder has more than 64"),
        (steps("pre_tokenizer", *[SPLIT] * 65), "pre_tokenizer has more than 64 steps"),
        ({"decoder": replace("(?:a|a){20}[0-9]{2}", "", "Regex")}, "decoder has a regular expression"),
        ({"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 99}}, "strips more than 8"),
        ({"normalizer": replace("a" * 65, "a")}, "pattern of more than 64"),
        ({"pre_tokenizer": SPLIT | {"pattern": {"Regex": "a" * 2049}}}, "pattern of more than 2048"),
        ({"normalizer": replace("(?:a|a){9}b", "", "Regex")}, "simplify it"),
        ({"normalizer": replace(r"a(?=[\s\S]{600})", "b", "Regex")}, "simplify it"),
        ({"normalizer": replace("a{17}", "b", "Regex")}, "simplify it"),
        ({"normalizer": replace("a{1,9999}", "b", "Regex")}, "simplify it"),
        ({"normalizer": replace("a{9}{9}{9}", "b", "Regex")}, "simplify it"),
        ({"normalizer": replace("a{1,9}+b", "b", "Regex")}, "simplify it"),
        ({"normalizer": replace("a?{9}b", "b", "Regex")}, "simplify it"),
        ({"normalizer": replace("a*a*a*a*a*b", "b", "Regex")}, "simplify it"),
    ],
)
def test_what_takes_long_for_little_text_is_refused(parts: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TokenizerBoundsError, match=sentence):
        read_tokenizer(spec(**parts))


def test_the_punctuation_that_a_released_model_removes_is_accepted() -> None:
    pattern = r"""[!"\#\$%\&'\(\)\*\+,\-\.:;=\?@\[\\\]\^_`\{\|\}\~]"""
    assert read_tokenizer(spec(normalizer=replace(pattern, "", "Regex")))


def test_what_is_accepted_with_many_added_tokens() -> None:
    grown = steps("normalizer", *[replace("~", "~~")] * 4)
    assert read_tokenizer(spec(added_tokens=added("~" * 2000, 600, normalized=False), **grown))
    assert read_tokenizer(spec(added_tokens=added("<extra_id_", 3000), **T5))


def test_of_two_values_the_library_could_take_the_other_one() -> None:
    twice = spec(normalizer=1).replace('"normalizer": 1', '"normalizer": {"type": "NFC"}, "normalizer": null')
    with pytest.raises(TokenizerBoundsError, match="not valid"):
        read_tokenizer(twice)
    assert read_tokenizer(spec().replace('"a": 0', '"a": 3, "a": 0')), "vocabularies with repeats exist"


@pytest.mark.parametrize("text", ["", "[]", "1", "[" * 200_000, '{"normalizer": ' * 2000, "nul", '{"normalizer": NaN}'])
def test_what_is_no_tokenizer(text: str) -> None:
    with pytest.raises(TokenizerBoundsError, match="not valid"):
        read_tokenizer(text)


def test_numbers_stay_finite() -> None:
    many = [replace("~", "~" * 4000), {"type": "Prepend", "prepend": "~" * 4000}] * 500
    assert normalizer_growth(steps("normalizer", *many)) == Growth(1e12, 1e12)


@pytest.mark.parametrize("kind", _NORMALIZERS)
def test_no_character_grows_by_more_than_its_step_states(kind: str) -> None:
    normalize = getattr(normalizers, kind)().normalize_str
    measured = max(len(normalize(char).encode()) / len(char.encode()) for char in CHARACTERS)
    assert measured <= _NORMALIZERS[kind]


@pytest.mark.parametrize("kind", _DECODERS)
def test_no_token_grows_by_more_than_its_step_states(kind: str) -> None:
    decode = getattr(decoders, kind)().decode
    measured = max(len(decode([char]).encode()) / len(char.encode()) for char in [*CHARACTERS, "<0xFF>"])
    assert measured <= _DECODERS[kind]


@pytest.mark.parametrize(
    ("step", "part"),
    [
        (normalizers.Replace("aa", "bbb"), "normalizer"),
        (normalizers.Replace("", "xyz"), "normalizer"),
        (normalizers.Replace(Regex("a*?"), "xyz"), "normalizer"),
        (normalizers.Replace(Regex("c*"), "xyz"), "normalizer"),
        (normalizers.Prepend("xyz"), "normalizer"),
        (pre_tokenizers.ByteLevel(), "pre_tokenizer"),
        (pre_tokenizers.Metaspace(), "pre_tokenizer"),
        (pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("."), "isolated"), pre_tokenizers.Metaspace()]), ""),
        (decoders.Replace("", "xyz"), "decoder"),
        (decoders.BPEDecoder(""), "decoder"),
        (decoders.CTC("<pad>", "", False), "decoder"),
        (decoders.WordPiece("##", False), "decoder"),
    ],
)
@pytest.mark.parametrize("text", ["a", "aaaa", "    ", " ", "aé a\u00ff"])
def test_the_formulas_bound_what_the_library_does(step: Any, part: str, text: str) -> None:
    from headrace_proto.tokenizer_bounds import _growth

    grown = _growth(json.loads(step.__getstate__()), part or "pre_tokenizer")
    if part == "normalizer":
        assert len(step.normalize_str(text).encode()) <= grown.factor * len(text.encode()) + grown.added
    elif part == "decoder":
        for tokens in ([text], list(text)):
            most = grown.factor * len(text.encode()) + grown.added * len(tokens)
            assert len(step.decode(tokens).encode()) <= most
    else:
        pieces = [piece for piece, _ in step.pre_tokenize_str(text)]
        assert len("".join(pieces).encode()) <= sum(grown) * len(text.encode())


def test_an_added_token_is_normalized_when_the_file_is_read() -> None:
    """Why a file is checked before: this one would take all memory in `Tokenizer.from_str`."""
    text = spec(added_tokens=added("~"), normalizer=replace("~", "~" * 1000))
    tokenizer = Tokenizer.from_str(text)
    assert tokenizer.encode("~0").ids == [2], "the name of the token was replaced, too"
    with pytest.raises(TokenizerBoundsError):
        read_tokenizer(spec(added_tokens=added("~"), **steps("normalizer", *[replace("~", "~" * 1000)] * 4)))
