"""Guides of grammars: their masks, their end, and what is kept."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from headrace_proto import replica_pb2 as pb
from headrace_proto.grammar import GrammarError
from headrace_router.answer.grammar import regex_grammar, schema_grammar
from headrace_worker.model.gguf_tokenizer import byte_tokenizer
from headrace_worker.server.description import Description
from headrace_worker.server.grammars import GrammarGuide, Grammars

END = 2
TOKENIZER = byte_tokenizer(300)


@pytest.fixture
def made() -> Any:
    facts = pb.ModelFacts(vocab_size=310, eos_token_ids=[END])
    found = Grammars(Description(facts, TOKENIZER.to_str().encode()))
    yield found
    found.close()


def _guide(made: Grammars, text: str) -> GrammarGuide:
    return asyncio.run(made.compile(text))


def _allowed(guide: GrammarGuide) -> set[int]:
    bits = np.unpackbits(guide.mask().view(np.uint8), bitorder="little")
    return {int(token) for token in np.flatnonzero(bits)}


def _tokens(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def test_masks_allow_what_continues_the_text_and_the_end_where_it_may_end(made: Grammars) -> None:
    guide = _guide(made, regex_grammar("ab?"))
    assert _allowed(guide) == set(_tokens("a")) and not guide.finished
    guide.advance(*_tokens("a"))
    assert _allowed(guide) == {*_tokens("b"), END} and not guide.finished
    guide.advance(*_tokens("b"))
    assert guide.finished


def test_a_token_that_is_not_allowed_is_an_error(made: Grammars) -> None:
    guide = _guide(made, regex_grammar("a"))
    with pytest.raises(GrammarError, match="does not follow"):
        guide.advance(*_tokens("b"))


def test_white_space_in_json_is_bounded(made: Grammars) -> None:
    guide = _guide(made, schema_grammar({"type": "array", "items": {"type": "integer"}, "minItems": 1}))
    for token in _tokens("[ \n"):
        guide.advance(token)
    assert not _allowed(guide) & set(_tokens(" ") + _tokens("\n"))


def test_a_schema_cannot_weaken_itself() -> None:
    text = json.loads(schema_grammar({"type": "object", "x-guidance": {"lenient": True}}))
    assert "true" not in json.dumps(text).partition("lenient")[2][:12]
