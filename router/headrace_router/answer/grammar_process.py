"""Tries grammars in a process of its own: the library bounds neither time nor memory, and a thread cannot be stopped.

The process starts with the first grammar, is replaced when one takes too long, and ends with the router.
"""

import ctypes
import json
import random
import re
import resource
import select
import signal
import string
import subprocess
import sys
import time
from collections.abc import Sequence
from threading import Lock
from typing import IO

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from headrace_proto.grammar import MAX_REASON, GrammarError, compile_grammar, grammar_tokenizer
from headrace_router.answer.schema_check import checked_schema

START_SECONDS = 30.0  # for the tokenizer: some tenths on an idle machine
MEMORY_BYTES = 2 << 30
WALKS = 8
WALK_STEPS = 48
WALK_PART = 0.5  # share of a grammar's time after which no step is made
TOO_LONG = "it takes too long to compile; simplify it"
_PR_SET_PDEATHSIG = 1


class GrammarProcess:
    """The process of one model's tokenizer. Safe to use from several threads; it tries one grammar at a time."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int], seconds: float) -> None:
        """seconds: for one grammar."""
        self._settings = [tokenizer_json, vocab_size, list(eos_token_ids)]
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def check(self, grammar: str) -> tuple[str, str]:
        """Why no answer can follow the grammar, empty if one can, and the grammar without GBNF."""
        with self._lock:
            if self._process is None:
                self._process = self._start()
                problem, _ = self._answer(self._settings, START_SECONDS)
                if problem:
                    return problem, ""
            return self._answer([grammar, self._seconds], self._seconds)

    def close(self) -> None:
        """Ends the process; the next grammar would start another one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "headrace_router.answer.grammar_process"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)

    def _answer(self, question: object, seconds: float) -> tuple[str, str]:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], seconds)
            line = self._process.stdout.readline() if ready else b""
        except OSError:
            line, ready = b"", [self._process.stdout]
        if not line:  # it runs on, or a library ended it
            self.close()
            return ("it takes too much memory to compile; simplify it" if ready else TOO_LONG), ""
        problem, grammar = json.loads(line)
        return problem, grammar


def serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    """The process: first the tokenizer, then grammars, a line each; answers a problem, or none, and the grammar."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    trial: Trial | None = None
    for line in questions:
        problem, question = "", json.loads(line)
        grammar = ""
        try:
            if trial is None:
                trial = Trial(grammar_tokenizer(*question))
            else:
                grammar = trial.run(*question)
        except GrammarError as error:
            problem = str(error)
        answers.write(json.dumps([problem, grammar]).encode() + b"\n")
        answers.flush()


class Trial:
    """Tries grammars with one tokenizer."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        # Tokens of one character, by kind: each punctuation mark is one, and so are all letters, and all digits.
        self._kinds: list[list[int]] = []
        for letters in (string.ascii_letters, string.digits, " \n", *string.punctuation):
            tokens = (tokenizer.tokenize_str(letter) for letter in letters)
            self._kinds.append([found[0] for found in tokens if len(found) == 1])

    def run(self, grammar: str, seconds: float) -> str:
        """What replicas get for a grammar, which has no GBNF. Raises GrammarError if answers cannot follow it."""
        until = time.monotonic() + seconds * WALK_PART
        grammar = self._prepared(grammar)
        matcher = compile_grammar(self._tokenizer, grammar)
        if not any(matcher.compute_bitmask()) or matcher.is_error():
            raise GrammarError("no answer can begin so that it follows this")
        self._walk(matcher, until)
        return grammar

    def _prepared(self, grammar: str) -> str:
        """With its schemas checked, and GBNF as Lark. Raises GrammarError."""
        if not grammar.startswith("{"):
            return self._with_checked_schemas(_without_gbnf(grammar))
        whole = json.loads(grammar)  # several grammars
        for one in whole["grammars"]:
            if isinstance(one.get("json_schema"), dict):
                one["json_schema"] = checked_schema(one["json_schema"], self._tokenizer)
            elif one.get("lark_grammar"):
                lark = _without_gbnf(one["lark_grammar"]) if one.get("name") == "constraint" else one["lark_grammar"]
                one["lark_grammar"] = self._with_checked_schemas(lark)
        return json.dumps(whole)

    def _with_checked_schemas(self, lark: str) -> str:
        """A grammar in Lark's syntax with its schemas checked. Raises GrammarError."""
        found, place = "", 0
        for start in (match.end() for match in re.finditer(r"%json\s*(?=\{)", lark)):
            try:
                schema, end = json.JSONDecoder().raw_decode(lark, start)
            except (ValueError, RecursionError):
                continue  # the library refuses it, unless it is in a text
            if start >= place:
                found += lark[place:start] + json.dumps(checked_schema(schema, self._tokenizer))
                place = end
        return found + lark[place:]

    def _walk(self, matcher: LLMatcher, until: float) -> None:
        """Some answers, at random, until they end or are long. Raises GrammarError where nothing may follow."""
        chance = random.Random(0)
        for _ in range(WALKS):
            walk = matcher.deep_copy()
            for _ in range(WALK_STEPS):
                mask = walk.compute_bitmask()
                if walk.is_error():
                    raise GrammarError("an answer that follows this can come to where nothing may follow")
                if walk.is_stopped() or time.monotonic() > until:
                    break
                kinds = [
                    found for kind in self._kinds if (found := [one for one in kind if mask[one >> 3] >> one % 8 & 1])
                ]
                if not kinds:
                    kinds = [np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()]
                token = chance.choice(chance.choice(kinds))
                walk.consume_tokens([token] if len(kinds) > 1 else walk.compute_ff_tokens() or [token])


def _without_gbnf(grammar: str) -> str:
    """A grammar in GBNF's syntax as one in Lark's; others unchanged. Raises GrammarError."""
    if "::=" not in grammar:
        return grammar
    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # the converter raises several kinds of its own and of Python's
        raise GrammarError(f"it is not valid GBNF: {str(error)[:MAX_REASON]}") from error


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
