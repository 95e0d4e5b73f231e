"""Every sampling option of the engine, separately and combined."""

from typing import Any

SAMPLING_OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {"260": 5.0, "198": -100.0}},
    {"temperature": 2.0, "top_p": 0.5, "top_k": 100, "min_p": 0.01, "min_tokens": 10, "logprobs": 5},
    {"temperature": 0.0, "repetition_penalty": 1.2, "stop": ["zzz"], "min_tokens": 4},
    {"temperature": 0.9, "bad_words": ["the", "of a"], "allowed_token_ids": list(range(100, 4000))},
]
