"""Which models are refused, as far as config.json shows it: checked before Ray starts, and again by every rank.

Imports neither torch nor transformers: the families that transformers knows are read from its source files.

A check takes the transformers config, or the fields of config.json, where a missing field has its family's default.
"""

import ast
import re
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headrace_proto.errors import ModelUnsupportedError
from headrace_worker.model.config_sizes import config_value, optional_size

# Families whose config.json need not show why they are not served, by the reason.
_REASONS = {
    "keep recurrent state beside keys and values (Mamba, linear attention or convolutions)": (
        "bailing_hybrid bamba falcon_h1 falcon_mamba inkling2_loop_text inkling2_text inkling_text jamba kimi_linear "
        "lara_mini lfm3 mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next "
        "qwen4_exp_text recurrent_gemma rwkv xlstm zamba zamba2 zaya"
    ),
    "compute attention in their own code, outside of transformers' attention interface": (
        "big_bird biogpt bloom cpmant falcon git gpt_neo gpt_neox_japanese megatron-bert mpt openai-gpt reformer "
        "rembert roformer stablelm trocr xglm xlm xlnet"
    ),
    "compress keys and values": "deepseek_v4",
    "attend within chunks of tokens": "llama4_text",
    "have heads of another size in some of their layers": "gemma4_text gemma4_unified_text",
    "share keys and values among layers": "gemma3n_text",
    "attend more than once in a layer": "diffllama dory hrm_text",
    "add a mask of their own to attention": "doge",
    "route attention through experts": "jetmoe",
    "are made of several models": "blt moshi",
}
UNSERVED = {family: reason for reason, families in _REASONS.items() for family in families.split()}
# They attend in both directions unless `is_decoder` is set.
_ENCODERS = (
    "bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm roc_bert xlm-roberta "
    "xlm-roberta-xl xmod"
)
_LAYER_TYPES = ("full_attention", "sliding_attention", "attention")  # attention: full_attention in older files
_CLASSIFIER = re.compile(r"For(Sequence|Token)Classification$|ForQuestionAnswering$|ForMultipleChoice$")
_PARTS = ("text_config", "vision_config", "audio_config")
_SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window")
_ROPE_KINDS = {"default", "linear", "llama3", "longrope", "proportional", "yarn"}
_OLD_ROPE_KINDS = {"su": "longrope", "mrope": "default"}


def check_config_file(name: str, fields: dict[str, Any], *, trust_remote_code: bool) -> None:
    """Checks the fields of config.json of the model `name`. Raises ModelUnsupportedError."""
    family, own_code = fields.get("model_type", ""), isinstance(fields.get("auto_map"), dict)
    known = known_families()
    if not isinstance(family, str) or not (family or own_code):
        raise ModelUnsupportedError(
            f"config.json of {name!r} has no model_type: it is not the config of a language model for transformers."
        )
    if known and family not in known and not (own_code and trust_remote_code):
        if own_code:
            raise ModelUnsupportedError(
                f"The model {name!r} has its own Python code (auto_map in its config.json), which is not run: pass "
                "--trust-remote-code (in a spec: trust_remote_code: true) if you trust its authors."
            )
        raise ModelUnsupportedError(
            f"config.json of {name!r} has the model_type {family[:80]!r}, which transformers {version('transformers')} "
            "does not support: serve a model of a supported architecture."
        )
    architectures = fields.get("architectures")
    classes = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if classes and all(_CLASSIFIER.search(name) for name in classes):
        raise ModelUnsupportedError(
            f"config.json of {name!r} is that of {classes[0][:80]}, which classifies texts: it has no weights that "
            "generate them."
        )
    check_config(SimpleNamespace(**fields | {"model_type": family}), known_code=not (own_code and trust_remote_code))


def check_config(config: Any, *, known_code: bool = True) -> None:
    """Refuses every model that is not a causal decoder with softmax attention. Raises ModelUnsupportedError.

    known_code: its family is computed by transformers' own code.
    """
    family = config.model_type
    causal = not known_code or not causal_families() or family in causal_families()
    parts = [part for part in _PARTS if config_value(config, part) is not None]
    if parts and ("text_config" in parts or not causal):
        raise ModelUnsupportedError(
            f"{family} is not a plain text decoder (its config.json has a {parts[0]}): serve a model for text alone."
        )
    if config_value(config, "is_encoder_decoder") or config_value(config, "add_cross_attention"):
        raise ModelUnsupportedError(f"{family} is an encoder-decoder or has cross-attention: only decoders are served.")
    if not causal:
        raise ModelUnsupportedError(f"transformers has no causal language model for {family!r}.")
    if known_code and family in UNSERVED:
        raise ModelUnsupportedError(f"Models of the family {family} are not served: they {UNSERVED[family]}.")
    bidirectional = config_value(config, "use_bidirectional_attention")
    encoder = known_code and family in _ENCODERS.split() and not config_value(config, "is_decoder")
    if encoder or not config_value(config, "is_causal", True) or bidirectional not in (None, False, "vision"):
        raise attends_both_ways(family)
    if quantization := config_value(config, "quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise ModelUnsupportedError(
            f"The checkpoint is quantized ({str(method)[:80]}): give unquantized safetensors or a GGUF."
        )
    _check_attention(config)


def _check_attention(config: Any) -> None:
    """Layers of kinds, and of sizes, that the KV cache holds."""
    if config_value(config, "kv_lora_rank"):
        raise ModelUnsupportedError(
            f"This {config.model_type} model compresses keys and values (multi-head latent attention), which is not "
            "supported."
        )
    for name in _SIZES:
        optional_size(config, name)
    check_layer_types(config)
    head, values = optional_size(config, "head_dim"), config_value(config, "v_head_dim")
    if head and values and values != head:
        raise ModelUnsupportedError(
            f"This {config.model_type} model has keys of size {head} and values of size {str(values)[:80]}: layers "
            "whose keys and values differ in shape are not supported."
        )


def check_layer_types(config: Any) -> None:
    """Raises ModelUnsupportedError for layers that are not softmax attention over all tokens or a window."""
    kinds = config_value(config, "layer_types")
    for layer, kind in enumerate(kinds if isinstance(kinds, list | tuple) else ()):
        if kind not in _LAYER_TYPES:
            raise ModelUnsupportedError(
                f"Layer {layer} of this {config.model_type} model is {str(kind)[:80]!r}: only layers of full or "
                "sliding softmax attention are served."
            )


def attends_both_ways(family: str) -> ModelUnsupportedError:
    """The error for an encoder."""
    return ModelUnsupportedError(
        f"This {family} model attends in both directions (is_causal, is_decoder or use_bidirectional_attention in its "
        "config): only decoders are served."
    )


def check_rope(config: Any, max_model_len: int | None) -> None:
    """Refuses unknown rotary embeddings, and those that change with the longest sequence of a batch: a row must not
    depend on another one.

    longrope has one set of frequencies up to its original length, and is served up to that length. Raises
    ModelUnsupportedError.
    """
    rope = config_value(config, "rope_parameters") or config_value(config, "rope_scaling") or {}
    entries = [entry for entry in (rope, *rope.values()) if isinstance(entry, dict)] if isinstance(rope, dict) else []
    kinds = {str(entry.get("rope_type", entry.get("type", "default"))): entry for entry in entries}
    kinds = {_OLD_ROPE_KINDS.get(kind, kind): entry for kind, entry in kinds.items()}
    if unknown := sorted(kinds.keys() - _ROPE_KINDS - {"dynamic"}):
        raise ModelUnsupportedError(
            f"This {config.model_type} model has rotary embeddings of the type {unknown[0][:80]!r}, which is unknown "
            f"({', '.join(sorted(_ROPE_KINDS))} are served)."
        )
    if "dynamic" in kinds:
        raise ModelUnsupportedError(
            f"This {config.model_type} model has dynamic rope scaling, which makes a sequence's result depend on the "
            "longest one in its batch: it is not supported."
        )
    if "longrope" in kinds:
        original = kinds["longrope"].get("original_max_position_embeddings")
        if original is None and config.model_type.startswith("phi"):  # a field of these families beside the rope's
            original = config_value(config, "original_max_position_embeddings")
        positions = config_value(config, "max_position_embeddings")
        if type(original) is type(positions) is int and (max_model_len or positions) > original:
            raise ModelUnsupportedError(
                f"This {config.model_type} model switches its rotary embedding (longrope) at {original} tokens: "
                f"use --max-model-len {original} or less."
            )


def known_families() -> frozenset[str]:
    """The model types that transformers has a config for; empty where they cannot be read."""
    return _names("auto_mappings.py", "CONFIG_MAPPING_NAMES") | causal_families()


def causal_families() -> frozenset[str]:
    """The model types that transformers has a causal language model for; empty where they cannot be read."""
    return _names("modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")


@cache
def _names(file: str, table: str) -> frozenset[str]:
    """The keys of a table of transformers. Importing it would import torch, which takes seconds."""
    spec = find_spec("transformers")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder, "models", "auto", file)
        if not path.is_file():
            continue
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == table:
                return frozenset(dict(ast.literal_eval(node.value.args[0])) if isinstance(node.value, ast.Call) else ())
    return frozenset()
