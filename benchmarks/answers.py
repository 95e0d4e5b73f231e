"""Answers of the embedded model with its default options: whether they are correct, stop by themselves, or loop.

    python benchmarks/answers.py [--seeds 100] [--others 1] [--defaults '{"temperature": 0.2}'] [--save]

The README's questions are run with many seeds; the others, of which many have no correct answer, with `--others` seeds.
An answer that loops repeats a sequence of tokens at least four times in a row.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import machine
from tokenizers import Tokenizer

from headrace_router.text.chat_template import ChatTemplate
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.plan import RowSampling
from headrace_worker.core.request import Finish
from headrace_worker.offline import Completion, OfflineEngine, Prompt

PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
# The README's questions: words, and how many of them a correct answer contains at least.
QUESTIONS: dict[str, tuple[tuple[str, ...], int]] = {
    "What is the capital of France?": (("Paris",), 1),
    "Name three planets.": (PLANETS, 3),
}
OTHER_QUESTIONS = (
    "Hello",
    "Who are you?",
    "What can you do?",
    "Tell me a joke.",
    "Tell me a story.",
    "Write a short poem about rain.",
    "Write a haiku.",
    "Write a limerick about a cat.",
    "What is 2 + 2?",
    "Count from one to ten.",
    "Why is the sky blue?",
    "What is the largest ocean?",
    "What is water made of?",
    "What is the speed of light?",
    "How many legs does a spider have?",
    "Is a tomato a fruit?",
    "What is the capital of Japan?",
    "Name three rivers.",
    "Name three colours.",
    "List the days of the week.",
    "Who wrote Hamlet?",
    "Summarize the plot of Romeo and Juliet.",
    "Translate 'good morning' into French.",
    "How do I boil an egg?",
    "Give me five ideas for dinner.",
    "What is machine learning?",
    "Explain recursion.",
    "Explain what a GPU is in two sentences.",
    "Write a Python function that adds two numbers.",
)
LOOP_TIMES = 4
LOOP_TOKENS = 8  # minimum length of a loop: "ha ha ha ha" is none
ROWS = 64  # requests that run at a time


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: its text, its length in tokens, and how it ended."""

    text: str
    tokens: int
    stopped: bool  # by itself, before max_tokens
    loops: bool


class EmbeddedModel:
    """The embedded model with prompts as in `headrace chat` and the default of every option."""

    def __init__(self, defaults: dict[str, int | float]) -> None:
        config = ReplicaConfig(
            replica_id="answers",
            model="smollm2",
            source="smollm2",
            kv_cache_memory=1 << 30,
            max_num_seqs=ROWS,
            defaults=defaults,
        )
        self._engine = OfflineEngine(config)
        facts = self._engine.assembly.model.facts
        self.defaults = facts.defaults
        self._template = ChatTemplate(facts.chat_template, facts.special_tokens)
        self._tokenizer = Tokenizer.from_str(facts.tokenizer_json.decode())

    def ask(self, questions: Sequence[str], seeds: Sequence[int]) -> list[Answer]:
        """The answers to the questions, each with its seed."""
        sampling = {name: value for name, value in self.defaults.items() if name != "max_tokens"}
        longest = int(self.defaults.get("max_tokens", 1024))
        prompts = [
            Prompt(self._encode(question), longest, RowSampling(seed=seed, **sampling))  # type: ignore[arg-type]
            for question, seed in zip(questions, seeds, strict=True)
        ]
        return [self._answer(completion) for completion in self._engine.generate(prompts)]

    def _encode(self, question: str) -> list[int]:
        text = self._template.render([{"role": "user", "content": question}], datetime.now())
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _answer(self, completion: Completion) -> Answer:
        ids = completion.token_ids
        return Answer(self._tokenizer.decode(ids), len(ids), completion.finish is Finish.STOP, loops(ids))


def loops(token_ids: Sequence[int]) -> bool:
    """Whether a sequence of tokens repeats LOOP_TIMES in a row, over LOOP_TOKENS or more."""
    for period in range(1, len(token_ids) // LOOP_TIMES + 1):
        needed = max(period * LOOP_TIMES, LOOP_TOKENS) - period
        equal = 0
        for position in range(period, len(token_ids)):
            equal = equal + 1 if token_ids[position] == token_ids[position - period] else 0
            if equal >= needed:
                return True
    return False


def right(question: str, text: str) -> bool:
    """Whether an answer to one of the README's questions is correct."""
    words, count = QUESTIONS[question]
    return sum(word in text for word in words) >= count


def summary(answers: Sequence[Answer]) -> dict[str, int]:
    """Counts of many answers."""
    return {
        "answers": len(answers),
        "stopped": sum(answer.stopped for answer in answers),
        "loops": sum(answer.loops for answer in answers),
        "distinct": len({answer.text for answer in answers}),
        "median_tokens": sorted(answer.tokens for answer in answers)[len(answers) // 2],
        "longest_tokens": max(answer.tokens for answer in answers),
    }


def measure(model: EmbeddedModel, seeds: int, others: int) -> dict[str, dict[str, Any]]:
    """The table: one row per question of the README, and one for all others."""
    table: dict[str, dict[str, Any]] = {}
    for question in QUESTIONS:
        answers = model.ask([question] * seeds, range(seeds))
        table[question] = {"right": sum(right(question, answer.text) for answer in answers)} | summary(answers)
    if others:
        asked = [question for question in OTHER_QUESTIONS for _ in range(others)]
        table["other questions"] = summary(model.ask(asked, range(len(asked))))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--others", type=int, default=1, help="seeds of each other question; 0 = skip them")
    parser.add_argument("--defaults", type=json.loads, default={}, help="JSON that changes the model's defaults")
    parser.add_argument("--save", action="store_true", help="append to results/answers.jsonl")
    arguments = parser.parse_args()
    model = EmbeddedModel(arguments.defaults)
    print("defaults", json.dumps(model.defaults), flush=True)
    table = measure(model, arguments.seeds, arguments.others)
    for question, row in table.items():
        print(f"{question:32s} {json.dumps(row)}")
    if arguments.save:
        print(machine.save("answers", {"defaults": model.defaults, "questions": table}))


if __name__ == "__main__":
    main()
