"""Grammars that constrain an output, as routers check them and replicas follow them: llguidance's.

The text of a grammar is part of the contract (`Submit.grammar`): a Lark grammar, or llguidance's JSON that contains a
JSON Schema. See https://github.com/guidance-ai/llguidance for both.
"""

from collections.abc import Collection

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headrace_base.errors import HeadraceError, RustPanicError, panics_as_errors

MAX_REASON = 200  # characters
# A state of the lexer takes one or two KiB; a step's fuel lasts 7 ms. By default: 250,000 states, and twice the fuel.
_LIMITS = LLParserLimits(max_lexer_states=50_000, step_lexer_fuel=100_000, verbose_errors=False)


class GrammarError(HeadraceError):
    """A grammar, or a tokenizer, that no output can follow. The sentence quotes the grammar's beginning at most."""


def grammar_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """Takes half a second and 40 MiB for a vocabulary of 50,000. Raises GrammarError.

    vocab_size: the number of logits. eos_token_ids: allowed where an output may end.
    """
    if not eos_token_ids:
        raise GrammarError("the model has no token that ends an output")
    try:
        with panics_as_errors():
            return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
    except (ValueError, RuntimeError, RustPanicError) as error:
        raise GrammarError(f"the model's tokenizer cannot be constrained: {_reason(str(error))}") from error


def compile_grammar(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """The state before the first token; `deep_copy` it for each output. Raises GrammarError."""
    with panics_as_errors():
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise GrammarError(_reason(matcher.get_error()))
    return matcher


def _reason(error: str) -> str:
    """The first line, and of a pattern what is wrong with it; not how the library is told to approximate it."""
    lines = error.replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Use anyOf").splitlines()
    found = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return ": ".join([*(lines or [""])[:1], *found[:1]])[:MAX_REASON].strip().rstrip(":. ")
