"""The transformers config and tensor names of a GGUF file, from its header.

Imports no torch. The tensor names are llama.cpp's (`blk.0.attn_q.weight`). Sources: the GGUF specification and the
names in the `gguf` package.
"""

import re
from collections.abc import Iterator
from typing import Any

from headrace_base.errors import ModelLoadError, ModelUnsupportedError
from headrace_worker.model.gguf_file import GgufFile
from headrace_worker.model.gguf_metadata import Metadata, number, optional_number, real, text

# GGUF architecture -> transformers model_type
_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
GGUF_FAMILIES = frozenset(_ARCHITECTURES.values())
_SPECIAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.([0-9]+)\.(\w+)\.(weight|bias)")
# Keys of an architecture, without its name.
_READ = {
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "block_count", "context_length", "embedding_length", "feed_forward_length", "rope.freq_base", "rope.scaling.factor",
    "rope.scaling.type",
}  # fmt: skip
_WITHOUT_EFFECT = {"rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout", "vocab_size"}
# Keys that are supported with one value.
_NEUTRAL = {"attention.causal": True, "attention.sliding_window": 0, "expert_count": 0, "expert_used_count": 0}
ROPE_FACTORS = "rope_freqs.weight"  # divides the rotary frequencies (Llama 3.1 and later); a buffer, not a weight


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The transformers config of a GGUF model, as a dict with `model_type`.

    Raises ModelUnsupportedError for an architecture, a rope scaling or a key that is not mapped, ModelLoadError for a
    missing or damaged one.
    """
    data = file.metadata
    arch = text(data, "general.architecture")
    if arch not in _ARCHITECTURES:
        raise ModelUnsupportedError(
            f"GGUF architecture {arch[:80]!r} is not read directly ({', '.join(sorted(_ARCHITECTURES))} are): "
            "use the model's safetensors instead."
        )
    heads = number(data, f"{arch}.attention.head_count")
    hidden = number(data, f"{arch}.embedding_length")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError("The GGUF file lacks 'token_embd.weight': it is damaged or of an unknown kind.")
    config: dict[str, Any] = {
        "model_type": _ARCHITECTURES[arch],
        "hidden_size": hidden,
        "intermediate_size": number(data, f"{arch}.feed_forward_length"),
        "num_hidden_layers": number(data, f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number(data, f"{arch}.attention.head_count_kv", heads),
        "head_dim": number(data, f"{arch}.attention.key_length", hidden // max(1, heads)),
        "max_position_embeddings": number(data, f"{arch}.context_length"),
        "rms_norm_eps": real(data, f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(data, arch),
        "vocab_size": embedding.shape[0],
    }
    _check_keys(data, arch, config["head_dim"])
    if any(value <= 0 for value in config.values() if isinstance(value, int)) or config["head_dim"] % 2:
        raise ModelLoadError("A size in the GGUF file's metadata is invalid: it is damaged or of an unknown kind.")
    factors = file.tensors.get(ROPE_FACTORS)
    if factors is not None and factors.shape != (config["head_dim"] // 2,):
        raise ModelLoadError(f"{ROPE_FACTORS} of the GGUF file does not fit its heads: it is damaged.")
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    for key in ("bos", "eos"):
        config[f"{key}_token_id"] = optional_number(data, f"tokenizer.ggml.{key}_token_id")
    config["pad_token_id"] = optional_number(data, "tokenizer.ggml.padding_token_id")
    return config


def _rope(data: Metadata, arch: str) -> dict[str, Any]:
    scaling = text(data, f"{arch}.rope.scaling.type", "none")
    factor = real(data, f"{arch}.rope.scaling.factor", 1.0)
    if scaling not in ("none", "linear") or (scaling == "none" and factor not in (0.0, 1.0)):
        raise ModelUnsupportedError(
            f"GGUF rope scaling {scaling[:80]!r} is not supported: use the model's safetensors."
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": real(data, f"{arch}.rope.freq_base", 10000.0)}
    return rope | ({"rope_type": "linear", "factor": factor} if scaling == "linear" else {})


def _check_keys(data: Metadata, arch: str, head_dim: int) -> None:
    """Refuse every key of the architecture that is unknown, or has a value with which the model computes otherwise."""
    neutral = _NEUTRAL | {"attention.value_length": head_dim, "rope.dimension_count": head_dim}
    for key in data:
        name = key.removeprefix(f"{arch}.")
        if name == key or name in _READ or name in _WITHOUT_EFFECT or (name in neutral and data[key] == neutral[name]):
            continue
        if name == "rope.dimension_count":
            raise ModelUnsupportedError("GGUF models with partial rotary embedding are not supported: use safetensors.")
        raise ModelUnsupportedError(
            f"The GGUF file's {key!r} = {str(data[key])[:80]} is not supported: use the model's safetensors instead."
        )


def weight_names(file: GgufFile) -> Iterator[tuple[str, str]]:
    """(transformers' name, name in the file) of each weight. Raises ModelUnsupportedError for an unknown one."""
    for stored in file.tensors:
        if stored != ROPE_FACTORS:
            yield _transformers_name(stored), stored


def _transformers_name(name: str) -> str:
    if name in _SPECIAL_TENSORS:
        return _SPECIAL_TENSORS[name]
    if (match := _LAYER.fullmatch(name)) and match[2] in _LAYER_PARTS:
        return f"model.layers.{match[1]}.{_LAYER_PARTS[match[2]]}.{match[3]}"
    raise ModelUnsupportedError(f"GGUF tensor {name!r} is unknown: use the model's safetensors instead.")
