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
# With Gated DeltaNet in three of four layers: with four layers and two stages the first stage has no attention.
_DELTA_RULE = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
RECURRENT: dict[str, dict[str, Any]] = {
    family: tiny_models.RECURRENT[family] | _DELTA_RULE | changes
    for family, changes in {
        "qwen3_next": {},
        "qwen3_5_text": {"num_hidden_layers": 8},
        "qwen3_5_moe_text": {"linear_num_key_heads": 2},
    }.items()
}
# Families with other kinds of recurrent layers, or other attention beside them, and the ranks and stages of a test.
OTHER_RECURRENT: dict[str, tuple[int, int]] = {
    "bamba": (2, 1),
    "granitemoehybrid": (2, 2),
    "jamba": (2, 2),
    "lara_mini": (2, 2),
    "lfm2": (2, 2),
    "lfm2_moe": (2, 2),
    "nemotron_h": (2, 2),
    "olmo_hybrid": (1, 2),
}
# Families that cache something else than keys and values of one size, and the ranks and stages of a test.
OTHER_CACHES: dict[str, tuple[int, int]] = {
    "deepseek_v3": (2, 2),
    "deepseek_v2": (2, 1),
    "glm4_moe_lite": (4, 1),
    "minicpm3": (2, 1),
    "youtu": (1, 2),
    "axk1": (2, 1),
    "deepseek_v32": (2, 2),
    "glm_moe_dsa": (2, 2),
    "axk2": (2, 1),
    "hy_v4": (2, 1),
    "llama4_text": (2, 1),
    "gemma4_text": (2, 2),
    "gemma4_text-shared": (2, 1),
    "gemma4_text-equal": (2, 1),
    "mimo_v2_flash": (4, 1),
}
# With activations that depend on all of a layer's, and two layers that attend to keys and values of earlier ones.
GEMMA3N: dict[str, Any] = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.9] * 3 + [0.0] * 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": TINY["vocab_size"],
    "laurel_rank": 8,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# Checkpoints with images: the config of the language model, and fields of the others.
WITH_IMAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {"model_type": "gemma3_text"} | tiny_models.FAMILIES["gemma3_text"],
        {"vision_config": _VISION, "mm_tokens_per_image": 4},
    ),
    "mistral3": (
        {"model_type": "mistral", "head_dim": 12, "sliding_window": None},
        {"vision_config": _VISION | {"model_type": "pixtral", "head_dim": 16}},
    ),
    "internvl": (
        {"model_type": "qwen2"},
        {"vision_config": _VISION | {"image_size": [28, 28], "patch_size": [14, 14]}},
    ),
    "qwen3_5": (
        {"model_type": "qwen3_5_text"} | tiny_models.RECURRENT["qwen3_5_text"],
        {
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_heads": 2,
                "out_hidden_size": 64,
            }
        },
    ),
    "minicpmv4_6": (
        {"model_type": "qwen3_5_text"} | tiny_models.RECURRENT["qwen3_5_text"],
        {"vision_config": _VISION | {"num_hidden_layers": 2}, "insert_layer_id": 0},
    ),
    "gemma4": (
        tiny_models.OTHER_CACHES["gemma4_text"],
        {
            "audio_config": None,
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
            },
        },
    ),
    "kimi_k25": (
        {"model_type": "deepseek_v3"} | tiny_models.OTHER_CACHES["deepseek_v3"],
        {
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            }
        },
    ),
    "llava_next": ({"model_type": "llama"}, {"vision_config": _VISION | {"model_type": "clip_vision_model"}}),
}


def tiny_options(family: str) -> dict[str, Any]:
    """The config of a tiny model of a family."""
    if family in WITH_IMAGES:
        text, others = WITH_IMAGES[family]
        return {"model_type": family, "text_config": TINY | text} | others
    others = {**tiny_models.RECURRENT, **tiny_models.OTHER_CACHES, **FAMILIES, **RECURRENT, "gemma3n_text": GEMMA3N}
    return {"model_type": family} | TINY | others.get(family, {})


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
