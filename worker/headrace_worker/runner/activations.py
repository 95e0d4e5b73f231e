"""What a step takes beside weights and KV cache, so that the cache leaves room for it."""

from typing import Any

SAMPLER_BYTES = 32  # per row and token of the vocabulary: logits, scores, noise, and a sort with its indices
STATE_BYTES = 12  # likewise, for as long as the replica lives: recorded logits and what penalties count


def step_bytes(config: Any, *, tokens: int, rows: int, vocab_size: int, element_bytes: int, tp: int = 1) -> int:
    """An upper bound for a step of `tokens` positions in which `rows` draw; `config` is a transformers text config.

    Tensors of one layer are alive together at most: the residual stream with what is added to it, the projections of
    attention, or of the MLP. Experts see each token as often as it is routed.
    """
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    stream = 6 * int(config.hidden_size)
    attention = -(-3 * (heads + 2 * kv_heads) * head_dim // tp)
    per_token = stream + max(attention, -(-_inner(config) // tp))
    return tokens * per_token * element_bytes + rows * vocab_size * (SAMPLER_BYTES + STATE_BYTES)


def _inner(config: Any) -> int:
    """Elements per token inside an MLP: gate and up, their product; of experts also biases and what is gathered."""
    dense = 4 * int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    routed = int(getattr(config, "num_experts_per_tok", None) or 0)
    if not routed:
        return dense
    width = int(getattr(config, "moe_intermediate_size", None) or dense // 4)
    shared = 4 * int(getattr(config, "shared_expert_intermediate_size", None) or 0)
    return max(dense, shared + routed * (8 * width + 4 * int(config.hidden_size)))
