"""Sizes of small replicas."""

from typing import Any

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
