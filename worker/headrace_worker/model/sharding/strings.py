"""A model's sharding plan: transformers' tensor-parallel plan strings, with our overrides.

A plan names modules (`layers.*.self_attn.q_proj`) and how each is split. Overrides exist for families without a plan,
or whose plan keeps modules whole that can be split: packed projections are cut section by section.
"""

import re
from typing import Any

from headrace_base.errors import ModelUnsupportedError

COLWISE, ROWWISE = "colwise", "rowwise"
PACKED_QKV, PACKED_PAIR = "packed_qkv", "packed_pair"
PER_HEAD = "per_head"  # equally many outputs or entries for each query head, in their order
EXPERTS = "moe_tp_experts"
WHOLE = "replicated"

_KNOWN = {
    "colwise": COLWISE,
    "rowwise": ROWWISE,
    "packed_colwise": PACKED_PAIR,
    "moe_tp_experts": EXPERTS,
    "replicated_with_grad_allreduce": WHOLE,
    "replicate": WHOLE,
    "embedding_rowwise": WHOLE,  # vocabularies are cut for every family (shard.py); other embeddings stay whole
    "embedding_colwise": WHOLE,
    PACKED_QKV: PACKED_QKV,
    PER_HEAD: PER_HEAD,
}
_ATTENTION = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {"layers.*.self_attn.o_proj": "rowwise"}
_FEED_FORWARD = {f"layers.*.feed_forward.{name}_proj": "colwise" for name in ("gate", "up")} | {
    "layers.*.feed_forward.down_proj": "rowwise"
}
_LFM2 = _ATTENTION | {
    "layers.*.self_attn.out_proj": "rowwise",
    **{f"layers.*.feed_forward.{name}": "colwise" for name in ("w1", "w3")},
    "layers.*.feed_forward.w2": "rowwise",
}
# Latents are made on every rank, and each head's products of them on one.
_LATENTS = {f"layers.*.self_attn.{name}": "per_head" for name in ("q_proj", "q_b_proj", "kv_b_proj")} | {
    "layers.*.self_attn.kv_a_proj_with_mqa": "replicate",
    "layers.*.self_attn.o_proj": "rowwise",
}
_PACKED_MLP = {"layers.*.mlp.gate_up_proj": "packed_colwise", "layers.*.mlp.down_proj": "rowwise"}
_OVERRIDES: dict[str, dict[str, str]] = {
    "phi3": {"layers.*.self_attn.qkv_proj": PACKED_QKV, "layers.*.self_attn.o_proj": "rowwise", **_PACKED_MLP},
    "gpt_neox": {"layers.*.attention.query_key_value": PER_HEAD},
    "glm": _PACKED_MLP,
    "glm4": _PACKED_MLP,
    "gpt_oss": {
        **_ATTENTION,
        "layers.*.self_attn.sinks": PER_HEAD,
        "layers.*.mlp.experts": "moe_tp_experts",
    },
    "hy_v4": {
        "layers.*.self_attn": "replicate",
        **{f"layers.*.self_attn.{name}": PER_HEAD for name in ("sinks", "gate_proj")},
    },
    "mimo_v2_flash": {"layers.*.self_attn": "replicate", "layers.*.self_attn.sinks": PER_HEAD},
    "bamba": _ATTENTION | _FEED_FORWARD,
    "jamba": _ATTENTION | _FEED_FORWARD,
    "granitemoehybrid": {
        **_ATTENTION,
        "layers.*.shared_mlp.input_linear": "packed_colwise",
        "layers.*.shared_mlp.output_linear": "rowwise",
    },
    "nemotron_h": {
        **{f"layers.*.mixer.{name}_proj": "colwise" for name in ("q", "k", "v", "up")},
        **{f"layers.*.mixer.{name}_proj": "rowwise" for name in ("o", "down")},
        "layers.*.mixer.shared_experts.up_proj": "colwise",
        "layers.*.mixer.shared_experts.down_proj": "rowwise",
    },
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    # Which activations are zero depends on the mean and deviation of all of them.
    "gemma3n_text": {f"layers.*.mlp.{name}_proj": "replicate" for name in ("gate", "up", "down")},
}


class ShardStrings:
    """How each module or parameter of the base model is split, by name."""

    def __init__(self, config: Any) -> None:
        """Raises ModelUnsupportedError for a family without a plan."""
        family = config.model_type
        plan = {**(getattr(config, "base_model_tp_plan", None) or {}), **_OVERRIDES.get(family, {})}
        if getattr(config, "kv_lora_rank", None):
            plan |= _LATENTS
        if not plan:
            raise ModelUnsupportedError(
                f"{family} has no tensor-parallel plan, in transformers or here: serve it with --tp 1."
            )
        self._family = family
        self._rules = [(_compile(pattern), pattern, kind) for pattern, kind in plan.items()]

    def kind(self, name: str) -> str:
        """How `name` (relative to the base model) is split; WHOLE when the plan does not name it.

        Raises ModelUnsupportedError when the plan splits it in an unknown way.
        """
        for expression, pattern, kind in self._rules:
            if not expression.fullmatch(name):
                continue
            if kind not in _KNOWN:
                raise ModelUnsupportedError(
                    f"The tensor-parallel plan of {self._family} splits {pattern} as {kind!r}, which is not supported: "
                    "serve it with --tp 1."
                )
            return _KNOWN[kind]
        return WHOLE


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
