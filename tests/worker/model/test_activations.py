"""The memory reserved for steps: no step of any family takes more than predicted."""

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.plan import RowInit, RowSampling, StepPlan, TableUpdate, Work
from headrace_worker.model.load import LoadedModel, load
from headrace_worker.runner import Runner
from headrace_worker.runner.activations import step_bytes
from headrace_worker.runner.pools import KVPools

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 3000,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 64},
    "gemma2": {"head_dim": 64},
    "phi3": {},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "head_dim": 32},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 4, "head_dim": 32, "max_position_embeddings": 131072},
}
MIXED = RowSampling(temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1)


@pytest.fixture(params=FAMILIES)
def model(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    replica: Callable[..., ReplicaConfig],
    add_tokenizer: Callable[[Path], None],
) -> LoadedModel:
    config = AutoConfig.for_model(request.param, **SHAPE | FAMILIES[request.param])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    return load(replica(tmp_path, block_size=16))


def _step(model: LoadedModel, tokens: int, rows: int, sampling: RowSampling) -> tuple[Runner, StepPlan]:
    """A step of `tokens` positions, distributed over `rows` rows."""
    each, groups = tokens // rows, len(model.layout.groups)
    entries = -(-each // model.layout.block_size)
    pools = KVPools.of(model, 1 + groups * rows * entries)
    runner = Runner(model, pools, max_rows=rows, max_len=each + 1)
    inits = [RowInit(row, 1, [3] * each, each, sampling) for row in range(rows)]
    places = [(row, group) for row in range(rows) for group in range(groups)]
    tables = [
        TableUpdate(group, row, 0, list(range(1 + place * entries, 1 + (place + 1) * entries)))
        for place, (row, group) in enumerate(places)
    ]
    return runner, StepPlan(1, [], inits, tables, [Work(row, 0, each, True) for row in range(rows)])


def _peak(runner: Runner, plan: StepPlan) -> int:
    """Peak bytes of tensors allocated during a step."""
    gc.collect()  # tensors of earlier tests, released in the step, would count against it
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        runner.collect(runner.launch(plan))
    events: list[Any] = profile.profiler.kineto_results.events()
    now = peak = 0
    for change in sorted((entry for entry in events if entry.name() == "[memory]"), key=lambda entry: entry.start_ns()):
        now += change.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize(("tokens", "rows", "sampling"), [(1024, 4, RowSampling(temperature=0.0)), (128, 64, MIXED)])
def test_the_prediction_is_an_upper_bound_and_not_too_high(
    model: LoadedModel, tokens: int, rows: int, sampling: RowSampling
) -> None:
    peak = _peak(*_step(model, tokens, rows, sampling))
    predicted = step_bytes(model.config, tokens=tokens, rows=rows, vocab_size=model.vocab_size, element_bytes=4)
    assert peak <= predicted <= 4 * peak


def test_an_8b_model_leaves_some_gibibytes() -> None:
    """Llama 3.1 8B at 8,192 tokens and 256 rows; ranks share the inside of a layer, each has all logits."""
    config = SimpleNamespace(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128
    )
    sizes: dict[str, Any] = {"tokens": 8192, "rows": 256, "vocab_size": 128_256, "element_bytes": 2}
    alone, shared = (step_bytes(config, tp=tp, **sizes) for tp in (1, 2))
    assert 2 << 30 < shared < alone < 3 << 30
