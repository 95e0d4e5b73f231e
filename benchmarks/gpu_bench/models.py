"""Configs of real models, for random weights: speed depends on shapes, not on the values of weights.

Facts from the models' published config.json: Qwen/Qwen3-0.6B, meta-llama/Llama-3.1-8B, Qwen/Qwen3.5-9B (its language
model), deepseek-ai/DeepSeek-V2-Lite.
"""

import json
from pathlib import Path
from typing import Any

QWEN3_06B: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
QWEN35_9B: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 248044,
    "eos_token_id": 248044,
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "topk_method": "greedy",
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}
TINY: dict[str, Any] = QWEN3_06B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "qwen3-0.6b": QWEN3_06B,
    "llama-8b": LLAMA_8B,
    "qwen3.5-9b": QWEN35_9B,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "tiny": TINY,
    "llama-8b-fp8": LLAMA_8B,
    "llama-8b-fp8-cache": LLAMA_8B,
    "llama-8b-int4": LLAMA_8B,
    "tiny-fp8": TINY,
    "tiny-int4": TINY,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "llama-8b-fp8": {"quantization": "fp8"},
    "llama-8b-fp8-cache": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "llama-8b-int4": {"load_format": "auto"},
    "tiny-fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "tiny-int4": {"load_format": "auto"},
}
"""Of `ReplicaConfig`, beside the config."""


def write_config(name: str, folder: Path) -> Path:
    """A folder with the model's config.json and nothing else, for --load-format dummy; of int4 with random weights."""
    folder = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    config = MODELS[name]
    if name.endswith("-int4"):
        group = min(128, config["hidden_size"])  # inputs with one scale
        _write_int4(config, group, folder)
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        scheme = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
        config = config | {"quantization_config": scheme | {"ignore": ["lm_head"]}}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _write_int4(config: dict[str, Any], group: int, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    tensors = {}
    for name, weight in model.state_dict().items():
        if not name.endswith("_proj.weight"):
            values = torch.randn(weight.shape, dtype=torch.bfloat16) * 0.02
            tensors[name] = values + 1 if weight.dim() == 1 else values
            continue
        outputs, inputs = weight.shape
        prefix = name.removesuffix("weight")
        tensors[f"{prefix}weight_packed"] = torch.randint(-(1 << 31), 1 << 31, (outputs, inputs // 8)).int()
        tensors[f"{prefix}weight_scale"] = torch.full((outputs, inputs // group), 0.004, dtype=torch.bfloat16)
        tensors[f"{prefix}weight_shape"] = torch.tensor(weight.shape)
    Tokenizer(models.WordLevel({"any": 0}, unk_token="any")).save(str(folder / "tokenizer.json"))
    save_file(tensors, folder / "model.safetensors")
