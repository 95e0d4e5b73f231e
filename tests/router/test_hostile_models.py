"""A replica's description of its model, with any content: usable, or refused by ModelFactsError."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headrace_proto.replica_pb2 import ModelFacts
from headrace_router.core.errors import InvalidRequestError
from headrace_router.text.chat_template import ChatTemplate
from headrace_router.text.model_card import LoadedTokenizer, ModelCard, ModelFactsError

MESSAGES = [{"role": "user", "content": "héllo <s> x"}]
fuzz = settings(max_examples=60, deadline=None, database=None, print_blob=True, suppress_health_check=list(HealthCheck))


def specs() -> list[str]:
    """tokenizer.json of one tokenizer of each kind."""
    letters = {chr(97 + index): index for index in range(26)}
    kinds: list[Any] = [
        models.BPE(vocab=letters | {"ab": 26}, merges=[("a", "b")], byte_fallback=True),
        models.WordPiece(vocab=letters | {"[UNK]": 26, "##a": 27}, unk_token="[UNK]"),
        models.Unigram([("<unk>", 0.0), ("a", -1.0), ("▁", -2.0), ("<0x41>", -3.0)], 0, True),
        models.WordLevel(letters | {"[UNK]": 26}, unk_token="[UNK]"),
    ]
    made = []
    for kind in kinds:
        tokenizer = Tokenizer(kind)
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("▁")])
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Digits()])
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        tokenizer.add_special_tokens(["<s>"])
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
        made.append(tokenizer.to_str())
    return made


SPECS = specs()
values = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**64), 2**65), st.floats(), st.text(max_size=6), st.just([]), st.just({}),
    st.sampled_from(["ByteLevel", "BPE", "Unigram", "", "<0xZZ>", "Regex", "\ud800", 2**31, 2**32 - 1]),
)  # fmt: skip


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value of a JSON document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(place for key, value in items for place in places(value, (*path, key)))]


def use(tokenizer_json: bytes, template: str = "{{ messages[0]['content'] }}") -> None:
    """What a router does with a model, from its description to a chat."""
    card = ModelCard(ModelFacts(chat_template=template, add_bos=True, bos_token_id=1), LoadedTokenizer(tokenizer_json))
    for token in range(30):
        card.tokens.token_bytes(token)


@pytest.mark.parametrize("spec", SPECS)
def test_the_specs_that_are_damaged_here_are_valid(spec: str) -> None:
    use(spec.encode())


@fuzz
@given(st.sampled_from(SPECS), st.data())
def test_any_value_in_a_tokenizer(spec: str, data: st.DataObject) -> None:
    content = json.loads(spec)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(content)))
        node = content
        for key in path[:-1]:
            node = node[key]
        if not path:
            continue
        if data.draw(st.booleans()):
            node[path[-1]] = data.draw(values)
        elif isinstance(node, dict):
            del node[path[-1]]
    try:
        use(json.dumps(content).encode())
    except ModelFactsError:
        return


@fuzz
@given(st.binary(max_size=60))
@example(b"[" * 200_000)
@example(b'{"a":' * 100_000)
@example(b"\xff")
@example(b"1" * 10_000)
def test_any_bytes_as_tokenizer(content: bytes) -> None:
    with pytest.raises(ModelFactsError):
        use(content)


def test_a_tokenizer_whose_post_processor_panics_is_refused() -> None:
    content = json.loads(SPECS[3])
    piece = {"SpecialToken": {"id": "[CLS]", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": [piece, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
        "special_tokens": {},
    }  # fmt: skip
    with pytest.raises(ModelFactsError, match="does not encode text"):
        use(json.dumps(content).encode())


def test_a_number_of_an_unknown_token_in_a_model_that_has_none_is_refused() -> None:
    content = json.loads(SPECS[3])
    content["model"]["unk_id"] = 10**6
    with pytest.raises(ModelFactsError, match="not valid"):
        use(json.dumps(content).encode())


def test_a_tokenizer_that_encodes_nothing_is_refused() -> None:
    content = json.loads(SPECS[3])
    content["model"]["vocab"] = {"zzz": 0}
    with pytest.raises(ModelFactsError, match="does not encode text"):
        use(json.dumps(content).encode())


def test_tokens_that_look_like_bytes() -> None:
    content = json.loads(SPECS[3])
    content["model"]["vocab"] |= {"<0xZZ>": 27, "<0x4a>": 28}
    card = LoadedTokenizer(json.dumps(content).encode())
    assert card.tokens.token_bytes(27) == b"<0xZZ>" and card.tokens.token_bytes(28) == b"\x4a"


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "9" * 10_000 + " }}",
        "{% for a in b %}" * 200 + "{% endfor %}" * 200,
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{{ " + "-" * 20_000 + "1 }}",
        "{% if x %}" * 3000,
        "{{ 'x' ",
        "{{ messages | nothing }}",
        "\x00{{",
    ],
)
def test_templates_that_cannot_be_compiled_are_named_when_they_are_used(source: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidRequestError, match="chat template"):
        template.render(MESSAGES)


@pytest.mark.parametrize("product", ["'a' * 10**9", "10**9 * [0]", "9**(9**9)", "'a' * 10**6 * 10**6"])
@pytest.mark.parametrize("condition", ["false", "true"])
def test_products_in_a_template_are_bounded(product: str, condition: str) -> None:
    tracemalloc.start()
    try:
        template = ChatTemplate("{% if " + condition + " %}{{ " + product + " }}{% endif %}x", {})
        if condition == "true":
            with pytest.raises(InvalidRequestError, match="sandbox forbids"):
                template.render(MESSAGES)
        else:
            assert template.render(MESSAGES) == "x"
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("product", "text"), [("'ab' * 3", "ababab"), ("2**10 * 1.5", "1536.0"), ("-3 * 4", "-12")])
def test_other_products_are_computed(product: str, text: str) -> None:
    assert ChatTemplate("{{ " + product + " }}", {}).render(MESSAGES) == text
