"""A transformers model on the meta device, with attention through Headrace's paged cache."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel, __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from headrace_proto.errors import HeadraceError, ModelLoadError, ModelUnsupportedError
from headrace_worker.model import attention
from headrace_worker.model.cache_layout import layer_windows
from headrace_worker.model.gguf_config import gguf_config
from headrace_worker.model.gguf_file import GgufFile
from headrace_worker.model.json_files import read_object
from headrace_worker.model.source import ModelSource

_ROPE_KINDS = {"default", "linear", "llama3", "longrope", "proportional", "yarn"}


def read_config(source: ModelSource, gguf: GgufFile | None, trust_remote_code: bool = False) -> Any:
    """The model's transformers config."""
    if gguf is not None:
        fields = gguf_config(gguf)
        try:
            return AutoConfig.for_model(fields.pop("model_type"), **fields)
        except Exception as error:  # as below
            raise ModelUnsupportedError(f"{gguf.name} describes no valid model: {_reason(error, source)}") from error
    kind = read_object(source.path / "config.json", source.name).get("model_type")
    try:
        return AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # each family checks its config in its own way
        if isinstance(kind, str) and kind not in CONFIG_MAPPING:
            raise ModelUnsupportedError(
                f"config.json of {source.name!r} has the model_type {kind[:80]!r}, which transformers {__version__} "
                "does not support: serve a model of a supported architecture."
            ) from error
        raise ModelUnsupportedError(
            f"config.json of {source.name!r} cannot be read: {_reason(error, source)}"
        ) from error


def _reason(error: Exception, source: ModelSource) -> str:
    lines = [line.strip() for line in str(error).replace(str(source.path), "the folder").splitlines() if line.strip()]
    return (" ".join(lines[:2]) or type(error).__name__)[:200]


def check_supported(config: Any) -> None:
    """Refuse by name every model that is not a causal decoder with softmax attention."""
    kind = config.model_type
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    if not getattr(config, "is_causal", True) or bidirectional not in (None, False, "vision"):
        raise _attends_both_ways(kind)
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ModelUnsupportedError(f"{kind} is an encoder-decoder or has cross-attention: only decoders are served.")
    if getattr(config, "quantization_config", None):
        quantization = config.quantization_config
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise ModelUnsupportedError(f"The checkpoint is quantized ({method}): give unquantized safetensors or a GGUF.")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if not getattr(config, "auto_map", None):
            raise ModelUnsupportedError(f"transformers has no causal language model for {kind!r}.")
        return
    if not hasattr(config, "num_hidden_layers"):
        raise ModelUnsupportedError(f"{kind} is not a plain text decoder: give its text model alone.")
    layer_windows(config)


def _attends_both_ways(kind: str) -> ModelUnsupportedError:
    return ModelUnsupportedError(
        f"This {kind} model attends in both directions (is_causal, is_decoder or use_bidirectional_attention in its "
        "config): only decoders are served."
    )


def check_rope(config: Any, max_model_len: int | None) -> None:
    """Refuse unknown rotary embeddings, and those that change with the longest sequence of a batch: a row must not
    depend on another one.

    longrope has one set of frequencies up to its original length, and is served up to that length.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    entries = [entry for entry in (rope, *rope.values()) if isinstance(entry, dict)]
    kinds = {str(entry.get("rope_type", entry.get("type", "default"))): entry for entry in entries}
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
    except HeadraceError:
        raise
    except Exception as error:  # a model's constructor is code of its family
        reason = (str(error).strip().split("\n")[0] or type(error).__name__)[:200]
        raise ModelLoadError(f"The {config.model_type} config does not define a valid model: {reason}") from error
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelUnsupportedError(
            f"{type(model).__name__} does not use transformers' attention interface, or keeps recurrent state: "
            "it cannot be served."
        )
    if any(hasattr(part, "layer_idx") and getattr(part, "is_causal", True) is False for part in model.modules()):
        raise _attends_both_ways(config.model_type)
    model.config.use_cache = False
    return model.eval()


def output_rows(model: PreTrainedModel) -> int:
    """Number of logits of the whole model. Raises ModelLoadError for one without an output head."""
    head = model.get_output_embeddings()
    if head is None:
        raise ModelLoadError(f"{type(model).__name__} has no output head: it cannot generate text.")
    return int(head.weight.shape[0])
