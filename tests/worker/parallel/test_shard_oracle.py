"""Whole models, and cases that `test_process_oracle.py` does not cover, generate the tokens of plain transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.ranks.families import FAMILIES, OTHER_CACHES, OTHER_RECURRENT, RECURRENT, WITH_IMAGES
from support.ranks.workloads import prompts


@pytest.mark.parametrize(
    "family",
    [
        *FAMILIES,
        *OTHER_CACHES,
        *RECURRENT,
        *OTHER_RECURRENT,
        "kimi_linear",
        "falcon_h1",
        "lfm3",
        *WITH_IMAGES,
        "gemma3n_text",
    ],
)
def test_tokens_of_one_rank(
    family: str,
    save_tiny: Callable[..., Path],
    sharded: Callable[..., Any],
    check_oracle: Callable[..., None],
) -> None:
    folder = save_tiny(family)
    replica = sharded(folder)
    alone = prompts(1, seed=1)
    check_oracle(folder, alone, replica.run(alone, 6))
    mixed = prompts(6)
    check_oracle(folder, mixed, replica.run(mixed, 6))


@pytest.mark.parametrize(
    ("family", "tp", "pp", "blocks"),
    [
        ("llama", 2, 2, 26),
        ("mistral", 4, 1, 16),
        ("gemma3_text", 2, 2, 26),
        ("gemma3n_text", 1, 1, 26),
        ("deepseek_v3", 2, 1, 26),
        ("gemma4_text", 2, 2, 26),
        ("gemma4_text-shared", 1, 1, 26),
        ("mimo_v2_flash", 1, 1, 26),
    ],
)
def test_tokens_after_preemption_and_from_a_cached_prefix(
    family: str,
    tp: int,
    pp: int,
    blocks: int,
    save_tiny: Callable[..., Path],
    sharded: Callable[..., Any],
    check_oracle: Callable[..., None],
) -> None:
    folder = save_tiny(family)
    groups = len(sharded(folder, tp, pp).models[0][0].layout.groups)
    replica = sharded(folder, tp, pp, num_blocks=1 + blocks * groups)
    short = [prompt[:2] for prompt in prompts(8, seed=4)]
    completions = replica.run(short, 40)
    assert sum(completion.preemptions for completion in completions) > 0
    check_oracle(folder, short, completions)
    stem = prompts(1, seed=5)[0] * 3
    replica.run([stem[:40]], 2)
    again = [stem[:36] + tail for tail in prompts(2, seed=6)]
    completions = replica.run(again, 6)
    assert all(completion.cached_tokens > 0 for completion in completions)
    check_oracle(folder, again, completions)


def test_recurrent_states_after_preemption(
    save_tiny: Callable[..., Path], sharded: Callable[..., Any], check_oracle: Callable[..., None]
) -> None:
    folder = save_tiny("qwen3_next")
    replica = sharded(folder, 2, 2, num_blocks=27, budget=12)
    short = [prompt[:2] for prompt in prompts(8, seed=4)]
    completions = replica.run(short, 40)
    assert sum(completion.preemptions for completion in completions) > 0
    check_oracle(folder, short, completions)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_a_window_bounds_the_cache(
    tp: int, pp: int, save_tiny: Callable[..., Path], sharded: Callable[..., Any], check_oracle: Callable[..., None]
) -> None:
    folder = save_tiny("mistral")  # a window of 9 tokens, blocks of 4
    replica = sharded(folder, tp, pp, budget=8)
    pool = replica.offline.assembly.kv.pool
    peak = 0

    def observe() -> None:
        nonlocal peak
        peak = max(peak, pool.used)

    completions = replica.run([list(range(3, 43))], 60, after_step=observe)
    check_oracle(folder, [list(range(3, 43))], completions)
    assert 3 <= peak <= 6  # window and chunk: 17 tokens; without the window 25 blocks
