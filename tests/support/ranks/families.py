"""Tiny models whose parts are computed by several ranks: sizes that no split divides evenly, and experts."""

from typing import Any

TINY: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 317,  # no multiple of any tp
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama-bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 9, "head_dim": 12},
    "gemma2": {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16},
    "gemma3_text": {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "phi3": {"sliding_window": None},
    "gpt_neox": {"num_key_value_heads": None},
    "glm4": {"head_dim": 16},
    "cohere2": {"sliding_window": 7, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 7, **_EXPERTS},
    "mixtral": {"num_local_experts": 4, **_EXPERTS},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, **_EXPERTS},
}
MOE = ("gpt_oss", "mixtral", "qwen3_moe")
