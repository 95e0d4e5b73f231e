"""Ranks as processes, as in production: every family at every split gives the tokens of plain transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_shard_oracle import FAMILIES, MOE, prompts

SPLITS = ((2, 1), (4, 1), (1, 2), (2, 2), (4, 2))


@pytest.mark.parametrize(("tp", "pp"), SPLITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_between_processes(
    family: str,
    tp: int,
    pp: int,
    save_tiny: Callable[..., Path],
    process_replica: Callable[..., Any],
    check_oracle: Callable[..., None],
) -> None:
    folder = save_tiny(family)
    with process_replica(folder, tp, pp, ep=family in MOE and tp == 2) as replica:
        alone = prompts(1, seed=1)
        check_oracle(folder, alone, replica.run(alone, 6))
        mixed = prompts(6)
        check_oracle(folder, mixed, replica.run(mixed, 6))
