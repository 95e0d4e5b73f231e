"""Ranks as processes, as in production: every family with every split generates the tokens of plain transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.ranks.families import FAMILIES, MOE, OTHER_CACHES, OTHER_RECURRENT, RECURRENT
from support.ranks.workloads import prompts

SPLITS = ((2, 1), (4, 1), (1, 2), (2, 2), (4, 2))
# In the fast tests: grouped heads, windows beside full attention, and experts with sinks. CI runs every family.


# A checkpoint with images, of which each rank reads its part of the language model; an MLP that is not split.
@pytest.mark.parametrize(
    ("family", "tp", "pp"),
    [
        *((family, *split) for family in FAMILIES for split in SPLITS),
        ("qwen3_next", 2, 1),
        ("qwen3_next", 2, 2),
        ("qwen3_5_text", 1, 2),
        ("qwen3_5_text", 2, 2),
        ("qwen3_5_moe_text", 2, 1),
        *((family, *split) for family, split in {**OTHER_RECURRENT, **OTHER_CACHES}.items()),
        ("gemma3", 2, 2),
        ("gemma3n_text", 2, 1),
    ],
)
def test_tokens_between_processes(
    family: str,
    tp: int,
    pp: int,
    save_tiny: Callable[..., Path],
    process_replica: Callable[..., Any],
    check_oracle: Callable[..., None],
) -> None:
    folder = save_tiny(family)
    with process_replica(folder, tp, pp) as replica:
        alone = prompts(1, seed=1)
        check_oracle(folder, alone, replica.run(alone, 6))
        mixed = prompts(6)
        check_oracle(folder, mixed, replica.run(mixed, 6))
        if family in (*RECURRENT, *OTHER_RECURRENT):
            again = replica.run(mixed, 6)
            check_oracle(folder, mixed, again)
            assert any(completion.cached_tokens for completion in again)


@pytest.mark.parametrize(
    ("family", "tp", "pp"),
    [*((family, *split) for family in MOE for split in ((2, 1), (4, 1), (2, 2))), ("qwen3_next", 2, 2)],
)
def test_whole_experts_per_process(
    family: str,
    tp: int,
    pp: int,
    save_tiny: Callable[..., Path],
    process_replica: Callable[..., Any],
    check_oracle: Callable[..., None],
) -> None:
    folder = save_tiny(family)
    with process_replica(folder, tp, pp, ep=True) as replica:
        mixed = prompts(6, seed=2)
        check_oracle(folder, mixed, replica.run(mixed, 6))


@pytest.mark.parametrize("kinds", [("full", "linear"), ("linear", "full")])
def test_ranks_agree_on_the_number_of_states(
    kinds: tuple[str, ...],
    save_tiny: Callable[..., Path],
    process_replica: Callable[..., Any],
    load_ranks: Callable[..., Any],
    check_oracle: Callable[..., None],
) -> None:
    """A stage may have no recurrent layers, or only such: the rank with the least memory limits the requests."""
    layer_types = [f"{kind}_attention" for kind in kinds]
    folder = save_tiny("qwen3_5_text", layer_types=layer_types, num_hidden_layers=len(kinds))
    slot = max(rank.layout.state_bytes for (rank,) in load_ranks(folder, 1, 2))
    with process_replica(folder, 1, 2, kv_cache_memory=2 * 19 * slot) as replica:
        mixed = prompts(6)
        check_oracle(folder, mixed, replica.run(mixed, 6))
        check_oracle(folder, mixed, replica.run(mixed, 6))
        size = replica.offline.assembly.size
        assert (size.max_num_seqs, size.state_slots) == (3, 19) and "19 recurrent states" in size.note


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (1, 2), (2, 2)])
def test_the_real_model_between_processes(
    tp: int, pp: int, process_replica: Callable[..., Any], check_oracle: Callable[..., None]
) -> None:
    """SmolLM2 has nine heads over three KV heads: two ranks hold two and one of them."""
    with process_replica("smollm2", tp, pp, kv_cache_memory=32 << 20, max_num_batched_tokens=128) as replica:
        mixed = prompts(4, seed=3)
        check_oracle("smollm2", mixed, replica.run(mixed, 8))
