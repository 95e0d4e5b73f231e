"""Tiny random models of each family, saved by transformers, and the config of a replica for them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

from headrace_worker.core.config import ReplicaConfig
from headrace_worker.model.gguf_tokenizer import byte_tokenizer

TINY: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama-bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-16": {"model_type": "llama", "head_dim": 16},  # heads of a size that the C++ kernels take
    "llama-bias-16": {"model_type": "llama", "head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "qwen2-16": {"model_type": "qwen2", "hidden_size": 64},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 9, "head_dim": 12},
    "phi3-16": {"model_type": "phi3", "sliding_window": None, "hidden_size": 64},
    "granite-16": {"model_type": "granite", "residual_multiplier": 0.5, "hidden_size": 64},
    "mistral-16": {"model_type": "mistral", "sliding_window": 9, "head_dim": 16},
    "gemma2": {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16},
    "gemma3_text": {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16},
    "phi3": {"sliding_window": None},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
}


_LATENT: dict[str, Any] = {
    "hidden_size": 64,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,  # with the rotary key a size that the C++ kernels take
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "v_head_dim": 12,
}
_DEEPSEEK_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_INDEXER: dict[str, Any] = {"index_topk": 24, "index_head_dim": 32, "index_n_heads": 16}
_GEMMA_4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 8,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 7,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 320,
}
# With latents instead of keys and values, sizes that differ between layers, or between keys and values.
OTHER_CACHES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_LATENT, **_DEEPSEEK_EXPERTS},
    "deepseek_v2": {**_LATENT, **_DEEPSEEK_EXPERTS, "q_lora_rank": None, "topk_method": "greedy"},
    "glm4_moe_lite": {**_LATENT, **_DEEPSEEK_EXPERTS},
    "minicpm3": {**_LATENT, "qk_rope_head_dim": 8},
    "youtu": _LATENT,
    "axk1": {**_LATENT, **_DEEPSEEK_EXPERTS},
    "deepseek_v32": {**_LATENT, **_DEEPSEEK_EXPERTS, **_INDEXER},
    "glm_moe_dsa": {**_LATENT, **_DEEPSEEK_EXPERTS, **_INDEXER, "indexer_types": ["full", "shared", "full"]},
    "axk2": {**_LATENT, **_DEEPSEEK_EXPERTS, **_INDEXER},
    "hy_v4": {**_LATENT, **_DEEPSEEK_EXPERTS, **_INDEXER, "indexer_types": ["full", "shared", "full"]},
    "llama4_text": {
        "hidden_size": 64,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 256,
        "floor_scale": 257,
    },
    "gemma4_text": _GEMMA_4,  # two layers with a window in the place of one without
    "gemma4_text-shared": {**_GEMMA_4, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 3},
    "gemma4_text-equal": {**_GEMMA_4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},  # their values
    "mimo_v2_flash": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "v_head_dim": 16,
        "num_key_value_heads": 1,  # twice as many with a window
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}


_DELTA_RULE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "head_dim": 16,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_ODD: dict[str, Any] = {
    "hidden_size": 52,
    "intermediate_size": 100,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 28,
    "linear_value_head_dim": 52,
}
_FOUR_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
_MAMBA_2: dict[str, Any] = {
    "hidden_size": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
RECURRENT: dict[str, dict[str, Any]] = {
    "kimi_linear": {
        **_LATENT,
        **_DEEPSEEK_EXPERTS,
        "num_hidden_layers": 4,
        "q_lora_rank": None,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "bailing_hybrid": {
        **_LATENT,
        "num_hidden_layers": 4,
        "q_lora_rank": None,
        "head_dim": 16,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    },
    "qwen3_next": {**_DELTA_RULE, **_FOUR_EXPERTS},
    "qwen3_5_text": {**_DELTA_RULE, "rope_parameters": _ROPE},
    # Sizes of no whole vectors: torch's activations differ in their last bits between the body and the rest of a row.
    "qwen3_5_text-odd": {**_DELTA_RULE, "model_type": "qwen3_5_text", "rope_parameters": _ROPE, **_ODD},
    "qwen3_5_moe_text": {**_DELTA_RULE, **_FOUR_EXPERTS, "rope_parameters": _ROPE},
    "olmo_hybrid": {**_DELTA_RULE, "layer_types": ["linear_attention", "full_attention"] * 2},
    "lara_mini": {
        **_DELTA_RULE,
        **_FOUR_EXPERTS,
        "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
        "sliding_window": 9,
    },
    "bamba": {**_MAMBA_2, "attn_layer_indices": [1], "mamba_n_groups": 1},
    "granitemoehybrid": {
        **_MAMBA_2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
    },
    "falcon_h1": {
        **_MAMBA_2,
        "mamba_d_ssm": 128,
        "mamba_rms_norm": True,
        "ssm_multipliers": [0.5, 1.5, 1.0, 0.75, 1.25],
    },
    "nemotron_h": {
        "hidden_size": 64,
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "head_dim": 16,
    },
    "jamba": {"hidden_size": 64, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16, "num_experts": 1},
    "lfm2": {"hidden_size": 64, "layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {
        "hidden_size": 64,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
    },
    "lfm3": {
        "hidden_size": 64,
        "num_attention_heads": 16,
        "head_dim": 16,
        "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
        "num_hidden_layers": 4,
        "sliding_window": 9,
    },
}
_IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_NEMOTRON_EXPERTS: dict[str, Any] = {
    "layers_block_type": ["mamba", "moe", "attention", "mamba"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
# Checkpoints with images whose language model keeps recurrent state: its config, and other fields.
RECURRENT_WITH_IMAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lfm2_vl": (
        {"model_type": "lfm2"} | TINY | RECURRENT["lfm2"],
        {"vision_config": _IMAGES | {"model_type": "siglip2_vision_model"}},
    ),
    "nemotron_h_omni": (
        {"model_type": "nemotron_h"} | TINY | RECURRENT["nemotron_h"] | _NEMOTRON_EXPERTS,
        {"vision_config": _IMAGES | {"video_temporal_patch_size": 2}},
    ),
}


def save_tiny(family: str, folder: Path) -> Path:
    """Saves a tiny random model of a family."""
    if family in RECURRENT_WITH_IMAGES:
        text, others = RECURRENT_WITH_IMAGES[family]
        return save_random({"model_type": family, "text_config": text} | others, folder)
    return save_random({"model_type": family} | TINY | {**FAMILIES, **OTHER_CACHES, **RECURRENT}[family], folder)


def save_random(options: dict[str, Any], folder: Path) -> Path:
    """Saves a random model with these fields of its config, and a byte-level tokenizer of 300 tokens.

    Norms, biases and sinks are not neutral.
    """
    config = AutoConfig.for_model(**options)
    torch.manual_seed(11)
    model = auto_class(config).from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("bias", "sinks")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(300)).save_pretrained(folder)
    return folder


def auto_class(config: Any) -> Any:
    """Plain transformers' class for a config: that of the whole checkpoint where there are images, too."""
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def replica_config(source: object, **options: Any) -> ReplicaConfig:
    """A replica config for a source; float32 on the CPU.

    Tiny models use one thread: on a busy machine two threads wait for each other longer than they compute.
    """
    threads = None if source == "smollm2" else 1
    fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": 4, "cpu_threads": threads}
    fields |= {"replica_id": "r", "model": "m", "source": str(source)}
    return ReplicaConfig(**fields | options)
