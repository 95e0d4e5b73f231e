"""An engine with a fake runner, stepped by the test."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

from headrace_proto.block_hash import BlockHasher, derive_key
from headrace_worker.core.engine import Engine
from headrace_worker.core.kv.manager import KVManager, ModelScope
from headrace_worker.core.layout import CacheGroupSpec, CacheLayout, StateSpec
from headrace_worker.core.plan import RowSampling
from headrace_worker.core.request import Request
from headrace_worker.core.scheduler import Scheduler, SchedulerLimits
from headrace_worker.core.transfer.slots import Slots
from support.worker.fake_runner import FakeRunner, PipelineRunner


class Clock:
    """A clock that is advanced by the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """An engine with the fake runner, and access to its parts."""

    engine: Engine
    runner: FakeRunner
    scheduler: Scheduler
    kv: KVManager
    clock: Clock
    random: Random = field(default_factory=lambda: Random(0))

    @property
    def indexed_digests(self) -> set[bytes]:
        """Of the contents that requests can find."""
        states = self.kv.states
        return set(self.kv.pool._by_digest) | set(states.pool._by_digest if states is not None else ())

    def request(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        salt: bytes = b"",
        stop_ids: frozenset[int] = frozenset(),
        **options: object,
    ) -> Request:
        """A request with a new id."""
        fields: dict[str, object] = {
            "attempt_id": self.random.randbytes(16),
            "tokens": list(prompt),
            "prompt_len": len(prompt),
            "max_len": len(prompt) + max_tokens,
            "sampling": RowSampling(temperature=0.0),
            "stop_ids": stop_ids,
            "chain": self.kv.start_chain(salt, ""),
            "arrival": self.clock(),
        }
        return Request(**fields | options)  # type: ignore[arg-type]

    def run(self, requests: list[Request], steps: int = 10_000) -> dict[bytes, list[int]]:
        """Submits all and steps until idle, checking integrity at every step. Returns the emitted tokens."""
        emitted: dict[bytes, list[int]] = {request.attempt_id: [] for request in requests}
        for request in requests:
            assert self.engine.submit(request) is None
        self.step_until_idle(emitted, steps)
        return emitted

    def step_until_idle(self, emitted: dict[bytes, list[int]], steps: int = 10_000) -> None:
        for _ in range(steps):
            if not self.engine.has_work:
                return
            for output in self.engine.step():
                tokens = emitted.setdefault(output.attempt_id, [])
                assert output.first_index == len(tokens) or not output.token_ids
                tokens.extend(output.token_ids)
            self.scheduler.check()
            self.clock.now += 0.01
        raise AssertionError("the engine does not become idle")


def make_layout(windows: tuple[int, ...] = (0,), block_size: int = 4, states: bool = False) -> CacheLayout:
    groups = tuple(CacheGroupSpec(i, (i,), 1, 8, window) for i, window in enumerate(windows))
    return CacheLayout(block_size, groups, 4, (StateSpec(len(windows), "recurrent", (2, 2)),) if states else ())


def make_bench(
    windows: tuple[int, ...] = (0,),
    num_blocks: int = 128,
    max_num_seqs: int = 8,
    budget: int = 32,
    block_size: int = 4,
    depth: int = 0,
    max_waiting: int = 1000,
    batches: int = 1,
    state_slots: int = 0,
    host_slots: int = 0,
    host_states: int = 0,
    files: Slots | None = None,
) -> Any:
    """A `Bench`, typed as Any because tests replace its parts.

    windows: one per cache group. budget: tokens of a step. depth: of the loop. batches: as many are in flight, if > 1.
    state_slots: of a model with recurrent layers. host_slots, host_states, files: for what is evicted,
    copied by the test.
    """
    layout = make_layout(windows, block_size, bool(state_slots))
    clock = Clock()
    scope = ModelScope("m", "r", "float32", "float32")
    kv = KVManager(layout, num_blocks, BlockHasher(derive_key(b"k")), scope, state_slots, max_num_seqs)
    scheduler = Scheduler(SchedulerLimits(max_num_seqs, budget, max_waiting, batches=batches), kv, clock)
    runner = FakeRunner(layout) if batches == 1 else PipelineRunner(layout, batches=batches)
    depth = depth if batches == 1 else batches - 1
    engine = Engine(scheduler, runner, clock, depth, host_slots=host_slots, host_states=host_states, files=files)
    return Bench(engine, runner, scheduler, kv, clock)
