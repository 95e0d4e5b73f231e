"""A router over replicas that are processes, so that they can be killed; the test plays the controller."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from house import SECRET, House

from headrace_proto.control_pb2 import Member, MemberList
from headrace_proto.replica_pb2 import REPLICA_STATE_READY, Load, ReplicaIdentity, Role
from headrace_worker.config import ReplicaConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "worker"))
sys.path.insert(0, str(Path(__file__).parents[1] / "worker" / "parallel"))
from process_ranks import Nursery, RankGroup


class ProcessHouse(House):
    """Generations of replicas: one that was killed is replaced by the next of the same id."""

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        super().__init__(folder)
        self._nursery = nursery
        self.groups: dict[str, RankGroup] = {}
        self._generations: dict[str, int] = {}
        self.roles: dict[str, Role] = {}
        self._version = 0

    def launch(self, name: str, role: Role = Role.ROLE_BOTH, **options: Any) -> None:
        """Starts a replica, or its next generation; `publish` tells the router."""
        self._generations[name] = self._generations.get(name, 0) + 1
        self.roles[name] = role
        fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "cpu_threads": 1, "kv_cache_memory": 8 << 20}
        config = ReplicaConfig(
            replica_id=name,
            generation=self._generations[name],
            model="tiny",
            source=str(self._folder),
            secret=SECRET,
            **fields | options,
        )
        self.groups[name] = RankGroup(self._nursery, config)
        self.groups[name].start()

    def publish(self) -> None:
        """The member list as a controller has it when all that were launched are ready."""
        for group in self.groups.values():
            group.ready()
        self._version += 1
        members = [
            Member(
                identity=ReplicaIdentity(replica_id=name, generation=self._generations[name], role=self.roles[name]),
                address=group.address,
                state=REPLICA_STATE_READY,
            )
            for name, group in self.groups.items()
        ]
        listed = MemberList(epoch=b"test", version=self._version, members=members)
        assert self._router is not None
        self._loop.call_soon_threadsafe(self._router.services.fleet.update, listed)

    def settle(self) -> None:
        """Publishes, and waits until the router has a line to each."""
        self.publish()
        wanted = {group.address for group in self.groups.values()}
        assert self._router is not None
        fleet = self._router.services.fleet
        self.eventually(lambda: {link.address for link in fleet.links if link.ready or link.ready_source} == wanted)

    def owner(self, requests: int = 1) -> str:
        """The replica on which so many attempts of the router run."""
        assert self._router is not None
        found = [link.replica_id for link in self._router.services.fleet.links if len(link.attempts) == requests]
        assert len(found) == 1, found
        return found[0]

    def load(self, name: str) -> Load:
        """What a replica last said."""
        assert self._router is not None
        (link,) = [link for link in self._router.services.fleet.links if link.replica_id == name]
        return link.load

    def number(self, name: str) -> int:
        """A gauge of the router itself."""
        with self.client() as client:
            lines = client.get("/metrics").text.split("\n")
        return int(sum(float(line.split()[-1]) for line in lines if line.partition("{")[0].partition(" ")[0] == name))

    def count(self, name: str, replica: str = "") -> int:
        """A counter of the router's /metrics, over all labels or of one replica."""
        with self.client() as client:
            lines = client.get("/metrics").text.split("\n")
        found = [line for line in lines if line.startswith(f"{name}{{") and (not replica or f'"{replica}"' in line)]
        return int(sum(float(line.split()[-1]) for line in found))

    @property
    def idle(self) -> bool:
        """Whether no replica runs, queues or holds anything."""
        assert self._router is not None
        loads = [link.load for link in self._router.services.fleet.links if link.connected]
        return not any(load.running or load.waiting or load.kv_usage for load in loads)

    def wait_for_idle(self, seconds: float) -> None:
        """Fails when a replica still holds something then: with what each said last, when, and what its threads do."""
        deadline = time.monotonic() + seconds
        while not self.idle:
            if time.monotonic() > deadline:
                said = {name: f"{self.load(name)} (said {self.silence(name):.2f} s ago)" for name in self.groups}
                for group in self.groups.values():
                    self._nursery.signal(group.pids[0], signal.SIGUSR2)
                    time.sleep(0.3)  # on stderr, one after the other
                pytest.fail("\n".join(f"{name}: {load}" for name, load in said.items()))
            time.sleep(0.02)

    def silence(self, name: str) -> float:
        """Seconds since a replica's last heartbeat."""
        assert self._router is not None
        (link,) = [link for link in self._router.services.fleet.links if link.replica_id == name]
        return link.silence

    def free_blocks(self) -> dict[str, int]:
        """By replica: blocks that a new request could get."""
        assert self._router is not None
        return {link.replica_id: link.load.free_blocks for link in self._router.services.fleet.links}

    def kill(self, name: str) -> None:
        os.kill(self.groups[name].pids[0], signal.SIGKILL)

    def pause(self, name: str) -> None:
        os.kill(self.groups[name].pids[0], signal.SIGSTOP)

    def resume(self, name: str) -> None:
        os.kill(self.groups[name].pids[0], signal.SIGCONT)

    def stream(self, prompt: Sequence[int], **options: Any) -> Iterator[dict[str, Any]]:
        """The choices of a streamed completion, one by one."""
        body: dict[str, Any] = {"model": "tiny", "prompt": list(prompt), "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        with (
            self.client() as client,
            client.stream("POST", "/v1/completions", json=body | options | {"stream": True}) as answer,
        ):
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    yield from chunk["choices"]

    def close(self) -> None:
        super().close()
        for group in self.groups.values():
            group.kill()
