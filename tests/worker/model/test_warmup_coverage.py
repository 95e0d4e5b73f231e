"""Warm-up coverage: every variant of every Triton kernel that serving launches later is compiled before readiness.

The GPU backend's launchers run with CPU tensors, and kernels that only record for which constants Triton would compile
them; the numbers come from the CPU's backend.
"""

import inspect
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch import Tensor

from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.guide import Mask
from headrace_worker.core.layout import CacheGroupSpec, CacheLayout
from headrace_worker.core.plan import RowSampling, StepPlan, StepResult
from headrace_worker.offline import OfflineEngine, Prompt
from headrace_worker.runner.coverage import OPTIONS, cover, covering_plans
from headrace_worker.sampler import truncation

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

import triton.language as tl

from headrace_kernels import catalog
from headrace_kernels.gpu import attention, cache, elementwise, noise, softmax
from headrace_kernels.gpu.kernels import attention as attention_kernels
from headrace_kernels.gpu.kernels import cache as cache_kernels
from headrace_kernels.gpu.kernels import elementwise as elementwise_kernels
from headrace_kernels.gpu.kernels import merge as merge_kernels
from headrace_kernels.gpu.kernels import noise as noise_kernels
from headrace_kernels.gpu.kernels import softmax as softmax_kernels

LAUNCHERS = (attention, cache, elementwise, noise, softmax)
KERNELS = {
    attention_kernels: ["attend"],
    merge_kernels: ["merge"],
    cache_kernels: ["write_kv", "rope_write_kv"],
    elementwise_kernels: ["rms_norm", "silu_mul"],
    noise_kernels: ["gumbel_noise_at", "best_of_pieces", "best_of_row"],
    softmax_kernels: ["row_logsumexp"],
}
LONG = 4096


class RecordingKernel:
    """Replaces a kernel: records the constants of each launch that are part of Triton's compilation key."""

    def __init__(self, kernel: Any, seen: set[tuple[object, ...]]) -> None:
        self._name = kernel.fn.__name__
        self._parameters = inspect.signature(kernel.fn)
        options = getattr(kernel, "kwargs", None) or {"do_not_specialize": kernel.do_not_specialize}
        self._free = set(options.get("do_not_specialize") or ())
        self._seen = seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **options: Any) -> None:
            names = self._parameters.parameters
            extra = {name: options.pop(name) for name in list(options) if name not in names}
            bound = self._parameters.bind(*arguments, **options).arguments
            key = [(name, self._constant(name, value)) for name, value in bound.items()]
            self._seen.add((self._name, *key, *sorted(extra.items())))

        return launch

    def _constant(self, name: str, value: object) -> object:
        if self._parameters.parameters[name].annotation is tl.constexpr:
            return str(value)
        if isinstance(value, Tensor):
            return str(value.dtype), value.storage_offset() * value.element_size() % 16 == 0
        if isinstance(value, int) and name not in self._free:
            return value == 1, value % 16 == 0
        return type(value).__name__


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[object, ...]]]:
    """The variants that were launched so far; every op uses the GPU's launchers."""
    seen: set[tuple[object, ...]] = set()
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, RecordingKernel(getattr(module, name), seen))

    def through(launcher: Callable[..., object], real: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object, **options: object) -> object:
            launcher(*arguments, **options)
            return real(*arguments, **options)

        return run

    for op in catalog.ALL:
        launcher = next((found for module in LAUNCHERS if (found := getattr(module, op.name, None))), None)
        if launcher is not None:
            monkeypatch.setattr(op, "_best_cpu", through(launcher, op.named(op.chosen("cpu"))))
    monkeypatch.setattr(truncation, "FIRST_CANDIDATES", 1 << 30)  # a GPU uses the whole vocabulary at once
    yield seen


@pytest.fixture
def engine_of(
    tiny: Callable[[str], Path],
    replica: Callable[..., ReplicaConfig],
    add_tokenizer: Callable[[Path], None],
    tmp_path: Path,
) -> Callable[..., OfflineEngine]:
    """An engine with a model of many positions."""

    def make(family: str, **options: Any) -> OfflineEngine:
        folder = tmp_path / family
        shutil.copytree(tiny(family), folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG}))
        add_tokenizer(folder)
        sizes = {"max_num_seqs": 24, "max_num_batched_tokens": 700, "kv_cache_memory": 16 << 20, "block_size": 16}
        return OfflineEngine(replica(folder, **sizes | options))

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
    assert {name for name, *_ in covered} >= {"attend", "best_of_row", "gumbel_noise_at"}
    engine.generate(workload())
    random = Random(2)
    for length in (2, 30, 100, 900, 2300, LONG - 5):  # alone, in chunks, of all lengths
        ids = [random.randrange(3, 300) for _ in range(length)]
        engine.generate([Prompt(ids, 4, RowSampling(temperature=0.7, top_p=0.9, seed=length), ignore_eos=True)])
    assert variants == covered, sorted(map(str, variants - covered))


def test_it_resets_rows_and_pools(engine_of: Callable[..., OfflineEngine]) -> None:
    """Later requests have the same result as without it."""
    engine = engine_of("gemma2")
    expected = engine.generate(workload()[:8])
    fresh = engine_of("gemma2", max_num_seqs=23)
    runner = fresh.assembly.runner
    cover(runner, 300)
    assert not any(pool.any() for pool in runner.pools.tensors) and not runner.rows.tokens.any()
    assert [found.token_ids for found in fresh.generate(workload()[:8])] == [each.token_ids for each in expected]


@pytest.mark.parametrize(
    ("max_rows", "max_len", "budget"), [(1, 4, 8192), (2, 40, 64), (256, 131_072, 8192), (64, 64, 8192)]
)
def test_its_steps_fit_into_any_replica(max_rows: int, max_len: int, budget: int) -> None:
    layout = CacheLayout(16, tuple(CacheGroupSpec(i, (i,), 1, 8, 0) for i in range(2)), 4)
    known: dict[int, int] = {}
    for plan in covering_plans(layout, max_rows, max_len, budget):
        known |= {init.row: len(init.token_ids) for init in plan.inits}
        assert sum(work.count for work in plan.work) <= budget
        for work in plan.work:
            assert work.row < max_rows and work.start + work.count <= max_len
            assert work.start <= known[work.row]
        for update in plan.tables:
            assert len(update.block_ids) * 16 < max_len + 16 and set(update.block_ids) == {1 + update.group}
    assert plan.frees and not plan.work


def test_masks_are_passed_with_several_ranks() -> None:
    """A guided step is sampled once, before it is collected."""

    class RecordingRunner:
        layout = CacheLayout(16, (CacheGroupSpec(0, (0,), 1, 8, 0),), 4)
        max_rows, max_len = 4, 64

        def __init__(self) -> None:
            self.calls: list[str] = []

        def launch(self, plan: StepPlan) -> StepPlan:
            return plan

        def draw(self, handle: StepPlan, masks: dict[int, Mask]) -> None:
            assert handle.guided and list(masks) == [0]
            self.calls.append("draw")

        def collect(self, handle: StepPlan) -> StepResult:
            self.calls.append("collect, guided" if handle.guided else "collect")
            return StepResult(0, [], {}, {})

        def clear(self, blocks: int, rows: int = 1) -> None:
            self.calls.append(f"clear {blocks} {rows}")

    runner: Any = RecordingRunner()
    cover(runner, 64)
    assert runner.calls.count("draw") == 1
    assert runner.calls[runner.calls.index("draw") + 1] == "collect, guided"
    assert runner.calls[-1] == "clear 2 4"
