"""A router in front of replicas that are processes, so that they can be killed; the test acts as the controller."""

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace_proto.control_pb2 import Member, MemberList
from headrace_proto.replica_pb2 import REPLICA_STATE_READY, Load, ReplicaIdentity, Role
from headrace_worker.core.config import ReplicaConfig
from support.integration.in_process_cluster import InProcessCluster
from support.ranks.process_ranks import ForkServer, RankGroup


class ProcessCluster(InProcessCluster):
    """Generations of replicas: a killed replica is replaced by the next generation of the same id."""

    def __init__(self, folder: Path, fork_server: ForkServer) -> None:
        super().__init__(folder)
        self._fork_server = fork_server
        self.groups: dict[str, RankGroup] = {}
        self._generations: dict[str, int] = {}
        self.roles: dict[str, Role] = {}
        self._version = 0

    def launch(
        self, name: str, role: Role = Role.ROLE_BOTH, fork_server: ForkServer | None = None, **options: Any
    ) -> None:
        """Starts a replica, or its next generation; `publish` sends it to the router.

        fork_server: another one than the cluster's.
        """
        self._generations[name] = self._generations.get(name, 0) + 1
        self.roles[name] = role
        fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "cpu_threads": 1, "kv_cache_memory": 8 << 20}
        config = ReplicaConfig(
            replica_id=name,
            generation=self._generations[name],
            model="tiny",
            source=str(self._folder),
            **fields | options,
        )
        self.groups[name] = RankGroup(fork_server or self._fork_server, config)
        self.groups[name].start()

    def share_replicas(self, other: "ProcessCluster") -> None:
        """The replicas of another one are also this one's."""
        self.groups, self._generations, self.roles = other.groups, other._generations, other.roles

    def publish(self, addresses: Mapping[str, str] = {}) -> None:
        """Sends the member list of a controller with all launched replicas ready. addresses: of proxies, by replica."""
        for group in self.groups.values():
            group.ready()
        self._version += 1
        members = [
            Member(
                identity=ReplicaIdentity(replica_id=name, generation=self._generations[name], role=self.roles[name]),
                address=addresses.get(name, group.address),
                state=REPLICA_STATE_READY,
            )
            for name, group in self.groups.items()
        ]
        listed = MemberList(epoch=b"test", version=self._version, members=members)
        assert self._router is not None
        self._loop.call_soon_threadsafe(self._router.services.fleet.update, listed)

    def publish_and_wait(self, addresses: Mapping[str, str] = {}) -> None:
        """Publishes, and waits until the router is connected to every replica."""
        self.publish(addresses)
        expected = {addresses.get(name, group.address) for name, group in self.groups.items()}
        assert self._router is not None
        fleet = self._router.services.fleet
        self.eventually(
            lambda: {link.address for link in fleet.replicas if link.takes_work and not link.stalled} == expected
        )

    def owner(self, requests: int = 1) -> str:
        """The only replica with this number of attempts of the router."""
        assert self._router is not None
        found = [link.replica_id for link in self._router.services.fleet.replicas if len(link.attempts) == requests]
        assert len(found) == 1, found
        return found[0]

    def load(self, name: str) -> Load:
        """The last reported load of a replica."""
        assert self._router is not None
        (link,) = [link for link in self._router.services.fleet.replicas if link.replica_id == name]
        return link.load

    def number(self, name: str) -> int:
        """A gauge of the router."""
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
        """Whether no replica has running or queued requests, or blocks in use."""
        assert self._router is not None
        loads = [link.load for link in self._router.services.fleet.replicas if link.connected]
        return not any(load.running or load.waiting or load.kv_usage for load in loads)

    def wait_for_idle(self, seconds: float) -> None:
        """Fails if a replica is not idle in time, with the last load of each, its age, and stacks of its threads."""
        deadline = time.monotonic() + seconds
        while not self.idle:
            if time.monotonic() > deadline:
                loads = {name: f"{self.load(name)} ({self.heartbeat_age(name):.2f} s ago)" for name in self.groups}
                for group in self.groups.values():
                    self._fork_server.signal(group.pids[0], signal.SIGUSR2)
                    time.sleep(0.3)  # on stderr, one after the other
                pytest.fail("\n".join(f"{name}: {load}" for name, load in loads.items()))
            time.sleep(0.02)

    def heartbeat_age(self, name: str) -> float:
        """Seconds since a replica's last heartbeat."""
        assert self._router is not None
        (link,) = [link for link in self._router.services.fleet.replicas if link.replica_id == name]
        return link.heartbeat.seconds

    def free_blocks(self) -> dict[str, int]:
        """By replica: blocks available to a new request."""
        assert self._router is not None
        return {link.replica_id: link.load.free_blocks for link in self._router.services.fleet.replicas}

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
