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

from headrace_base.errors import ModelUnsupportedError
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.model.config_sizes import config_value, layer_sizes, optional_size
from headrace_worker.model.quantized.config import read_scheme

# Families whose config.json need not show why they are not served, by the reason.
_REASONS = {
    "keep recurrent state of a kind that is not served": (
        "inkling2_loop_text inkling2_text inkling_text minimax qwen4_exp_text recurrent_gemma rwkv xlstm zamba zaya"
    ),
    "keep recurrent state alone: a model without layers of attention is not served": "falcon_mamba mamba mamba2",
    "share the modules of attention between layers": "zamba2",
    "compute attention in their own code, outside of transformers' attention interface": (
        "big_bird biogpt bloom cpmant falcon git gpt_neo gpt_neox_japanese megatron-bert mpt openai-gpt reformer "
        "rembert roformer stablelm trocr xglm xlm xlnet"
    ),
    "compress keys and values of several tokens": "deepseek_v4",
    "select keys by an indexer of their own": "dots3_note_text",
    "attend more than once in a layer": "diffllama dory hrm_text longcat_flash",
    "add a mask of their own to attention": "doge",
    "route attention through experts": "jetmoe",
    "are made of several models": "blt moshi",
    "attend in both directions over their prompt": "paligemma",
    "attend to images in layers of their own (cross-attention)": "mllama",
    "take an image with every prompt": "blip-2 instructblip instructblipvideo",
    "classify images": "shieldgemma2",
}
UNSERVED = {family: reason for reason, families in _REASONS.items() for family in families.split()}
# Families that transformers knows by the name of another one, whose class their files name.
ALIASES = {"kimi_k2": "deepseek_v3"}
# They attend in both directions unless `is_decoder` is set.
_ENCODERS = (
    "bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm roc_bert xlm-roberta "
    "xlm-roberta-xl xmod"
)
# They keep recurrent state in some of their layers, or in all.
_RECURRENT = (
    "bailing_hybrid bamba falcon_h1 granitemoehybrid jamba kimi_linear lara_mini lfm2 lfm2_moe lfm3 nemotron_h "
    "olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next"
)
RECURRENT = frozenset(_RECURRENT.split())
_INDEXED = ("indexed_attention", "deepseek_sparse_attention")  # the second: in older files
# attention: in older files. The last one is full attention up to the lengths that `check_limits` allows.
ATTENTION_TYPES = (
    "full_attention",
    "sliding_attention",
    "attention",
    "hybrid",
    *_INDEXED,
    "chunked_attention",
)
STATE_TYPES = ("linear_attention", "mamba", "conv", "hybrid")  # mamba: linear_attention in older files
_OTHER_TYPES = ("mlp", "moe")  # layers of their own, in families with recurrent state
_CLASSIFIER = re.compile(r"For(Sequence|Token)Classification$|ForQuestionAnswering$|ForMultipleChoice$")
_CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"  # tables of transformers
_MULTIMODAL = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES")
_PARTS = ("text_config", "vision_config", "audio_config")
_INHERITED = ("quantization_config",)  # fields of a whole checkpoint
_ROPE_KINDS = {"default", "linear", "llama3", "longrope", "proportional", "yarn"}
_OLD_ROPE_KINDS = {"su": "longrope", "mrope": "default"}


def check_config_file(name: str, fields: dict[str, Any], *, trust_remote_code: bool) -> None:
    """Checks the fields of config.json of the model `name`. Raises ModelUnsupportedError."""
    family, own_code = fields.get("model_type", ""), isinstance(fields.get("auto_map"), dict)
    family = ALIASES.get(family, family) if isinstance(family, str) else family
    runs_own = runs_own_code(fields, trust_remote_code=trust_remote_code)
    known = known_families()
    if not isinstance(family, str) or not (family or own_code):
        raise ModelUnsupportedError(
            f"config.json of {name!r} has no model_type: it is not the config of a language model for transformers."
        )
    if known and family not in known and not runs_own:
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
    fields = fields | {"model_type": family}
    text = fields if runs_own else text_fields(fields)
    if text is not fields:
        _check_outer(family, fields, text)
    if text["model_type"] or text is fields:  # else the outer family has a text family of its own choice
        check_config(SimpleNamespace(**text), known_code=not runs_own)


def runs_own_code(fields: dict[str, Any], *, trust_remote_code: bool) -> bool:
    """Whether the folder's Python code is run: if that is allowed, and transformers has no class of the same name.

    Folders of families that have come to transformers since keep their old code, which often needs further packages.
    """
    if not trust_remote_code or not isinstance(fields.get("auto_map"), dict):
        return False
    family, architectures = fields.get("model_type"), fields.get("architectures")
    classes = [_generating().get(ALIASES.get(family, family), ())] if isinstance(family, str) else []
    return not (isinstance(architectures, list) and any(name in each for each in classes for name in architectures))


def text_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of config.json that describe the language model: `fields` itself where it is alone.

    model_type is empty where neither the file nor the family's name shows it. Raises ModelUnsupportedError.
    """
    family, text = fields.get("model_type", ""), fields.get("text_config")
    usual = f"{family}_text" if f"{family}_text" in known_families() else ""
    if text is None:  # files of some families have its fields beside those of other parts
        text = {} if usual and family not in causal_families() else None
    if text is None:
        return fields
    if not isinstance(text, dict) or not isinstance(text.get("model_type", ""), str):
        raise ModelUnsupportedError(
            f"text_config in config.json of this {family} model is no object with a model_type: correct it."
        )
    inherited = {name: fields[name] for name in _INHERITED if name in fields}
    kind = text.get("model_type", usual)
    return inherited | text | {"model_type": ALIASES.get(kind, kind)}


def _check_outer(family: str, fields: dict[str, Any], text: dict[str, Any]) -> None:
    """Checks a family whose language model has the fields `text`. Raises ModelUnsupportedError."""
    _check_decoder(SimpleNamespace(**fields))
    _check_served(family)
    kind = text["model_type"]
    if kind and causal_families() and kind not in causal_families():
        raise ModelUnsupportedError(
            f"The language model of {family} ({str(kind)[:80]}) has no causal class of its own in transformers, which "
            "is what is served of models with images or audio: docs/models.md names the families that have one."
        )
    if multimodal_families() and family not in multimodal_families():
        raise ModelUnsupportedError(
            f"{family} is none of the families with a text_config that transformers {version('transformers')} "
            "generates text with: docs/models.md names those that are served."
        )


def _check_decoder(config: Any) -> None:
    if config_value(config, "is_encoder_decoder") or config_value(config, "add_cross_attention"):
        raise ModelUnsupportedError(
            f"{config.model_type} is an encoder-decoder or has cross-attention: only decoders are served."
        )


def _check_served(family: str) -> None:
    if family in UNSERVED:
        raise ModelUnsupportedError(f"Models of the family {family} are not served: they {UNSERVED[family]}.")


def check_config(config: Any, *, known_code: bool = True) -> None:
    """Refuses every model that is not a causal decoder with softmax attention. Raises ModelUnsupportedError.

    config: of a language model. known_code: its family is computed by transformers' own code.
    """
    family = config.model_type
    if parts := [part for part in _PARTS if not known_code and config_value(config, part) is not None]:
        raise ModelUnsupportedError(
            f"{family} has code of its own and a {parts[0]}: of models with images or audio only those of "
            "transformers' own families are served, as models for text."
        )
    _check_decoder(config)
    if known_code:
        if causal_families() and family not in causal_families():
            raise ModelUnsupportedError(f"transformers has no causal language model for {family!r}.")
        _check_served(family)
    bidirectional = config_value(config, "use_bidirectional_attention")
    encoder = known_code and family in _ENCODERS.split() and not config_value(config, "is_decoder")
    if encoder or not config_value(config, "is_causal", True) or bidirectional not in (None, False, "vision"):
        raise attends_both_ways(family)
    read_scheme(family, config_value(config, "quantization_config"))
    _check_attention(config)


def _check_attention(config: Any) -> None:
    """Layers of kinds, and of sizes, that the KV cache holds."""
    for name in ("num_hidden_layers", "num_attention_heads"):
        optional_size(config, name)
    for name in ("num_key_value_heads", "head_dim", "v_head_dim", "sliding_window"):
        layer_sizes(config, name, 1)
    check_layer_types(config)


def check_layer_types(config: Any) -> None:
    """Raises ModelUnsupportedError for layers that are not softmax attention over all tokens or a window, nor of a kind
    of a family with recurrent state.
    """
    kinds = config_value(config, "layer_types")
    if not isinstance(kinds, list | tuple):
        return
    recurrent = config.model_type in RECURRENT
    known = {*ATTENTION_TYPES, *STATE_TYPES, *_OTHER_TYPES} if recurrent else {*ATTENTION_TYPES} - {"hybrid"}
    known -= set() if config_value(config, "index_topk") else {*_INDEXED}
    known -= set() if config.model_type == "llama4_text" else {"chunked_attention"}
    for layer, kind in enumerate(kinds):
        if not isinstance(kind, str) or kind not in known:
            raise ModelUnsupportedError(
                f"Layer {layer} of this {config.model_type} model is {str(kind)[:80]!r}: only layers of full or "
                "sliding softmax attention are served."
            )
    if recurrent and kinds and not {*kinds} & {*ATTENTION_TYPES}:
        raise ModelUnsupportedError(
            f"This {config.model_type} model has no layer of attention, but recurrent state alone: it is not served."
        )


def keeps_states(config: Any) -> bool:
    """Whether some layers keep recurrent state: in a family that has such, a model may have layers of attention alone.

    Of a config.json without `layer_types`, which some families derive, it is not known: True.
    """
    kinds = config_value(config, "layer_types")
    if config.model_type not in RECURRENT or not isinstance(kinds, list | tuple):
        return bool(config.model_type in RECURRENT)
    return any(kind in STATE_TYPES for kind in kinds)


def check_recurrent(config: Any, replica: ReplicaConfig) -> None:
    """Refuses what is not done with recurrent state. Raises ModelUnsupportedError."""
    if not keeps_states(config):
        return
    if replica.kv_offload_memory and replica.state_snapshots == 0:
        raise ModelUnsupportedError(
            "--kv-offload-memory brings recurrent states back into slots beside those of running requests: give "
            "--state-snapshots 1 or more."
        )
    if replica.kv_offload_dir:
        raise ModelUnsupportedError(
            f"{config.model_type} keeps recurrent state, which goes to host memory, but not to disk yet: leave "
            "--kv-offload-dir out."
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


def check_limits(config: Any, max_model_len: int | None) -> None:
    """Refuses lengths beyond those up to which a model attends to all tokens alike. Raises ModelUnsupportedError."""
    limits = {}
    if config.model_type == "llama4_text":
        limits["attends within chunks of tokens"] = config_value(config, "attention_chunk_size")
        if (
            config_value(config, "attn_temperature_tuning")
            and type(floor := config_value(config, "floor_scale")) is int
        ):
            limits["scales queries by their positions"] = floor - 1
    known = {what: limit for what, limit in limits.items() if type(limit) is int}
    least = min(known.values(), default=0)
    length = max_model_len or config_value(config, "max_position_embeddings")
    for what, limit in known.items():
        if type(length) is not int or length > limit:
            raise ModelUnsupportedError(
                f"This {config.model_type} model {what}, which is not served beyond {limit} tokens: use "
                f"--max-model-len {least} or less."
            )


def check_equal_sizes(equal: bool) -> None:
    """Checks the sizes of keys and values, for a cache of 8 bits. Raises ModelUnsupportedError."""
    if not equal:
        raise ModelUnsupportedError(
            "--kv-cache-dtype is for keys and values of equal sizes, and this model caches latents, or larger keys: "
            "leave it out."
        )


def known_families() -> frozenset[str]:
    """The model types that transformers has a config for; empty where they cannot be read."""
    return frozenset(_table("auto_mappings.py", "CONFIG_MAPPING_NAMES")) | causal_families()


def causal_families() -> frozenset[str]:
    """The model types that transformers has a causal language model for; empty where they cannot be read."""
    return frozenset(_table("modeling_auto.py", _CAUSAL))


def multimodal_families() -> frozenset[str]:
    """The model types that transformers generates text with from images or audio, too; empty as above."""
    return frozenset().union(*(_table("modeling_auto.py", table) for table in _MULTIMODAL))


def _generating() -> dict[str, set[str]]:
    """Names of transformers' classes that generate text, by model type."""
    classes: dict[str, set[str]] = {}
    for table in (_CAUSAL, *_MULTIMODAL):
        for family, names in _table("modeling_auto.py", table).items():
            classes.setdefault(family, set()).update([names] if isinstance(names, str) else names)
    return classes


@cache
def _table(file: str, table: str) -> dict[str, Any]:
    """A table of transformers, without other tables in it. Importing it would take seconds (torch)."""
    spec = find_spec("transformers")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder, "models", "auto", file)
        if not path.is_file():
            continue
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == table:
                entries = node.value.args[0] if isinstance(node.value, ast.Call) else None
                pairs = entries.elts if isinstance(entries, ast.List) else ()
                return dict(ast.literal_eval(pair) for pair in pairs if isinstance(pair, ast.Tuple))
    return {}
