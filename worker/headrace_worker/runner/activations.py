"""Memory that a step takes besides weights and KV cache, so that the cache leaves space for it."""

from typing import Any

SAMPLER_BYTES = 32  # per row and token of the vocabulary: logits, scores, noise, and a sort with its indices
STATE_BYTES = 12  # likewise, for the lifetime of the replica: recorded logits and the counts of penalties


def step_bytes(config: Any, *, tokens: int, rows: int, vocab_size: int, element_bytes: int, tp: int = 1) -> int:
    """An upper bound for a step of `tokens` positions that samples `rows` rows; `config` is a transformers text config.

    At most the tensors of one layer are alive together: the residual stream with what is added to it, the projections
    of attention, or of the MLP. Experts process each token as often as it is routed.
    """
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads") or heads
    head_dim = _number(config, "head_dim") or hidden // heads
    attention = 3 * (heads + 2 * kv_heads) * head_dim
    per_token = 6 * hidden + -(-max(attention, _inner(config, hidden)) // tp)
    return tokens * per_token * element_bytes + rows * vocab_size * (SAMPLER_BYTES + STATE_BYTES)


def _inner(config: Any, hidden: int) -> int:
    """Elements per token inside an MLP: gate and up, their product; of experts also biases and what is gathered."""
    width = _number(config, "intermediate_size") or 4 * hidden
    routed = _number(config, "num_experts_per_tok")
    if not routed:
        return 4 * width
    shared = 4 * _number(config, "shared_expert_intermediate_size")
    experts = routed * (8 * (_number(config, "moe_intermediate_size") or width) + 4 * hidden)
    return max(4 * width, shared + experts)


def _number(config: Any, name: str) -> int:
    """0 if the family has no such attribute; the largest if layers differ."""
    found = getattr(config, name, None) or 0
    return int(max(found)) if isinstance(found, (list, tuple)) else int(found)
