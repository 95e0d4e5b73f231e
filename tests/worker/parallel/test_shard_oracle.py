"""Every family at every split gives the tokens of plain transformers (fp32, greedy)."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

FAMILIES = (
    "llama",
    "llama-bias",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "granite",
    "phi3",
    "gpt_oss",
    "mixtral",
    "qwen3_moe",
)
SPLITS = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2))
MOE = ("gpt_oss", "mixtral", "qwen3_moe")


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(3, 300) for _ in range(random.randrange(1, 40))] for _ in range(count)]


@pytest.mark.parametrize(("tp", "pp"), SPLITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens(
    family: str,
    tp: int,
    pp: int,
    save_tiny: Callable[..., Path],
    sharded: Callable[..., Any],
    check_oracle: Callable[..., None],
) -> None:
    folder = save_tiny(family)
    replica = sharded(folder, tp, pp)
    alone = prompts(1, seed=1)
    check_oracle(folder, alone, replica.run(alone, 6))
    mixed = prompts(6)
    check_oracle(folder, mixed, replica.run(mixed, 6))


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("family", MOE)
def test_tokens_with_whole_experts_per_rank(
    family: str,
    tp: int,
    pp: int,
    save_tiny: Callable[..., Path],
    sharded: Callable[..., Any],
    check_oracle: Callable[..., None],
) -> None:
    folder = save_tiny(family)
    replica = sharded(folder, tp, pp, ep=True)
    mixed = prompts(6, seed=2)
    check_oracle(folder, mixed, replica.run(mixed, 6))
