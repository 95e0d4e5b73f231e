"""The language model of a checkpoint that has further models, as for images or audio: its config, its tensors' names.

Such a checkpoint is of an outer class of transformers. Its language model alone is built, as the causal class of its
own config: in every outer class that is served the decoder is of the same class, and gets a prompt of text unchanged.
"""

from typing import Any

import torch
from transformers import AutoModelForMultimodalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from headrace_base.errors import ModelLoadError, ModelUnsupportedError

_END_TOKENS = ("eos_token_id", "bos_token_id")


def text_config(config: Any) -> Any:
    """The config of the language model; `config` itself where it is that of a language model.

    What both have is that of the outer one, as in transformers: whether embeddings are tied, and end tokens.
    """
    if getattr(config, "text_config", None) is None:
        return config
    text = config.get_text_config(decoder=True)
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    for name in _END_TOKENS:
        if (value := getattr(config, name, None)) is not None:
            setattr(text, name, list(value) if isinstance(value, tuple) else value)
    return text


class TextNames:
    """The names of a checkpoint's tensors in its language model."""

    def __init__(self, config: Any, model: PreTrainedModel) -> None:
        """config: the outer one. model: the language model, of the config's text part.

        Raises ModelLoadError when the outer class cannot be built, ModelUnsupportedError when its decoder differs.
        """
        outer = _outer_model(config)
        decoder, head = outer.get_decoder(), outer.get_output_embeddings()
        paths = {id(module): name for name, module in outer.named_modules()}
        path = paths[id(decoder)]
        if type(decoder) not in (type(model), type(model.base_model)):
            raise ModelUnsupportedError(
                f"The decoder of {config.model_type} models is a {type(decoder).__name__}, not the "
                f"{type(model.base_model).__name__} of {model.config.model_type}: they are not served."
            )
        inside = "" if type(decoder) is type(model) else f"{model.base_model_prefix}."
        self._read = {f"{path}.": inside}
        if head is not None:
            self._read |= {f"{paths[id(head)]}.": f"{paths[id(head)]}."}
        self._unread = tuple(_beside(outer, path, tuple(self._read)))
        self._prefix = f"{outer.base_model_prefix}."
        # Layouts of older versions. What is stored in other pieces is left to the language model's own table.
        rules = get_model_conversion_mapping(outer)
        self._renamings = [rule for rule in rules if not getattr(rule, "operations", None)]

    def __call__(self, stored: str) -> str | None:
        """The language model's name of a tensor; None for a tensor of another part, or of heads for further tokens.

        A tensor that the outer class does not have keeps its name.
        """
        if "mtp" in stored.split("."):
            return None
        name = stored
        for rule in self._renamings:
            name, _ = rule.rename_source_key(name)
        # A checkpoint of the outer class without its head has names without the prefix.
        for candidate in (name, self._prefix + name):
            for outside, inside in self._read.items():
                if candidate.startswith(outside):
                    return inside + candidate.removeprefix(outside)
            if f"{candidate}.".startswith(self._unread):
                return None
        return stored


def _outer_model(config: Any) -> PreTrainedModel:
    """On meta: its structure alone is used."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForMultimodalLM.from_config(config)
    except Exception as error:  # constructors of many families, and packages that only they need
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
        raise ModelLoadError(
            f"Which tensors of this {config.model_type} checkpoint are not its text model's is not known, since "
            f"transformers cannot build its other parts: {reason}"
        ) from error
    return model


def _beside(outer: PreTrainedModel, path: str, read: tuple[str, ...]) -> list[str]:
    """The modules and tensors of the outer class beside the decoder at `path` and the head, each with a dot."""
    found = []
    parts = path.split(".")
    for depth in range(len(parts)):
        above = ".".join(parts[:depth])
        owner = outer.get_submodule(above)
        for name in (*owner._modules, *owner._parameters, *owner._buffers):
            full = f"{above}.{name}." if above else f"{name}."
            if full not in read and not path.startswith(full):
                found.append(full)
    return found
