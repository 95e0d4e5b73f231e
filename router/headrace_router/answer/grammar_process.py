"""Tries grammars in a process of its own: the library bounds neither time nor memory, and a thread cannot be stopped.

The process starts with the first grammar, is replaced when one takes too long, and ends with the router.
"""

import ctypes
import json
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from threading import Lock
from typing import IO

from llguidance.gbnf_to_lark import gbnf_to_lark

from headrace_proto.grammar import MAX_REASON, GrammarError, compile_grammar, grammar_tokenizer

START_SECONDS = 30.0  # for the tokenizer: some tenths on an idle machine
MEMORY_BYTES = 2 << 30
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
            return self._answer(grammar, self._seconds)

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
    tokenizer = None
    for line in questions:
        problem, question = "", json.loads(line)
        grammar = ""
        try:
            if tokenizer is None:
                tokenizer = grammar_tokenizer(*question)
            else:
                grammar = _without_gbnf(question)
                matcher = compile_grammar(tokenizer, grammar)
                if not any(matcher.compute_bitmask()) or matcher.is_error():
                    problem = "no answer can begin so that it follows this"
        except GrammarError as error:
            problem = str(error)
        answers.write(json.dumps([problem, grammar]).encode() + b"\n")
        answers.flush()


def _without_gbnf(grammar: str) -> str:
    """A grammar in GBNF's syntax as one in Lark's; others unchanged. Raises GrammarError."""
    if "::=" not in grammar:
        return grammar
    if grammar.startswith("{"):  # it is the constraint of several grammars
        whole = json.loads(grammar)
        for one in whole["grammars"]:
            if one.get("name") == "constraint" and one.get("lark_grammar"):
                one["lark_grammar"] = _without_gbnf(one["lark_grammar"])
        return json.dumps(whole)
    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # of the converter: several kinds of its own and of Python's
        raise GrammarError(f"it is not valid GBNF: {str(error)[:MAX_REASON]}") from error


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
