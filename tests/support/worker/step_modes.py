"""Engines with tiny models that run their steps in every mode."""

from collections.abc import Callable
from typing import Any

import pytest

from headrace_worker.offline import Completion, OfflineEngine
from headrace_worker.runner.graphs import MIXED_TOKENS
from support.worker.recorders import CallingRecorder
from support.worker.tiny_models import RECURRENT, replica_config

MODES: dict[str, dict[str, Any]] = {
    "one at a time": {"async_scheduling": "off"},
    "one ahead": {"async_scheduling": "on"},
    "replayed": {"async_scheduling": "off", "record": True},
    "replayed, one ahead": {"async_scheduling": "on", "record": True},
}
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.8, "seed": 2},
    {"temperature": 1.3, "top_k": 20, "seed": 3},
    {"temperature": 1.0, "min_p": 0.05, "seed": 4, "logprobs": 2},
    {"temperature": 0.9, "repetition_penalty": 1.3, "seed": 5},
    {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5, "seed": 6},
    {"temperature": 0.0, "logit_bias": ((26, 5.0), (19, -100.0))},
    {"temperature": 1.0, "seed": 7, "min_tokens": 6, "stop_token_ids": tuple(range(40, 160))},
    {"temperature": 1.0, "seed": 8, "stop_token_ids": tuple(range(40, 120))},
    {"seed": 9, "allowed_token_ids": tuple(range(30, 36)), "bad_words": ((30,), (31, 32), (33, 33))},
    {"temperature": 0.0, "bad_words": tuple((one, two) for one in range(60) for two in range(one, 60))},
]


@pytest.fixture(scope="module")
def engine_in(tiny: Callable[[str], Any]) -> Callable[..., OfflineEngine]:
    def make(family: str, mode: str, **options: Any) -> OfflineEngine:
        folder = tiny(family)
        chosen = dict(MODES[mode])
        record = chosen.pop("record", False)
        sizes: dict[str, Any] = {
            "max_num_seqs": 12,
            "max_num_batched_tokens": 40,
            "max_model_len": 128,
            "kv_cache_memory": (24 if family in RECURRENT else 4) << 20,
        }
        engine = OfflineEngine(replica_config(folder, **sizes | chosen | options))
        if record:
            decode, mixed = engine.assembly.runner.record(CallingRecorder())
            assert decode[-1] == 12 and mixed == list(MIXED_TOKENS)
        return engine

    return make


def same(one: list[Completion], other: list[Completion]) -> bool:
    """The same tokens and finish reasons, and log-probabilities equal up to the order of sums."""
    if [(c.token_ids, c.finish) for c in one] != [(c.token_ids, c.finish) for c in other]:
        return False
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a.logprobs, b.logprobs, strict=True)]
    return all(a.top_ids == b.top_ids and abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs)
