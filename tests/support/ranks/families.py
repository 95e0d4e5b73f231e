"""Tiny models whose parts are computed by several ranks, and sizes of small replicas for them."""

from typing import Any

from support.worker import tiny_models

TINY: dict[str, Any] = tiny_models.TINY | {"vocab_size": 317}  # no multiple of any tp
_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}


FAMILIES: dict[str, dict[str, Any]] = {
    **tiny_models.FAMILIES,
    "gpt_neox": {"num_key_value_heads": None},
    "glm4": {"head_dim": 16},
    "cohere2": {"sliding_window": 7, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 7, **_EXPERTS},
    "mixtral": {"num_local_experts": 4, **_EXPERTS},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, **_EXPERTS},
}
MOE = ("gpt_oss", "mixtral", "qwen3_moe")


SMALL: dict[str, Any] = {
    "kv_cache_memory": 8 << 20,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 48,
    "max_model_len": 128,
    "cpu_threads": 1,
}
# A pool of blocks of four tokens: fewer than eight requests need, enough for the longest one.
SMALL_POOL_BLOCKS = 36
LLAMA_BLOCK_BYTES = 3 * 2 * 2 * 4 * 12 * 4  # layers, keys and values, heads, tokens, dimension, float32
