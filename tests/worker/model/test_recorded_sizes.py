"""Which sizes of steps are recorded, and that large recorded steps give the tokens of those that are not."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from torch import Tensor

from headrace_worker.core.plan import RowSampling, StepPlan
from headrace_worker.core.transfer.orders import End, Order
from headrace_worker.offline import OfflineEngine, Prompt
from headrace_worker.runner.coverage import prompt_step
from headrace_worker.runner.graphs import LARGE_TOKENS, MIXED_TOKENS, fastest_sizes, largest_that_pays, step_sizes
from headrace_worker.runner.rank_runner import Runner
from support.worker.recorders import CallingRecorder
from support.worker.step_modes import same
from support.worker.tiny_models import replica_config

LONG = 1500


@pytest.mark.parametrize(
    ("launching", "per_token", "budget", "largest"),
    [
        (0.021, 4e-6, 8192, 7168),  # a small model: launches take 21 ms, a token 4 us on the device
        (0.021, 25e-6, 8192, 1024),  # 8B
        (0.021, 200e-6, 8192, MIXED_TOKENS[-1]),
        (0.021, 4e-6, 2000, 1792),
        (0.021, 4e-6, 24, MIXED_TOKENS[-1]),
    ],
)
def test_steps_are_recorded_as_far_as_launching_takes_most_of_the_time(
    launching: float, per_token: float, budget: int, largest: int
) -> None:
    measured: list[int] = []

    def launch_share(tokens: int) -> float:
        measured.append(tokens)
        return launching / max(launching, tokens * per_token)

    assert largest_that_pays(launch_share, budget) == largest
    assert all(tokens <= budget for tokens in measured)
    mixed = [size.tokens for size in step_sizes(256, largest) if not size.of_decode]
    assert mixed[0] == largest and mixed[-len(MIXED_TOKENS) :] == list(reversed(MIXED_TOKENS))
    assert set(mixed) <= set(MIXED_TOKENS + LARGE_TOKENS)


def test_few_rows_run_by_the_fastest_recording_that_holds_them() -> None:
    assert fastest_sizes({1: 1.6, 2: 1.59, 4: 1.5, 8: 1.4, 16: 1.45}) == {1: 8, 2: 8, 4: 8, 8: 8, 16: 16}
    assert fastest_sizes({1: 1.6, 2: 1.59, 4: 1.58}) == {1: 1, 2: 2, 4: 4}, "nothing that could be noise"
    assert fastest_sizes({}) == {}


def test_a_step_of_one_token_is_replayed_by_the_recording_of_eight(tiny: Callable[[str], Path]) -> None:
    class Timed(CallingRecorder):
        """Recordings of fewer than eight rows are slow."""

        def seconds(self, replay: Callable[[], None]) -> float:
            self.timed = getattr(self, "timed", -1) + 1
            return 2.0 if self.timed % 4 < 3 else 1.0

    engines = [OfflineEngine(replica_config(tiny("llama"), max_num_seqs=8)) for _ in range(2)]
    recorder = Timed()
    decode, _ = engines[1].assembly.runner.record(recorder)
    assert decode == [1, 2, 4, 8]
    prompt = Prompt([5, 6, 7], 4, RowSampling(temperature=0.8, seed=3), ignore_eos=True)
    plain, recorded = (engine.generate([prompt]) for engine in engines)
    assert same(plain, recorded)
    assert recorder.replays[:4] == [3, 0, 0, 0], "the largest is recorded first"


def test_large_recorded_steps_give_the_same_tokens(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Prompts alone and together, in steps of up to 1,280 tokens, some of which are padded by a quarter."""
    folder = tmp_path / "llama"
    shutil.copytree(tiny("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG}))
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 1280, "kv_cache_memory": 16 << 20}
    engines = [OfflineEngine(replica_config(folder, **sizes)) for _ in range(2)]
    recorder = CallingRecorder()
    runner = engines[1].assembly.runner
    runner.max_recorded = 1280
    _, mixed = runner.record(recorder)
    assert mixed == [*MIXED_TOKENS, 640, 768, 896, 1024, 1280]
    random = Random(0)
    work = [
        Prompt([random.randrange(3, 300) for _ in range(length)], 3, RowSampling(temperature=0.8, seed=length))
        for length in (600, 1030, 1279, 1400, 5, 300, 40, 900)
    ]
    plain, recorded = (
        [engine.generate([prompt])[0] for prompt in work[:4]] + engine.generate(work) for engine in engines
    )
    assert same(plain, recorded)
    large = recorder.replays[-len(MIXED_TOKENS) - 5 : -len(MIXED_TOKENS)]
    assert sum(large) >= 5 and large[0] > 0 < large[-1], large


def test_a_transfer_that_waits_for_layers_gets_each_layer_of_a_large_step(tiny: Callable[[str], Path]) -> None:
    """A replay tells of none, so such a step is not replayed; small ones are, whose layers are soon over."""

    class Watching:
        def __init__(self) -> None:
            self.layers: list[int] = []

        def begin_step(self, orders: Sequence[Order], *, computes: bool) -> Callable[[int, Tensor], None] | None:
            return lambda layer, _values: self.layers.append(layer)

        def end_step(self) -> None: ...

    engine = OfflineEngine(replica_config(tiny("llama"), max_num_seqs=8, max_num_batched_tokens=1280))
    runner, watching = engine.assembly.runner, Watching()
    assert isinstance(runner, Runner)
    runner.max_recorded = 1280
    runner.record(CallingRecorder())
    runner._kv_listener = watching
    orders: list[Order] = [End(0, 0)]
    for tokens, layers in ((640, [0, 1, 2]), (100, [])):
        plan = prompt_step(runner.layout, tokens, runner.max_len)
        runner.prepare(StepPlan(0, [], plan.inits, plan.tables, plan.work, orders))
        watching.layers.clear()
        batch = runner.prepare(StepPlan(0, [], plan.inits, plan.tables, plan.work, orders))
        assert batch is not None
        runner.forward(batch)
        assert watching.layers == layers
