"""Keys and values of 8 bits: the tokens of plain transformers whose keys and values are rounded alike."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_base.errors import ModelUnsupportedError
from headrace_worker.accuracy import RoundedCache
from headrace_worker.runner.pools import KVPools
from support.ranks.workloads import prompts

BOUND = 0.02


@pytest.mark.parametrize(
    ("family", "name", "tp", "pp", "blocks"),
    [
        ("llama", "fp8", 1, 1, 400),
        ("llama", "int8", 2, 2, 400),
        ("llama", "fp8", 2, 1, 24),  # requests are preempted
        ("gemma2", "fp8", 2, 1, 400),
        ("gpt_oss", "int8", 1, 1, 400),
        ("qwen3_5_text", "fp8", 1, 2, 400),
    ],
)
def test_tokens(
    family: str,
    name: str,
    tp: int,
    pp: int,
    blocks: int,
    save_tiny: Callable[..., Path],
    sharded: Callable[..., Any],
    check_oracle: Callable[..., None],
) -> None:
    folder = save_tiny(family)
    replica = sharded(folder, tp, pp, num_blocks=blocks, kv_cache_dtype=name)
    model = replica.models[0][0]
    assert model.kv_dtype_name == name
    mixed = prompts(6)
    rounded = partial(RoundedCache, name=name)
    done = replica.run(mixed, 6)
    check_oracle(folder, mixed, done, rounded, BOUND)
    assert any(one.preemptions for one in done) is (blocks < 400)
    again = replica.run(mixed, 6)
    check_oracle(folder, mixed, again, rounded, BOUND)
    assert any(one.cached_tokens for one in again) or blocks < 400 or model.layout.states


def test_a_block_has_its_scales(save_tiny: Callable[..., Path], load_ranks: Callable[..., Any]) -> None:
    folder = save_tiny("llama")
    ((plain,),), ((small,),) = load_ranks(folder, 1, 1), load_ranks(folder, 1, 1, kv_cache_dtype="fp8")
    group = plain.layout.groups[0]
    assert plain.layout.block_bytes * (group.head_dim + 4) == small.layout.block_bytes * group.head_dim * 4
    pools = KVPools.of(small, 3)
    assert sum(tensor.nbytes for tensor in pools.tensors) == 3 * small.layout.block_bytes
    cache = pools.layers[0]
    assert cache.pool is not None and cache.kv_scale is not None
    cache.pool.view(torch.uint8)[1, 2, 0] = 7
    cache.kv_scale[1, 2, 0] = 1.0
    values = cache.memory[1][2].view(small.layout.block_size * group.num_kv_heads, -1)
    assert int((values != 0).sum()) == small.layout.block_size * (
        group.head_dim + 2
    )  # 1.0 has two bytes that are not 0
    assert not cache.memory[0].any() and not cache.memory[1][:2].any()


@pytest.mark.parametrize("family", ["deepseek_v3", "mimo_v2_flash"])
def test_what_has_no_such_cache(family: str, save_tiny: Callable[..., Path], load_ranks: Callable[..., Any]) -> None:
    with pytest.raises(ModelUnsupportedError, match="--kv-cache-dtype is for keys and values of equal sizes"):
        load_ranks(save_tiny(family), 1, 1, kv_cache_dtype="fp8")
