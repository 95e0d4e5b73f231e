"""Figures that the project aims at on one H200."""

GOALS: dict[tuple[str, str, str], float] = {  # (section, model, figure)
    ("decode", "llama-8b", "batch 1, greedy, limit 4096"): 240.0,
    ("serving", "qwen3-0.6b", "256 requests of 100-1024, greedy"): 28_000.0,
    ("serving", "llama-8b", "256 requests of 1024 in, 1024 out, greedy"): 10_000.0,
}
