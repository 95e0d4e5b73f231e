"""What routers get of a model's files: a tokenizer that fits the model, its end tokens, and its chat templates."""

import json
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from headrace_base.errors import ModelLoadError
from headrace_proto import replica_pb2 as pb
from headrace_proto.grammar import compile_grammar, grammar_tokenizer
from headrace_router.text.model_card import LoadedTokenizer, ModelCard
from headrace_worker.model.build_model import read_config
from headrace_worker.model.facts import ModelFacts, read_facts
from headrace_worker.model.gguf_file import GgufFile
from headrace_worker.model.gguf_tokenizer import byte_tokenizer
from headrace_worker.model.source import ModelSource, resolve
from headrace_worker.model.tokenizer_files import fit_tokenizer

END, BASE = "<|im_end|>", "<|endoftext|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", END, BASE, "<|end|>", "<|close|>", "<|sep|>", "<|assistant|>", "<|stop|>"]
FIRST = 256  # id of the first special token


def write_folder(
    folder: Path,
    special: list[str] = SPECIAL,
    plain: list[str] | None = None,
    eos: str | None = BASE,
    chat_template: Any = None,
) -> ModelSource:
    """The tokenizer's files of a model: a token for each byte, then special ones, then others that are added."""
    tokenizer = byte_tokenizer(256)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain or []])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos).save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ModelSource("m", "safetensors", folder, "r", (), "d")


def facts_of(source: ModelSource, vocab_size: int = 320, chat_template: str | None = None) -> ModelFacts:
    config = SimpleNamespace(eos_token_id=None, bos_token_id=None, max_position_embeddings=64)
    return read_facts(source, config, None, vocab_size, chat_template=chat_template)


def card_of(facts: ModelFacts) -> ModelCard:
    message = pb.ModelFacts(
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        chat_template=facts.chat_template,
        named_templates=facts.named_templates,
        special_tokens=facts.special_tokens,
    )
    return ModelCard(message, LoadedTokenizer(facts.tokenizer_json))


@pytest.fixture(scope="module")
def embedded() -> GgufFile:
    return GgufFile(resolve("smollm2").path)


def gguf_facts(file: GgufFile, vocab_size: int = 49152, **metadata: Any) -> ModelFacts:
    """Of the embedded file with other metadata."""
    changed = copy(file)
    changed.metadata = file.metadata | {f"tokenizer.{key.replace('__', '.')}": value for key, value in metadata.items()}
    source = resolve("smollm2")
    return read_facts(source, read_config(source, changed), changed, vocab_size)


# tokens without a row


def test_added_tokens_without_a_row_are_text(tmp_path: Path) -> None:
    source = write_folder(tmp_path, [*SPECIAL, "<extra_special>"], ["<extra_plain>", "<later>"], END, CHATML)
    rows = FIRST + len(SPECIAL)
    facts = facts_of(source, rows)
    assert max(Tokenizer.from_str(facts.tokenizer_json.decode()).get_vocab().values()) == rows - 1
    assert [note for note in facts.notes if f"{rows} rows, and none for 3 added tokens" in note]
    card = card_of(facts)
    for text in ("a <extra_plain> b", "<extra_special>", "<later><extra_plain>"):
        assert card.encoder.encode_prompt(text) == list(text.encode())
        assert set(text.encode()) <= set(card.encode_chat([{"role": "user", "content": text}]))
        assert card.decode(list(text.encode())) == text
    assert card.encode_chat([{"role": "user", "content": "a"}])[0] == FIRST, "other added tokens are tokens"
    whole = facts_of(source, rows + 3)
    assert whole.notes == () and card_of(whole).encoder.encode_prompt("<later>") == [rows + 2]


@pytest.mark.parametrize("grammar", ['%llguidance {}\nstart: "yes" | "no"', "%llguidance {}\nstart: %json {}"])
def test_a_model_with_fewer_rows_than_tokens_can_be_constrained(grammar: str, tmp_path: Path) -> None:
    facts = facts_of(write_folder(tmp_path, plain=["<extra>"]), FIRST + len(SPECIAL))
    tokenizer = grammar_tokenizer(facts.tokenizer_json.decode(), facts.vocab_size, facts.eos_token_ids)
    matcher = compile_grammar(tokenizer, grammar)
    assert not matcher.is_error() and any(matcher.compute_bitmask())


def kind_of(name: str) -> Tokenizer:
    """A tokenizer of each kind of model, with the added token `ab` in its vocabulary, too."""
    merged = {"a": 0, "b": 1, "c": 2, "ca": 3, "ab": 4}
    if name == "BPE":
        made = Tokenizer(models.BPE(vocab=merged, merges=[("c", "a"), ("a", "b")]))
    elif name == "Unigram":
        made = Tokenizer(models.Unigram([(token, -float(place)) for token, place in merged.items()], unk_id=0))
    else:
        made = Tokenizer(getattr(models, name)(vocab=merged, unk_token="a"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_tokens([AddedToken("ab", normalized=False), AddedToken("<new>", normalized=False)])
    return made


@pytest.mark.parametrize("name", ["BPE", "Unigram", "WordPiece", "WordLevel"])
def test_an_added_token_that_the_vocabulary_has_too(name: str) -> None:
    fitted, left_out = fit_tokenizer(kind_of(name), 4, None)
    assert left_out == ["ab", "<new>"] and max(fitted.get_vocab().values()) == 3
    for text in ("ab", "cab", "<new>"):
        assert max(fitted.encode(text).ids, default=0) < 4
    assert fitted.encode("ca").ids == kind_of(name).encode("ca").ids
    assert fit_tokenizer(kind_of(name), 6, None)[1] == []


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"needs the token 'ca' with the id 3, but the model has 3 rows"):
        fit_tokenizer(kind_of("BPE"), 3, None)
    begins = kind_of("BPE")
    begins.post_processor = processors.TemplateProcessing(single="<new> $A", special_tokens=[("<new>", 5)])
    with pytest.raises(ModelLoadError, match="needs the token '<new>' with the id 5"):
        fit_tokenizer(begins, 5, None)
    with pytest.raises(ModelLoadError, match="needs the token '<new>' with the id 5"):
        fit_tokenizer(kind_of("BPE"), 5, 5)
    unknown = Tokenizer(models.WordLevel(vocab={"a": 0, "b": 1}, unk_token="b"))
    unknown.add_special_tokens(["b"])
    with pytest.raises(ModelLoadError, match="needs the token 'b' with the id 1"):
        fit_tokenizer(unknown, 1, None)


def test_a_gguf_file_with_fewer_rows_than_tokens(embedded: GgufFile) -> None:
    tokens = embedded.metadata["tokenizer.ggml.tokens"]
    types = list(embedded.metadata["tokenizer.ggml.token_type"])
    more: dict[str, Any] = {"ggml__tokens": [*tokens, "<extra>"], "ggml__token_type": [*types, 3]}
    facts = gguf_facts(embedded, **more, ggml__eot_token_id=49152)
    assert facts.eos_token_ids == (2,) and "1 added token of its tokenizer, '<extra>' first" in facts.notes[0]
    assert facts.tokenizer_json == gguf_facts(embedded).tokenizer_json
    with pytest.raises(ModelLoadError, match="needs the token '<extra>'"):
        gguf_facts(embedded, **more, ggml__bos_token_id=49152, ggml__add_bos_token=True)


# end tokens

TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
PARTS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}"
THINKS = "{% for m in messages %}{% if m.reasoning %}{{ m.reasoning }}<|end|>{% endif %}"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, [END]),
        (f"{TURN}<|im_end|>\n{{% endfor %}}<|im_start|>assistant\n", [END]),  # the answer's begin is always written
        (f"{TURN}<|im_end|>{{% endfor %}}<|im_start|>assistant\n", [END]),
        (f"{TURN} <|end|>\n{{% endfor %}}{{{{ eos_token }}}}", ["<|end|>"]),  # as Phi's
        (f"{TURN}\n<|custom_end|>{{% endfor %}}", ["<|custom_end|>"]),  # added, and not special
        (f"{TURN}{{% endfor %}}", []),
        (f"{TURN}</s>\n{{% endfor %}}", []),  # text that is no token
        (f"{TURN}.<|im_end|>\n{{% endfor %}}", []),
        (f"{TURN}<|end|><|endoftext|>{{% endfor %}}", []),  # the model goes on to the end token
        (f"{TURN}<|close|>message<|sep|>{{% endfor %}}", []),  # as Kimi K3's
        ("{% for m in messages %}<|assistant|>\n{{ m.content }}{% endfor %}<|assistant|>\n", []),
        (f"{THINKS}{{{{ m.content }}}}<|end|>{{% endfor %}}", []),  # as Solar's, whose reasoning ends so, too
        (f"{THINKS}{{{{ m.content }}}}<|stop|>{{% endfor %}}", ["<|stop|>"]),  # as gpt-oss's
        (f"{PARTS}<|im_end|>{{% endfor %}}", [END]),
        ("{{ raise_exception('no') }}", []),
        ("{% for m in messages %}{{ m.content.no.such }}{% endfor %}", []),
        ("<|im_end|>{{ messages[0].content }}<|im_end|>", []),  # the answer is not shown
        ("{% if", []),
    ],
)
def test_the_token_with_which_the_template_ends_a_turn(template: str, ends: list[str], tmp_path: Path) -> None:
    source = write_folder(tmp_path, plain=["<|custom_end|>", "<unused>"], chat_template=template)
    facts = facts_of(source)
    tokenizer = Tokenizer.from_str(facts.tokenizer_json.decode())
    assert [tokenizer.id_to_token(token) for token in facts.eos_token_ids] == [BASE, *ends]
    said = [note for note in facts.notes if "ends answers, too" in note]
    assert len(said) == len(ends) and all(repr(end) in note for end, note in zip(ends, said, strict=True))


def test_an_end_token_of_the_files_needs_no_note(tmp_path: Path) -> None:
    facts = facts_of(write_folder(tmp_path, eos=END, chat_template=CHATML))
    assert (facts.eos_token_ids, facts.notes) == ((FIRST + SPECIAL.index(END),), ())
    own = tmp_path / "own.jinja"
    own.write_text(CHATML.replace(END, "<|stop|>"))
    facts = facts_of(write_folder(tmp_path, eos=END, chat_template=CHATML), chat_template=str(own))
    assert facts.eos_token_ids == tuple(FIRST + SPECIAL.index(token) for token in (END, "<|stop|>"))


def test_the_end_token_of_a_gguf_file(embedded: GgufFile) -> None:
    facts = gguf_facts(embedded, ggml__eos_token_id=0)
    assert facts.eos_token_ids == (0, 2) and "'<|im_end|>' ends answers, too" in facts.notes[0]
    unchanged = gguf_facts(embedded)
    assert (unchanged.eos_token_ids, unchanged.notes) == ((2,), ())


# named chat templates


def test_named_templates_are_those_of_transformers(tmp_path: Path) -> None:
    named = {"default": "d {{ messages }}", "tool_use": "t {{ messages }}", "rag": "r {{ messages }}"}
    listed = [{"name": name, "template": template} for name, template in named.items()]
    facts = facts_of(write_folder(tmp_path / "list", chat_template=listed))
    assert (facts.chat_template, facts.named_templates) == (named.pop("default"), named)
    assert facts.notes == (
        "The model has the chat templates default, rag, tool_use; 'tool_use' is used for chats with tools.",
    )
    folder = tmp_path / "files"
    source = write_folder(folder)
    (folder / "chat_template.jinja").write_text(facts.chat_template)
    (folder / "additional_chat_templates").mkdir()
    for name, template in named.items():
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(template)
    found = facts_of(source)
    assert (found.chat_template, found.named_templates) == (facts.chat_template, facts.named_templates)
    assert AutoTokenizer.from_pretrained(folder).chat_template == {"default": facts.chat_template, **named}
    own = tmp_path / "own.jinja"
    own.write_text("own")
    replaced = facts_of(source, chat_template=str(own))
    assert (replaced.chat_template, replaced.named_templates) == ("own", {})


def test_a_template_that_is_not_valid_is_told_at_the_start(tmp_path: Path) -> None:
    named = {"default": "{{ messages }}", "tool_use": "a\n{% if %}", "marked": "{% generation %}{% endgeneration %}"}
    listed = [{"name": name, "template": template} for name, template in named.items()]
    first, _ = facts_of(write_folder(tmp_path / "m", chat_template=listed)).notes
    assert first.startswith("The chat template 'tool_use' of the model is not valid Jinja, line 2: ")


def test_named_templates_of_a_gguf_file(embedded: GgufFile) -> None:
    facts = gguf_facts(embedded, chat_template__tool_use=CHATML.replace(END, BASE))
    assert facts.chat_template == gguf_facts(embedded).chat_template
    assert facts.named_templates == {"tool_use": CHATML.replace(END, BASE)}
    assert facts.eos_token_ids == (2, 0), "each template that is used ends turns"
    with pytest.raises(ModelLoadError, match=r"tokenizer\.chat_template\.rag' is not a string"):
        gguf_facts(embedded, chat_template__rag=7)
