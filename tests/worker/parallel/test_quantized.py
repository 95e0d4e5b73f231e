"""Quantized checkpoints generate the tokens of plain transformers on their dense twins, whole and split."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.ranks.workloads import prompts
from support.worker.quantized import FORMATS, INTEGER_FORMATS, save_quantized


@pytest.mark.parametrize(
    ("family", "kind", "tp", "pp", "ep"),
    [
        *(("llama", kind, 1, 1, False) for kind in FORMATS),
        ("llama", "fp8-block", 2, 2, False),
        ("qwen3_moe", "fp8-block", 1, 1, False),
        ("qwen3_moe", "fp8-block", 2, 2, False),
        ("qwen3_moe", "fp8-block", 2, 1, True),
        ("qwen3_moe", "compressed-tensors", 2, 1, False),
        ("deepseek_v3", "fp8-block", 2, 1, False),
        *(("llama", kind, 1, 1, False) for kind in INTEGER_FORMATS),
        ("llama", "awq", 2, 2, False),
        ("llama", "gptq-act-order", 2, 1, False),
        ("llama", "int4-zero", 2, 1, False),
        ("qwen3_moe", "awq", 2, 1, True),
        ("qwen3_moe", "int4", 2, 1, False),
    ],
)
def test_tokens(
    family: str,
    kind: str,
    tp: int,
    pp: int,
    ep: bool,
    save_tiny: Callable[..., Path],
    sharded: Callable[..., Any],
    check_oracle: Callable[..., None],
    tmp_path: Path,
) -> None:
    twin = save_quantized(save_tiny(family), tmp_path, kind)
    replica = sharded(tmp_path / "quantized", tp, pp, **{"ep": True} if ep else {})
    mixed = prompts(5)
    check_oracle(twin, mixed, replica.run(mixed, 6))
