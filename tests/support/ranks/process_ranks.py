"""Replicas whose ranks are processes of this machine; rank 0 is the test's own process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psutil

from headrace_worker.assembly.assemble import assemble
from headrace_worker.comm.rendezvous import RendezvousHost
from headrace_worker.core.config import Rendezvous, ReplicaConfig
from headrace_worker.offline import Completion, OfflineEngine
from headrace_worker.ranks.join import join_team
from support.child_environment import child_environment
from support.ranks.workloads import checked_run
from support.worker.recording_device import ReplayingDevice, replaying_device


class ForkServer:
    """The process that forks ranks, and the facts that they reported."""

    def __init__(self, model_types: Collection[str] = (), environment: Mapping[str, str] | None = None) -> None:
        """environment: changes of it."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.ranks.fork_server", *model_types],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(OMP_NUM_THREADS="1", **environment or {}),
        )
        self._updated = threading.Condition()
        self._forked: list[int] = []
        self._facts: dict[int, dict[str, Any]] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, config: ReplicaConfig, rank: int, rendezvous: Rendezvous | None, **options: Any) -> int:
        """Process id of a new rank; a rank 0 without a rendezvous opens one. `options`: see fork_server.py."""
        assert self._process.stdin is not None
        place = msgspec.msgpack.encode(rendezvous).hex() if rendezvous is not None else None
        order = {"config": msgspec.msgpack.encode(config).hex(), "rendezvous": place, "rank": rank} | options
        with self._updated:
            before = len(self._forked)
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            assert self._updated.wait_for(lambda: len(self._forked) > before, 60), "no rank process was forked"
            return self._forked[before]

    def wait_for(self, pid: int, key: str, seconds: float, value: object = None) -> Any:
        """The fact that a rank reported under `key`; fails if it is not (or not `value`) within `seconds`."""

        def has_reported() -> bool:
            facts = self._facts.get(pid, {})
            return key in facts and value in (None, facts[key])

        with self._updated:
            assert self._updated.wait_for(has_reported, seconds), (
                f"rank process {pid}: no {key} {value}: {self._facts.get(pid)}"
            )
            return self._facts[pid][key]

    def when(self, pid: int, key: str) -> float:
        """Time of a rank's report, on the monotonic clock."""
        return float(self._facts[pid][f"{key} at"])

    def ended(self, pid: int, seconds: float) -> str:
        """The outcome of a rank; fails when it does not end within `seconds`."""
        return str(self.wait_for(pid, "ended", seconds))

    def facts(self, pid: int, seconds: float = 60) -> dict[str, Any]:
        """All facts of a rank, once it is ready."""
        self.wait_for(pid, "kv_blocks", seconds)
        return self._facts[pid]

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Signals a rank, unless it has exited: its id may be reused by then."""
        if "exited" not in self._facts.get(pid, {}):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            facts = json.loads(line)
            now = time.monotonic()
            with self._updated:
                if "forked" in facts:
                    self._facts[facts["pid"]] = {}  # the id may have been used before
                    self._forked.append(facts["pid"])
                self._facts.setdefault(facts["pid"], {}).update(facts | {f"{key} at": now for key in facts})
                self._updated.notify_all()


@dataclass
class RankGroup:
    """A replica whose ranks are all processes of the fork server, so that any of them may be killed."""

    fork_server: ForkServer
    config: ReplicaConfig
    pids: list[int] = field(default_factory=list)  # by rank
    port: int = 0  # of its rendezvous

    def start(
        self,
        holds: Mapping[int, str] = {},
        absent: Collection[int] = (),
        record: Mapping[int, Mapping[str, Any]] | None = None,
        hangs: Mapping[int, int] = {},
        unread: Mapping[int, int] = {},
        **options: Any,
    ) -> None:
        """`holds`: ranks that block in a stage of their start; `absent`: ranks that never start; `options`: of rank 0.

        `record`: record steps, with the recorder options of each rank. `hangs`: ranks, and the step that does not end.
        `unread`: ranks but rank 0, and the step whose tokens they cannot read.
        """

        def recorder(rank: int) -> Mapping[str, Any] | None:
            return None if record is None else record.get(rank, {})

        first = self.fork_server.start(
            self.config, 0, None, hold=holds.get(0), hang=hangs.get(0), record=recorder(0), **options
        )
        rendezvous = msgspec.msgpack.decode(
            bytes.fromhex(self.fork_server.wait_for(first, "rendezvous", 20)), type=Rendezvous
        )
        self.pids = [first]
        self.port = rendezvous.port
        for rank in range(1, self.config.tp * self.config.pp):
            if rank not in absent:
                fault: dict[str, Any] = {"fault": options["faults"][rank]} if rank in options.get("faults", {}) else {}
                fault |= {"record": recorder(rank), "hang": hangs.get(rank), "unread": unread.get(rank)}
                self.pids.append(self.fork_server.start(self.config, rank, rendezvous, hold=holds.get(rank), **fault))

    def ready(self) -> None:
        for pid in self.pids:
            self.fork_server.facts(pid)

    def await_members(self, count: int, seconds: float = 30) -> None:
        """Waits until so many ranks have a connection to the rendezvous of rank 0."""
        deadline = time.monotonic() + seconds
        while True:
            connections = psutil.Process(self.pids[0]).net_connections("tcp")
            if (
                sum(one.laddr.port == self.port and one.status == psutil.CONN_ESTABLISHED for one in connections)
                >= count
            ):
                return
            assert time.monotonic() < deadline, "the ranks do not connect"
            time.sleep(0.05)

    def reach(self, rank: int, stage: str) -> None:
        self.fork_server.wait_for(self.pids[rank], "stage", 30, stage)

    @property
    def address(self) -> str:
        """The address of its rank 0."""
        return str(self.fork_server.facts(self.pids[0])["address"])

    def kill(self) -> None:
        """Kills all processes that are left."""
        for pid in self.pids:
            self.fork_server.signal(pid, signal.SIGKILL)
        for pid in self.pids:
            self.fork_server.wait_for(pid, "exited", 10)


@dataclass
class ProcessReplica:
    """An engine in this process with ranks in others."""

    config: ReplicaConfig
    fork_server: ForkServer
    record: Mapping[int, Mapping[str, Any]] | None = None  # as of a `RankGroup`
    offline: OfflineEngine = field(init=False)
    pids: list[int] = field(default_factory=list)  # of ranks 1, 2, …

    def __post_init__(self) -> None:
        opened = RendezvousHost("127.0.0.1")
        ranks = self.config.tp * self.config.pp
        faults = [self.record.get(rank, {}) if self.record is not None else None for rank in range(ranks)]
        self.pids = [
            self.fork_server.start(self.config, rank, opened.rendezvous, record=faults[rank])
            for rank in range(1, ranks)
        ]
        self.device = replaying_device(faults[0])
        self.device.use()
        self.team = join_team(self.config, self.device, 0, opened.rendezvous, opened)
        try:
            assembly = assemble(self.config, team=self.team, device=self.device, transfers=True)
            self.team.barrier()
        except Exception as error:
            self.team.detector.fail(str(error))
            raise
        self.offline = OfflineEngine(assembly)

    def run(
        self, prompts: Sequence[Sequence[int]], count: int, after_step: Callable[[], None] = lambda: None
    ) -> list[Completion]:
        return checked_run(self.offline, prompts, count, after_step)

    def close(self) -> None:
        """Stops in an orderly way: every other rank reports that it was stopped."""
        assert self.offline.assembly.ranks is not None
        self.offline.assembly.ranks.stop()
        for pid in self.pids:
            assert self.fork_server.ended(pid, 10) == "stopped"
        self.team.close()

    def replays(self) -> list[list[int]]:
        """For every rank, once it has ended: the number of replays of each recorded step."""
        assert isinstance(self.device, ReplayingDevice)
        return [self.device.steps.replays, *(self.fork_server.wait_for(pid, "replays", 10) for pid in self.pids)]

    def last_calls(self, rank: int) -> dict[str, list[str]]:
        """The last calls of the device of a rank but rank 0, by thread, once the rank has ended."""
        calls: dict[str, list[str]] = self.fork_server.wait_for(self.pids[rank - 1], "calls", 10)
        return calls
