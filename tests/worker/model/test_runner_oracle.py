"""Greedy tokens of the runner equal plain transformers' generate, whatever the shape of the steps."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace_worker.model.load import LoadedModel

FAMILIES = [
    "llama",
    "llama-bias",
    "qwen2",
    "qwen3",
    "mistral",
    "mistral-full",
    "gemma2",
    "gemma3_text",
    "phi3",
    "granite",
]


def prompts_of(lengths: list[int]) -> dict[int, list[int]]:
    random = Random(5)
    return {2 * n + 1: [random.randrange(3, 300) for _ in range(length)] for n, length in enumerate(lengths)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [10_000, 5])
def test_tokens_equal_transformers(
    family: str,
    chunk: int,
    load_tiny: Callable[..., LoadedModel],
    tiny: Callable[[str], Path],
    oracle: Callable[..., list[int]],
    driver: Callable[..., Any],
) -> None:
    model = load_tiny(family)
    prompts = prompts_of([1, 4, 7, 8, 23, 41])
    found = driver(model).generate(prompts, count=12, chunk=chunk)
    for row, prompt in prompts.items():
        assert found[row] == oracle(tiny(family), prompt, 12), f"prompt of {len(prompt)} tokens"


def test_rows_join_and_leave_a_running_batch(
    load_tiny: Callable[..., LoadedModel], tiny: Callable[[str], Path], oracle: Callable[..., list[int]], driver: Any
) -> None:
    bench = driver(load_tiny("qwen3"))
    prompts = prompts_of([6, 9, 3, 30])
    rows = list(prompts)
    bench.step({rows[0]: 100}, [bench.init(rows[0], prompts[rows[0]])])
    bench.step({rows[0]: 1, rows[1]: 4}, [bench.init(rows[1], prompts[rows[1]])])
    bench.step({rows[1]: 100, rows[0]: 1})
    first = bench.tokens[rows[0]][len(prompts[rows[0]]) :]
    # The row is reassigned in a step in which others decode.
    again = bench.init(rows[0], prompts[rows[3]])
    bench.step({rows[1]: 1, rows[0]: 100}, [again], frees=[rows[0]])
    for _ in range(5):
        bench.step({rows[0]: 1, rows[1]: 1})
    assert first == oracle(tiny("qwen3"), prompts[rows[0]], 3)
    assert bench.tokens[rows[0]][30:] == oracle(tiny("qwen3"), prompts[rows[3]], 6)
    assert bench.tokens[rows[1]][9:] == oracle(tiny("qwen3"), prompts[rows[1]], 7)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bfloat16_stays_close(
    family: str, load_tiny: Callable[..., LoadedModel], tiny: Callable[[str], Path], oracle: Any, driver: Any
) -> None:
    """In 16 bits single tokens may differ; most of a short greedy run does not."""
    prompts = prompts_of([9, 17])
    found = driver(load_tiny(family, dtype="bfloat16")).generate(prompts, count=3)
    same = sum(
        a == b for row in prompts for a, b in zip(found[row], oracle(tiny(family), prompts[row], 3), strict=True)
    )
    assert same >= 4
