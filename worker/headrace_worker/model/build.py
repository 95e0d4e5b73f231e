"""A transformers model on the meta device, with attention through Headrace's paged cache."""

import json
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel, __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from headrace_proto.errors import ModelLoadError, ModelUnsupportedError
from headrace_worker.model import attention
from headrace_worker.model.cache_layout import layer_windows
from headrace_worker.model.gguf_config import gguf_config
from headrace_worker.model.gguf_file import GgufFile
from headrace_worker.model.source import ModelSource


def read_config(source: ModelSource, gguf: GgufFile | None, trust_remote_code: bool = False) -> Any:
    """The model's transformers config."""
    if gguf is not None:
        fields = gguf_config(gguf)
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    try:
        return AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        if (kind := _unknown_type(source)) is not None:
            raise ModelUnsupportedError(
                f"config.json of {source.name!r} has the model_type {kind!r}, which transformers {__version__} does "
                "not support: serve a model of a supported architecture."
            ) from error
        reason = str(error).strip().split("\n")[0][:200].replace(str(source.path), "the folder")
        raise ModelUnsupportedError(f"config.json of {source.name!r} cannot be read: {reason}") from error


def _unknown_type(source: ModelSource) -> str | None:
    try:
        kind = json.loads((source.path / "config.json").read_bytes()).get("model_type")
    except (ValueError, OSError, AttributeError, RecursionError):
        return None
    return kind if isinstance(kind, str) and kind not in CONFIG_MAPPING else None


def check_supported(config: Any) -> None:
    """Refuse by name every model that is not a causal decoder with softmax attention."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ModelUnsupportedError(f"{kind} is an encoder-decoder or has cross-attention: only decoders are served.")
    if getattr(config, "quantization_config", None):
        method = dict(config.quantization_config).get("quant_method", "unknown")
        raise ModelUnsupportedError(f"The checkpoint is quantized ({method}): give unquantized safetensors or a GGUF.")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if not getattr(config, "auto_map", None):
            raise ModelUnsupportedError(f"transformers has no causal language model for {kind!r}.")
        return
    if not hasattr(config, "num_hidden_layers"):
        raise ModelUnsupportedError(f"{kind} is not a plain text decoder: give its text model alone.")
    if getattr(config, "is_causal", True) is False:
        raise ModelUnsupportedError(
            f"{kind} with is_causal=false attends in both directions: only decoders are served."
        )
    layer_windows(config)


def check_rope(config: Any, max_model_len: int | None) -> None:
    """Refuse rotary embeddings that change with the longest sequence of a batch: a row must not depend on another one.

    longrope has one set of frequencies up to its original length, and is served up to that length.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {entry.get("rope_type"): entry for entry in (rope, *rope.values()) if isinstance(entry, dict)}
    if "dynamic" in kinds:
        raise ModelUnsupportedError(
            f"This {config.model_type} model has dynamic rope scaling, which makes a sequence's result depend on the "
            "longest one in its batch: it is not supported."
        )
    if "longrope" in kinds:
        original = int(
            kinds["longrope"].get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings
        )
        if (max_model_len or config.max_position_embeddings) > original:
            raise ModelUnsupportedError(
                f"This {config.model_type} model switches its rotary embedding (longrope) at {original} tokens: "
                f"use --max-model-len {original} or less."
            )


def build_meta(config: Any, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model class of `config`, built without memory; parameters and buffers are on meta."""
    check_supported(config)
    attention.register()
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation=attention.IMPLEMENTATION,
                trust_remote_code=trust_remote_code,
            )
    except (ValueError, TypeError, RuntimeError, ImportError, KeyError, AttributeError, ZeroDivisionError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise ModelLoadError(f"The {config.model_type} config does not define a valid model: {reason}") from error
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelUnsupportedError(
            f"{type(model).__name__} does not use transformers' attention interface, or keeps recurrent state: "
            "it cannot be served."
        )
    model.config.use_cache = False
    return model.eval()


def output_rows(model: PreTrainedModel) -> int:
    """Number of logits of the whole model. Raises ModelLoadError for one without an output head."""
    head = model.get_output_embeddings()
    if head is None:
        raise ModelLoadError(f"{type(model).__name__} has no output head: it cannot generate text.")
    return int(head.weight.shape[0])
