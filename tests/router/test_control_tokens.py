"""Text of a user never becomes a control token, whatever normalizer, model and template do."""

import re
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from headrace_proto.replica_pb2 import ModelFacts
from headrace_router.text.chat_template import ChatTemplateError
from headrace_router.text.model_card import LoadedTokenizer, ModelCard
from headrace_router.text.prompt_text import UnmarkedChatError
from headrace_router.text.text_encoder import CONTROL_SPANS, ControlTokenError, TooManyControlTokensError

NOW = datetime(2026, 11, 25)
START, END, THINK, THOUGHT = "<|im_start|>", "<|im_end|>", "<think>", "</think>"
LETTERS = sorted({*"abcdefghijklmnopqrstuvwxyz<>|/_ \n▁"})
NORMALIZERS = {
    "none": None,
    "width": normalizers.NFKC(),
    "case": normalizers.Lowercase(),
    "accents": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    "letters": normalizers.Replace(Regex("[xX]"), ""),
    "spaces": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "all": normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]),
}
FORMS = [
    START,
    END,
    THOUGHT,
    "＜|im_end|＞",
    "<|IM_End|>",
    "<|ïm_énd|>",
    "<|xim_xend|>",
    "<|x<|im_end|>im_end|>",
    "[UNK]",
]
FORMS += [
    "<|x<|im_end|>im_end|>",
    "<|",
    "im_",
    "end|>",
    "x",
    " ",
    "\n",
    "é",
    "日",
    "hello",
    "\u0301",
    THINK,
    " <|im_end|> ",
    "",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n%s<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = [
    CHATML.replace("%s", content)
    for content in (
        "{{ m.content }}",
        "{{ m['content'] | trim }}",
        "{{ m.content | replace('x', '') }}",
        "{{ m.content.replace('x', '').strip() }}",
        "{{ m.content | upper }}{{ m.content.lower() }}",
        "{{ m.content.split('</think>')[-1].lstrip('\n') }}",
        "{{ m.content | tojson }}{{ messages | tojson }}",
        "{{ m.content.partition(':')[2] or m.content }}{% set ns = namespace(t='') %}{% set ns.t = ns.t + m.content %}"
        "{{ ns.t.rstrip() if m.content.endswith('!') and m.content not in ['a', 'b'] else ns.t }}",
        "{% if m.content.startswith('<think>') and '</think>' in m.content %}<think>{{ m.content[7:] }}{% else %}"
        "{{ m.content | reverse | reverse }}{% endif %}",
        "{{ messages | map(attribute='content') | join('') }}",
        "{% for c in m.content %}{% if c != 'x' %}{{ c }}{% endif %}{% endfor %}",
        "{{ '{}'.format(m.content) }}{{ '%s' % m.content }}{{ m.content ~ messages[0].content }}"
        "{{ m.content | length }}",
        "{{ m.content }}im_end|>{{ m.content }}{{ '|im_end|>' + m.content }} <|{{ m.content }}",
        "{{ '<|' + m.role + '|>' + m.content + '<|im_end|>' }}",
    )
]


@cache
def _tokenizer(normalizer: str, model: str = "bpe", **flags: bool) -> Tokenizer:
    """Letters as tokens, and control tokens that match in normalized text."""
    vocab = {letter: number for number, letter in enumerate(["[UNK]", *LETTERS])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="[UNK]"))
    if model == "unigram":  # its vocabulary contains the control tokens, as SentencePiece's does
        pieces = [("[UNK]", 0.0), *((letter, -3.0) for letter in LETTERS)]
        pieces += [(control, 0.0) for control in (START, END, THINK, THOUGHT)]
        made = Tokenizer(models.Unigram(pieces, unk_id=0))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    if NORMALIZERS[normalizer] is not None:
        made.normalizer = NORMALIZERS[normalizer]
    made.add_special_tokens(
        [AddedToken("[UNK]"), *(AddedToken(token, normalized=True, **flags) for token in (START, END))]
    )
    made.add_tokens([AddedToken(token, normalized=True, **flags) for token in (THINK, THOUGHT)])
    return made


@cache
def _card(tokenizer: Tokenizer, template: str) -> ModelCard:
    return ModelCard(ModelFacts(chat_template=template), LoadedTokenizer(tokenizer.to_str().encode()))


def _control(tokenizer: Any) -> list[int]:
    return [tokenizer.token_to_id(token) for token in (START, END, THINK, THOUGHT)]


def _control_in(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [token_id for token_id in ids if token_id in _control(tokenizer)]


texts = st.lists(st.sampled_from(FORMS), max_size=6).map("".join) | st.text(max_size=12)
tokenizers = st.builds(
    _tokenizer,
    st.sampled_from(sorted(NORMALIZERS)),
    st.sampled_from(["bpe", "unigram"]),
    lstrip=st.booleans(),
    rstrip=st.booleans(),
    single_word=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(tokenizer=tokenizers, text=texts)
def test_a_prompt_has_no_control_tokens_and_is_else_unchanged(tokenizer: Tokenizer, text: str) -> None:
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    ids = _card(tokenizer, THINK + THOUGHT).encoder.encode_prompt(text)
    assert not _control_in(tokenizer, ids)
    if not _control_in(tokenizer, expected) and "[" not in text:
        assert ids == expected


@settings(max_examples=150, deadline=None)
@example(
    tokenizer=_tokenizer("none", "bpe", lstrip=False, rstrip=False, single_word=False),
    template=TEMPLATES[5],
    contents=["</think><|im_start|>"],
)  # the template shows what follows the tag only
@example(
    tokenizer=_tokenizer("all", "bpe", lstrip=True, rstrip=True, single_word=False),
    template=TEMPLATES[0],
    contents=["¨", "´ ¸"],
)  # normalized to white space, which the control tokens beside it include
@given(
    tokenizer=tokenizers,
    template=st.sampled_from(TEMPLATES),
    contents=st.lists(texts, min_size=1, max_size=3),
)
def test_a_chat_has_the_control_tokens_that_its_template_writes(
    tokenizer: Tokenizer, template: str, contents: list[str]
) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    card = _card(tokenizer, template)
    try:
        ids = card.encode_chat(messages)
    except UnmarkedChatError:
        assert re.search("length|replace|split|partition|reverse", template), (
            "these change the text or show a part of it"
        )
        return
    found = [tokenizer.id_to_token(token_id) for token_id in _control_in(tokenizer, ids)]
    rendered = card.template.render(messages, NOW)
    whole = tokenizer.encode(rendered, add_special_tokens=False).ids
    if not any(re.search(r"[<＜>＞|\[]", content) for content in contents):
        assert ids == whole
    for token in (START, END):  # no template changes what it writes of these
        inert = card.template.render([{**message, "content": "!"} for message in messages], NOW)
        own = tokenizer.encode(inert, add_special_tokens=False).ids
        assert found.count(token) <= [tokenizer.id_to_token(token_id) for token_id in own].count(token)


@settings(max_examples=60, deadline=None)
@example(names=["<｜User｜>", "▁", "Ġ", "é"], special=True, data=None)
@given(
    # Not of white space alone: a user's space may become such a token.
    names=st.lists(
        st.text(min_size=1, max_size=5).filter(lambda name: not name.isspace()), min_size=1, max_size=4, unique=True
    ),
    special=st.booleans(),
    data=st.data(),
)
def test_control_tokens_of_any_characters(names: list[str], special: bool, data: st.DataObject | None) -> None:
    tokenizer: Any = Tokenizer(models.BPE(vocab={}, merges=[]))
    tokenizer.model = models.BPE(
        vocab={char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=special) for name in names])
    pieces = [*names, *(name[:1] for name in names), *(name[1:] for name in names), "a", " "]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=8)) if data else pieces[:1] * 2)
    control = {tokenizer.token_to_id(name) for name in names if special or not name.isspace()}
    card = _card(tokenizer, "{{ messages[0].content }}{# " + " ".join(names).replace("#}", "") + " #}")
    kept = control if special else {i for i in control if tokenizer.id_to_token(i) in card.template.source}
    for encode in (card.encoder.encode_prompt, lambda text: card.encode_chat([{"role": "user", "content": text}])):
        try:
            ids = encode(text)
        except (ControlTokenError, UnmarkedChatError, ChatTemplateError):
            continue
        assert kept.isdisjoint(ids)
        if kept == control:
            assert tokenizer.decode(ids, skip_special_tokens=False) == text or any(name.isspace() for name in names)


@pytest.mark.parametrize("normalizer", sorted(NORMALIZERS))
@pytest.mark.parametrize("form", FORMS)
def test_no_form_of_a_control_token_ends_a_turn(normalizer: str, form: str) -> None:
    tokenizer = _tokenizer(normalizer)
    card = _card(tokenizer, CHATML.replace("%s", "{{ m.content | trim }}{# </think><think> #}"))
    ids = card.encode_chat([{"role": "user", "content": f"a{form}b"}, {"role": "user", "content": form}])
    inert = card.template.render([{"role": "user", "content": "!"}] * 2, NOW)
    own = _control_in(tokenizer, tokenizer.encode(inert, add_special_tokens=False).ids)
    assert _control_in(tokenizer, ids) == own
    assert len(own) == (1 if normalizer == "spaces" else 5)  # there a control token is one at the start only


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_without_control_tokens_is_encoded_as_rendered(template: str) -> None:
    tokenizer = _tokenizer("none")
    card = _card(tokenizer, template)
    for content in ('say "hi" \\ and\n wait!', " \n", "", "a", "x: </b> 日本 \u0301 \U000f0000 \x00", "a <think"):
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "b"}]
        rendered = card.template.render(messages, NOW)
        assert card.encode_chat(messages) == tokenizer.encode(rendered, add_special_tokens=False).ids


def test_a_template_joins_two_halves_of_a_control_token() -> None:
    tokenizer = _tokenizer("none")
    card = _card(tokenizer, "<|im_start|>{{ messages[0].content }}{{ messages[1].content }}<|im_end|>")
    halves = [{"role": "user", "content": "<|im_"}, {"role": "user", "content": "end|>"}]
    ids = card.encode_chat(halves)
    assert _control_in(tokenizer, ids) == _control(tokenizer)[:2]
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == "<|im_end|>"


def test_a_template_moves_the_thoughts_of_an_answer() -> None:
    """As those of reasoning models do: what the template writes remains a control token."""
    tokenizer = _tokenizer("none")
    template = CHATML.replace(
        "%s",
        "{% set content = m.content %}{% set reasoning = '' %}{% if '</think>' in content %}"
        "{% set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{% if loop.last %}<think>\n{{ reasoning.strip('\n') }}\n</think>\n\n{% endif %}{{ content }}",
    )
    messages = [{"role": "user", "content": "a </b>"}, {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"}]
    card = _card(tokenizer, template)
    expected = tokenizer.encode(card.template.render(messages, NOW), add_special_tokens=False).ids
    assert card.encode_chat(messages) == expected
    start, end, think, thought = _control(tokenizer)
    assert _control_in(tokenizer, expected) == [start, end, start, think, thought, end, start]


def test_the_token_for_unknown_text_is_one_for_unknown_text_only() -> None:
    tokenizer: Any = _tokenizer("none")
    unknown = tokenizer.token_to_id("[UNK]")
    encoder = _card(tokenizer, "").encoder
    assert encoder.encode_prompt("a日b") == tokenizer.encode("a日b").ids
    assert unknown in encoder.encode_prompt("日")
    assert len(encoder.encode_prompt("[UNK]")) == 5


def test_a_character_that_is_a_control_token_is_refused() -> None:
    tokenizer = Tokenizer.from_str(_tokenizer("none").to_str())
    tokenizer.add_special_tokens(["@"])
    with pytest.raises(ControlTokenError):
        _card(tokenizer, "").encoder.encode_prompt("a@b")


def test_a_chat_that_spells_control_tokens_and_cannot_be_followed_is_refused() -> None:
    card = _card(_tokenizer("none"), "<|im_start|>{{ messages[0].content | length }}<|im_end|>")
    with pytest.raises(UnmarkedChatError):
        card.encode_chat([{"role": "user", "content": "two <|im_end|> words"}])
    assert card.encode_chat([{"role": "user", "content": "two words <"}])


@pytest.mark.parametrize("repeated", ["<|im_end|>", "<|im_end|><|", "<" * 50 + "<|im_end|>", "x<|im_x"])
def test_many_control_tokens_take_linear_time(repeated: str) -> None:
    tokenizer = _tokenizer("letters")
    counted: list[int] = []

    class Counting:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def encode_batch(self, batch: list[str], **options: bool) -> Any:
            counted.append(sum(map(len, batch)))
            return self._inner.encode_batch(batch, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    encoder = ModelCard(ModelFacts(), LoadedTokenizer(tokenizer.to_str().encode())).encoder
    vars(encoder)["_tokenizer"] = Counting(encoder._tokenizer)
    text = repeated * 500
    assert not _control_in(tokenizer, encoder.encode_prompt(text))
    assert len(counted) <= 5 and sum(counted) <= 20 * len(text)


def test_control_tokens_in_a_prompt_have_a_bound() -> None:
    tokenizer = _tokenizer("none")
    encoder = ModelCard(ModelFacts(), LoadedTokenizer(tokenizer.to_str().encode())).encoder
    with pytest.raises(TooManyControlTokensError, match="more than 1024 parts") as caught:
        encoder.encode_prompt("<|im_end|>" * (CONTROL_SPANS + 1))
    assert caught.value.param == "prompt"
    assert not _control_in(tokenizer, encoder.encode_prompt("<|im_end|>" * CONTROL_SPANS))


def test_control_tokens_of_all_rounds_count() -> None:
    """A cut in the middle of a control token leaves one that it begins with."""
    tokenizer = Tokenizer.from_str(_tokenizer("none").to_str())
    tokenizer.add_special_tokens(["<a>", "<a>bcdefg"])
    encoder = ModelCard(ModelFacts(), LoadedTokenizer(tokenizer.to_str().encode())).encoder
    half = CONTROL_SPANS // 2
    encoder.encode_prompt("<a>bcdefg" * half)
    with pytest.raises(TooManyControlTokensError):
        encoder.encode_prompt("<a>bcdefg" * (half + 1))


def test_control_tokens_of_the_template_do_not_count() -> None:
    tokenizer = _tokenizer("none")
    card = _card(tokenizer, CHATML.replace("%s", "{{ m.content }}"))
    messages = [{"role": "user", "content": "a"}] * CONTROL_SPANS
    ids = card.encode_chat(messages)
    assert len(_control_in(tokenizer, ids)) == 2 * CONTROL_SPANS + 1
    with pytest.raises(TooManyControlTokensError) as caught:
        card.encode_chat([*messages, {"role": "user", "content": END * (CONTROL_SPANS + 1)}])
    assert caught.value.param == "messages"
