"""Warm-up coverage: every variant of every Triton kernel that serving launches later is compiled before readiness.

The GPU backend's launchers run with CPU tensors, and kernels that only record for which constants Triton would compile
them; the numbers come from the CPU's backend.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace_worker.core.plan import RowSampling
from headrace_worker.offline import OfflineEngine, Prompt
from headrace_worker.runner.coverage import OPTIONS, cover
from support.worker.tiny_models import replica_config

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from support.kernels.recording_kernels import recorded_kernels

LONG = 4096


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> set[tuple[object, ...]]:
    """The variants that were launched so far; every op uses the GPU's launchers."""
    seen: set[tuple[object, ...]] = set()
    recorded_kernels(monkeypatch, seen.add)
    return seen


@pytest.fixture
def engine_of(tiny: Callable[[str], Path], tmp_path: Path) -> Callable[..., OfflineEngine]:
    """An engine with a model of many positions."""

    def make(family: str, **options: Any) -> OfflineEngine:
        folder = tmp_path / family
        shutil.copytree(tiny(family), folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG}))
        sizes = {"max_num_seqs": 24, "max_num_batched_tokens": 700, "kv_cache_memory": 16 << 20, "block_size": 16}
        return OfflineEngine(replica_config(folder, **sizes | options))

    return make


def workload() -> list[Prompt]:
    """Prompts of very different lengths, many of which run together, and some alone at the end."""
    random = Random(1)
    work = []
    for index in range(60):
        length = random.choice([1, 3, 17, 40, 150, 400])
        ids = [random.randrange(3, 300) for _ in range(length)]
        work.append(Prompt(ids, random.randrange(1, 6), OPTIONS[index % len(OPTIONS)], ignore_eos=True))
    return work


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": "bfloat16"}),
        ("qwen3", {"dtype": "float16"}),
        ("gemma2", {"dtype": "bfloat16"}),
        ("mistral", {}),
        ("deepseek_v3", {"dtype": "bfloat16"}),
        ("qwen3_5_text", {"dtype": "bfloat16"}),
        ("bamba", {}),
    ],
)
def test_nothing_new_is_compiled_once_it_serves(
    family: str,
    options: dict[str, Any],
    engine_of: Callable[..., OfflineEngine],
    variants: set[tuple[object, ...]],
) -> None:
    engine = engine_of(family, **options)
    variants.clear()  # launched by loading and timed steps
    cover(engine.assembly.runner, 700)
    covered = set(variants)
    assert {name for name, *_ in covered} >= {"attend", "plan", "decide"}
    engine.generate(workload())
    random = Random(2)
    for length in (2, 30, 100, 900, 2300, LONG - 5):  # alone, in chunks, of all lengths
        ids = [random.randrange(3, 300) for _ in range(length)]
        engine.generate([Prompt(ids, 4, RowSampling(temperature=0.7, top_p=0.9, seed=length), ignore_eos=True)])
    assert variants == covered, sorted(map(str, variants - covered))
