"""The defaults of honoured fields, as text for docs/api.md. Data only."""

from headrace_router.core.sampling_options import API_DEFAULTS

DEFAULTS: dict[str, str] = {
    **{name: f"the model's, else {value:g}" for name, value in API_DEFAULTS.items()},
    "best_of": "n",
    "echo": "false",
    "ignore_eos": "false",
    "include_usage": "false",
    "logit_bias": "none",
    "logprobs": "none",
    "max_completion_tokens": "max_tokens",
    "max_tokens": "the model's, else the rest of the context (chat) or 16 (completions)",
    "metadata": "none",
    "min_tokens": "0",
    "n": "1",
    "name": "none",
    "prompt_cache_key": "none",
    "return_token_ids": "false",
    "safety_identifier": "none",
    "seed": "random",
    "session_id": "none",
    "stop": "none",
    "stop_token_ids": "none",
    "stream": "false",
    "stream_options": "none",
    "top_logprobs": "0",
    "user": "none",
}
