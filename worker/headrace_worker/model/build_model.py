"""A transformers model on the meta device, with attention through Headrace's paged cache."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from headrace_base.errors import HeadraceError, ModelLoadError, ModelUnsupportedError
from headrace_worker.model import attention
from headrace_worker.model.cache_layout import layer_windows
from headrace_worker.model.gguf_config import gguf_config
from headrace_worker.model.gguf_file import GgufFile
from headrace_worker.model.json_files import read_object
from headrace_worker.model.quantized.config import with_quantization
from headrace_worker.model.refusals import (
    ALIASES,
    RECURRENT,
    attends_both_ways,
    check_config,
    check_config_file,
    runs_own_code,
)
from headrace_worker.model.source import ModelSource


def read_config(source: ModelSource, gguf: GgufFile | None, trust_remote_code: bool = False) -> Any:
    """The checkpoint's transformers config: that of a language model, or one with a text part."""
    if gguf is not None:
        fields = gguf_config(gguf)
        try:
            return AutoConfig.for_model(fields.pop("model_type"), **fields)
        except Exception as error:  # as below
            raise ModelUnsupportedError(f"{gguf.name} describes no valid model: {_reason(error, source)}") from error
    fields = with_quantization(source.path, read_object(source.path / "config.json", source.name), source.name)
    check_config_file(source.name, fields, trust_remote_code=trust_remote_code)
    runs_own = runs_own_code(fields, trust_remote_code=trust_remote_code)
    alias = None if runs_own else ALIASES.get(fields["model_type"])
    try:
        if alias is not None:
            config = AutoConfig.for_model(
                alias, **{name: value for name, value in fields.items() if name != "model_type"}
            )
        else:
            config = AutoConfig.from_pretrained(source.path, trust_remote_code=runs_own, local_files_only=True)
    except Exception as error:  # each family checks its config in its own way
        raise ModelUnsupportedError(
            f"config.json of {source.name!r} cannot be read: {_reason(error, source)}"
        ) from error
    if quantization := fields.get("quantization_config"):  # the value from an older file, too
        config.quantization_config = quantization
    if not runs_own and hasattr(config, "auto_map"):
        del config.auto_map  # else the model's class would be the folder's
    return config


def _reason(error: Exception, source: ModelSource) -> str:
    lines = [line.strip() for line in str(error).replace(str(source.path), "the folder").splitlines() if line.strip()]
    return (" ".join(lines[:2]) or type(error).__name__)[:200]


def check_supported(config: Any) -> None:
    """Refuse by name every model that is not a causal decoder with softmax attention."""
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    own_code = family is None and bool(getattr(config, "auto_map", None))
    check_config(config, known_code=not own_code)
    if own_code:
        return
    if family is None:
        raise ModelUnsupportedError(f"transformers has no causal language model for {config.model_type!r}.")
    _check_interface(family)
    if not hasattr(config, "num_hidden_layers"):
        raise ModelUnsupportedError(
            f"The config of {config.model_type} has no num_hidden_layers: only decoders with one list of layers are "
            "served."
        )
    layer_windows(config)


def _check_interface(family: Any) -> None:
    if not getattr(family, "_supports_attention_backend", False) and family.config_class.model_type not in RECURRENT:
        raise ModelUnsupportedError(
            f"{family.__name__} does not use transformers' attention interface, or keeps recurrent state: it cannot be "
            "served."
        )


def build_meta(config: Any, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model class of `config`, built without memory: parameters and buffers are on meta."""
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
        reason = f"{reason} is missing" if isinstance(error, KeyError) else reason
        raise ModelLoadError(f"The {config.model_type} config does not define a valid model: {reason}") from error
    _check_interface(type(model))
    if any(hasattr(part, "layer_idx") and getattr(part, "is_causal", True) is False for part in model.modules()):
        raise attends_both_ways(config.model_type)
    if model.base_model is model and isinstance(getattr(model, "model", None), PreTrainedModel):
        model.base_model_prefix = "model"  # a class may name the prefix as its whole checkpoint does (Llama 4)
    for part in model.modules():
        if getattr(part, "attn_temperature_tuning", False):
            part.attn_temperature_tuning = False  # the tuning is for positions that `check_limits` refuses
    model.config.use_cache = False
    return model.eval()


def output_rows(model: PreTrainedModel) -> int:
    """Number of logits of the whole model. Raises ModelLoadError for one without an output head."""
    head = model.get_output_embeddings()
    if head is None:
        raise ModelLoadError(f"{type(model).__name__} has no output head: it cannot generate text.")
    return int(head.weight.shape[0])
