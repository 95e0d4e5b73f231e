"""Compiles the grammars of requests off the step loop, and makes their guides."""

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from headrace_proto.grammar import GrammarError, compile_grammar, grammar_tokenizer
from headrace_worker.core.guide import Mask
from headrace_worker.server.description import Description

KEPT = 128  # compiled grammars; their states are copied for each output


class GrammarGuide:
    """A `TokenGuide` that follows a grammar. Raises GrammarError for a token that the grammar does not allow."""

    def __init__(self, matcher: LLMatcher, stop_mask: Mask) -> None:
        """matcher: of this output alone. stop_mask: the tokens that end an output."""
        self._matcher = matcher
        self._stop_mask = stop_mask
        self._mask: Mask | None = None

    def mask(self) -> Mask:
        if self._mask is None:
            mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(self._stop_mask)]
            self._check()
            self._mask = mask
        return self._mask

    def advance(self, token: int) -> None:
        self._mask = None
        self._matcher.consume_token(token)
        self._check()

    @property
    def finished(self) -> bool:
        if self._matcher.is_stopped():
            return True
        return self._matcher.is_accepting() and not np.any(self.mask() & ~self._stop_mask)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError("the output does not follow its grammar")


class Grammars:
    """The grammars that this replica has compiled, newest last. Of one event loop; a thread compiles."""

    def __init__(self, description: Description) -> None:
        self._description = description
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._stop_mask = np.zeros(-(-description.facts.vocab_size // 32), np.int32)
        for token in description.facts.eos_token_ids:
            self._stop_mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def known(self, text: str) -> GrammarGuide | None:
        """The guide of a grammar that is compiled already."""
        matcher = self._compiled.get(text)
        if matcher is None:
            return None
        self._compiled.move_to_end(text)
        return GrammarGuide(matcher.deep_copy(), self._stop_mask)

    async def compile(self, text: str) -> GrammarGuide:
        """Raises GrammarError."""
        matcher = await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, text)
        self._compiled[text] = matcher
        if len(self._compiled) > KEPT:
            self._compiled.popitem(last=False)
        guide = self.known(text)
        assert guide is not None
        return guide

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, text: str) -> LLMatcher:
        if self._tokenizer is None:
            facts = self._description.facts
            tokenizer_json = self._description.tokenizer_json.decode()
            self._tokenizer = grammar_tokenizer(tokenizer_json, facts.vocab_size, list(facts.eos_token_ids))
        return compile_grammar(self._tokenizer, text)
