"""Replicas whose ranks are processes of this machine, rank 0 being the test's own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorders import make_recorder

from headrace_worker.assembly import assemble
from headrace_worker.config import Meeting, ReplicaConfig
from headrace_worker.offline import Completion, OfflineEngine, Prompt
from headrace_worker.parallel.meeting import MeetingHost
from headrace_worker.parallel.team import Team
from headrace_worker.plan import RowSampling


class Nursery:
    """The process that forks ranks, and what they said."""

    def __init__(self, model_types: Collection[str] = ()) -> None:
        script = Path(__file__).with_name("rank_nursery.py")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(script), *model_types],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._news = threading.Condition()
        self._born: list[int] = []
        self._said: dict[int, dict[str, Any]] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, config: ReplicaConfig, rank: int, meeting: Meeting | None, **options: Any) -> int:
        """Process id of a new rank; a rank 0 without a meeting opens one. `options` as told in rank_nursery.py."""
        assert self._process.stdin is not None
        place = msgspec.msgpack.encode(meeting).hex() if meeting is not None else None
        order = {"config": msgspec.msgpack.encode(config).hex(), "meeting": place, "rank": rank} | options
        with self._news:
            before = len(self._born)
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            assert self._news.wait_for(lambda: len(self._born) > before, 60), "no rank process came up"
            return self._born[before]

    def heard(self, pid: int, key: str, seconds: float, value: object = None) -> Any:
        """What a rank said under `key`; fails when it does not say it (or not `value`) within `seconds`."""

        def has_said() -> bool:
            said = self._said.get(pid, {})
            return key in said and value in (None, said[key])

        with self._news:
            assert self._news.wait_for(has_said, seconds), (
                f"rank process {pid}: no {key} {value}: {self._said.get(pid)}"
            )
            return self._said[pid][key]

    def when(self, pid: int, key: str) -> float:
        """When a rank said that, on the monotonic clock."""
        return float(self._said[pid][f"{key} at"])

    def ended(self, pid: int, seconds: float) -> str:
        """How a rank ended; fails when it does not within `seconds`."""
        return str(self.heard(pid, "ended", seconds))

    def facts(self, pid: int, seconds: float = 60) -> dict[str, Any]:
        """What a rank said when it was ready."""
        self.heard(pid, "kv_blocks", seconds)
        return self._said[pid]

    def signal(self, pid: int, number: signal.Signals) -> None:
        """To a rank, unless it has ended: its number may be another process' by then."""
        if "gone" not in self._said.get(pid, {}):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            facts = json.loads(line)
            now = time.monotonic()
            with self._news:
                if "born" in facts:
                    self._said[facts["pid"]] = {}  # a number that another one had, perhaps
                    self._born.append(facts["pid"])
                self._said.setdefault(facts["pid"], {}).update(facts | {f"{key} at": now for key in facts})
                self._news.notify_all()


@dataclass
class RankGroup:
    """A replica all of whose ranks are processes of the nursery, so that any of them may be killed."""

    nursery: Nursery
    config: ReplicaConfig
    pids: list[int] = field(default_factory=list)  # by rank

    def start(
        self,
        holds: Mapping[int, str] = {},
        absent: Collection[int] = (),
        record: Mapping[int, Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        """`holds`: ranks that stay in a stage of their start; `absent`: ranks that never come; `options`: of rank 0.

        `record`: steps are recorded, and what goes wrong with it on which rank.
        """

        def recorder(rank: int) -> Mapping[str, Any] | None:
            return None if record is None else record.get(rank, {})

        first = self.nursery.start(self.config, 0, None, hold=holds.get(0), record=recorder(0), **options)
        meeting = msgspec.msgpack.decode(bytes.fromhex(self.nursery.heard(first, "meeting", 20)), type=Meeting)
        self.pids = [first]
        for rank in range(1, self.config.tp * self.config.pp):
            if rank not in absent:
                fault: dict[str, Any] = {"fault": options["faults"][rank]} if rank in options.get("faults", {}) else {}
                fault["record"] = recorder(rank)
                self.pids.append(self.nursery.start(self.config, rank, meeting, hold=holds.get(rank), **fault))

    def ready(self) -> None:
        for pid in self.pids:
            self.nursery.facts(pid)

    def reach(self, rank: int, stage: str) -> None:
        self.nursery.heard(self.pids[rank], "stage", 30, stage)

    @property
    def address(self) -> str:
        """Where its rank 0 serves."""
        return str(self.nursery.facts(self.pids[0])["address"])

    def kill(self) -> None:
        """Whatever is left of it."""
        for pid in self.pids:
            self.nursery.signal(pid, signal.SIGKILL)
        for pid in self.pids:
            self.nursery.heard(pid, "gone", 10)


@dataclass
class ProcessReplica:
    """An engine in this process over ranks in others."""

    config: ReplicaConfig
    nursery: Nursery
    record: Mapping[int, Mapping[str, Any]] | None = None  # as of a `RankGroup`
    offline: OfflineEngine = field(init=False)
    pids: list[int] = field(default_factory=list)  # of ranks 1, 2, …

    def __post_init__(self) -> None:
        opened = MeetingHost("127.0.0.1")
        ranks = self.config.tp * self.config.pp
        faults = [self.record.get(rank, {}) if self.record is not None else None for rank in range(ranks)]
        self.pids = [
            self.nursery.start(self.config, rank, opened.meeting, record=faults[rank]) for rank in range(1, ranks)
        ]
        self.recorder = make_recorder(faults[0]) if faults[0] is not None else None
        self.team = Team(self.config, 0, opened.meeting, opened)
        try:
            assembly = assemble(self.config, team=self.team, recorder=self.recorder)
            self.team.settle()
        except Exception as error:
            self.team.watch.fail(str(error))
            raise
        self.offline = OfflineEngine.of(assembly)

    def run(
        self, prompts: Sequence[Sequence[int]], count: int, after_step: Callable[[], None] = lambda: None
    ) -> list[Completion]:
        """Greedy tokens; the bookkeeping is checked at every step, and everything is given back in the end."""
        greedy = RowSampling(temperature=0.0, logprobs=2)
        work = [Prompt(prompt, count, greedy, ignore_eos=True) for prompt in prompts]

        def check() -> None:
            self.offline.assembly.engine.scheduler.check()
            after_step()

        completions = self.offline.generate(work, after_step=check)
        assert [len(completion.token_ids) for completion in completions] == [count] * len(prompts)
        assert self.offline.assembly.kv.pool.used == 0
        return completions

    def close(self) -> None:
        """The orderly end: every other rank says that it was stopped."""
        assert self.offline.assembly.ranks is not None
        self.offline.assembly.ranks.stop()
        for pid in self.pids:
            assert self.nursery.ended(pid, 10) == "stopped"
        self.team.close()

    def replays(self) -> list[list[int]]:
        """Of every rank, once it has ended: how often it replayed each recorded step."""
        assert self.recorder is not None
        return [self.recorder.replays, *(self.nursery.heard(pid, "replays", 10) for pid in self.pids)]


@pytest.fixture(scope="session")
def nursery(families: dict[str, dict[str, Any]]) -> Iterator[Nursery]:
    made = Nursery({options.get("model_type", name) for name, options in families.items()})
    yield made
    made.close()


@pytest.fixture
def process_replica(
    nursery: Nursery, replica_config: Callable[..., ReplicaConfig]
) -> Callable[..., contextlib.AbstractContextManager[ProcessReplica]]:
    """A context: a replica of tp × pp processes, which must end in order."""

    @contextlib.contextmanager
    def make(
        source: object, tp: int, pp: int, record: Mapping[int, Mapping[str, Any]] | None = None, **options: Any
    ) -> Iterator[ProcessReplica]:
        fields: dict[str, Any] = {
            "kv_cache_memory": 8 << 20,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 48,
            "max_model_len": 128,
        }
        replica = ProcessReplica(replica_config(source, tp=tp, pp=pp, **fields | options), nursery, record)
        yield replica
        replica.close()

    return make


@pytest.fixture
def rank_group(
    nursery: Nursery, save_tiny: Callable[..., Path], replica_config: Callable[..., ReplicaConfig]
) -> Iterator[Callable[..., RankGroup]]:
    """Makes groups of a tiny llama, or another model; what is left of them is killed in the end."""
    made: list[RankGroup] = []

    def make(tp: int, pp: int, source: object = None, **options: Any) -> RankGroup:
        fields: dict[str, Any] = {
            "kv_cache_memory": 8 << 20,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 48,
            "max_model_len": 128,
        }
        config = replica_config(source or save_tiny("llama"), tp=tp, pp=pp, **fields | options)
        made.append(RankGroup(nursery, config))
        return made[-1]

    yield make
    for group in made:
        group.kill()
