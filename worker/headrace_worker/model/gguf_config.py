"""The transformers config and tensor names of a GGUF file, from its header.

Imports no torch. The tensor names are llama.cpp's (`blk.0.attn_q.weight`). Sources: the GGUF specification and the
names in the `gguf` package.
"""

import re
from collections.abc import Iterator
from typing import Any

from headrace_proto.errors import ModelLoadError, ModelUnsupportedError
from headrace_worker.model.gguf_file import GgufFile

# GGUF architecture -> transformers model_type
_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
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
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"  # divides the rotary frequencies (Llama 3.1 and later); a buffer, not a weight


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The transformers config of a GGUF model, as a dict with `model_type`.

    Raises ModelUnsupportedError for an architecture or rope scaling that is not mapped, ModelLoadError for a missing
    key.
    """
    data = file.metadata
    arch = data.get("general.architecture")
    if not isinstance(arch, str) or arch not in _ARCHITECTURES:
        raise ModelUnsupportedError(
            f"GGUF architecture {arch!r} is not read directly ({', '.join(sorted(_ARCHITECTURES))} are): "
            "use the model's safetensors instead."
        )
    scaling = data.get(f"{arch}.rope.scaling.type", "none")
    factor = data.get(f"{arch}.rope.scaling.factor", 1.0)
    if scaling not in ("none", "linear") or (scaling == "none" and factor not in (0.0, 1.0)):
        raise ModelUnsupportedError(f"GGUF rope scaling {scaling!r} is not supported: use the model's safetensors.")
    try:
        heads = int(data[f"{arch}.attention.head_count"])
        hidden = int(data[f"{arch}.embedding_length"])
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": float(data.get(f"{arch}.rope.freq_base", 10000.0)),
        }
        if scaling == "linear":
            rope |= {"rope_type": "linear", "factor": factor}
        head_dim = int(data.get(f"{arch}.attention.key_length") or hidden // heads)
        if data.get(f"{arch}.rope.dimension_count", head_dim) != head_dim:
            raise ModelUnsupportedError("GGUF models with partial rotary embedding are not supported: use safetensors.")
        config: dict[str, Any] = {
            "model_type": _ARCHITECTURES[arch],
            "hidden_size": hidden,
            "intermediate_size": int(data[f"{arch}.feed_forward_length"]),
            "num_hidden_layers": int(data[f"{arch}.block_count"]),
            "num_attention_heads": heads,
            "num_key_value_heads": int(data.get(f"{arch}.attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "max_position_embeddings": int(data[f"{arch}.context_length"]),
            "rms_norm_eps": float(data[f"{arch}.attention.layer_norm_rms_epsilon"]),
            "rope_parameters": rope,
            "vocab_size": file.tensors["token_embd.weight"].shape[0],
        }
        if any(value <= 0 for value in config.values() if isinstance(value, int)):
            raise ValueError("a size is not positive")
    except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise ModelLoadError("The GGUF file's metadata is invalid: it is damaged or of an unknown kind.") from error
    except KeyError as error:
        raise ModelLoadError(f"The GGUF file lacks {error.args[0]!r}: it is damaged or of an unknown kind.") from error
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    for key in ("bos", "eos"):
        config[f"{key}_token_id"] = data.get(f"tokenizer.ggml.{key}_token_id")
    config["pad_token_id"] = data.get("tokenizer.ggml.padding_token_id")
    return config


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
