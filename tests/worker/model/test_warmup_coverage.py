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

from headrace_worker.core.plan import RowSampling
from headrace_worker.offline import OfflineEngine, Prompt
from headrace_worker.runner.coverage import OPTIONS, cover
from support.worker.tiny_models import replica_config

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

import triton.language as tl

from headrace_kernels import catalog
from headrace_kernels.gpu import attention, cache, draw, elementwise, softmax
from headrace_kernels.gpu.kernels import attend as attend_kernels
from headrace_kernels.gpu.kernels import cache as cache_kernels
from headrace_kernels.gpu.kernels import draw as draw_kernels
from headrace_kernels.gpu.kernels import elementwise as elementwise_kernels
from headrace_kernels.gpu.kernels import plan as plan_kernels
from headrace_kernels.gpu.kernels import softmax as softmax_kernels

LAUNCHERS = (attention, cache, draw, elementwise, softmax)
KERNELS = {
    attend_kernels: ["attend"],
    plan_kernels: ["plan"],
    cache_kernels: ["write_kv", "rope_write_kv"],
    elementwise_kernels: ["rms_norm", "silu_mul"],
    draw_kernels: ["draw_pieces", "decide"],
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
    yield seen


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
