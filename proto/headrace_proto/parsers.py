"""The names of the parsers that an operator may choose for a model; the router has a row for each."""

from typing import Literal

ToolParser = Literal[
    "auto", "none", "command", "deepseek_r1", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "gemma4",
    "glm45", "glm47", "gpt_oss", "granite", "hermes", "kimi_k2", "kimi_k3", "llama3_json", "llama4_pythonic", "mistral",
    "openai", "pythonic", "qwen", "qwen3_coder", "qwen3_xml", "seed_oss",
]  # fmt: skip
ReasoningParser = Literal[
    "auto", "none", "cohere", "command", "deepseek_r1", "deepseek_v3", "gemma4", "glm45", "gpt_oss", "granite",
    "kimi_k2", "kimi_k3", "magistral", "minimax", "mistral", "openai_gptoss", "qwen3", "seed_oss", "think",
]  # fmt: skip
