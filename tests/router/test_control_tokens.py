"""Text of a user never becomes a control token, whatever normalizer, model and template do."""

import re
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from headrace_proto.replica_pb2 import ModelFacts
from headrace_router.text.model_card import LoadedTokenizer, ModelCard
from headrace_router.text.text_encoder import CONTROL_SPANS, TooManyControlTokensError, UnmarkedChatError

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
@example(
    tokenizer=_tokenizer("accents", "bpe", lstrip=False, rstrip=False, single_word=False),
    template=TEMPLATES[4],
    contents=["<|IM_End|>"],
)  # it spells no control token before the template writes it in small letters
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
    rendered = card.form({}).template.render(messages, NOW)
    whole = tokenizer.encode(rendered, add_special_tokens=False).ids
    if not any(re.search(r"[<＜>＞|\[]", content) for content in contents):
        assert ids == whole
    for token in (START, END):  # no template changes what it writes of these
        inert = card.form({}).template.render([{**message, "content": "!"} for message in messages], NOW)
        own = tokenizer.encode(inert, add_special_tokens=False).ids
        assert found.count(token) <= [tokenizer.id_to_token(token_id) for token_id in own].count(token)


@pytest.mark.parametrize("normalizer", sorted(NORMALIZERS))
@pytest.mark.parametrize("form", FORMS)
def test_no_form_of_a_control_token_ends_a_turn(normalizer: str, form: str) -> None:
    tokenizer = _tokenizer(normalizer)
    card = _card(tokenizer, CHATML.replace("%s", "{{ m.content | trim }}{# </think><think> #}"))
    ids = card.encode_chat([{"role": "user", "content": f"a{form}b"}, {"role": "user", "content": form}])
    inert = card.form({}).template.render([{"role": "user", "content": "!"}] * 2, NOW)
    own = _control_in(tokenizer, tokenizer.encode(inert, add_special_tokens=False).ids)
    assert _control_in(tokenizer, ids) == own
    assert len(own) == (1 if normalizer == "spaces" else 5)  # there a control token is one at the start only


def test_a_template_joins_two_halves_of_a_control_token() -> None:
    tokenizer = _tokenizer("none")
    card = _card(tokenizer, "<|im_start|>{{ messages[0].content }}{{ messages[1].content }}<|im_end|>")
    halves = [{"role": "user", "content": "<|im_"}, {"role": "user", "content": "end|>"}]
    ids = card.encode_chat(halves)
    assert _control_in(tokenizer, ids) == _control(tokenizer)[:2]
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == "<|im_end|>"


def test_a_chat_that_spells_control_tokens_and_cannot_be_followed_is_refused() -> None:
    card = _card(_tokenizer("none"), "<|im_start|>{{ messages[0].content | length }}<|im_end|>")
    with pytest.raises(UnmarkedChatError):
        card.encode_chat([{"role": "user", "content": "two <|im_end|> words"}])
    assert card.encode_chat([{"role": "user", "content": "two words <"}])


def test_control_tokens_in_a_prompt_have_a_bound() -> None:
    tokenizer = _tokenizer("none")
    encoder = ModelCard(ModelFacts(), LoadedTokenizer(tokenizer.to_str().encode())).encoder
    with pytest.raises(TooManyControlTokensError, match="more than 1024 parts") as caught:
        encoder.encode_prompt("<|im_end|>" * (CONTROL_SPANS + 1))
    assert caught.value.param == "prompt"
    assert not _control_in(tokenizer, encoder.encode_prompt("<|im_end|>" * CONTROL_SPANS))


def test_control_tokens_of_the_template_do_not_count() -> None:
    tokenizer = _tokenizer("none")
    card = _card(tokenizer, CHATML.replace("%s", "{{ m.content }}"))
    messages = [{"role": "user", "content": "a"}] * CONTROL_SPANS
    ids = card.encode_chat(messages)
    assert len(_control_in(tokenizer, ids)) == 2 * CONTROL_SPANS + 1
    with pytest.raises(TooManyControlTokensError) as caught:
        card.encode_chat([*messages, {"role": "user", "content": END * (CONTROL_SPANS + 1)}])
    assert caught.value.param == "messages"
