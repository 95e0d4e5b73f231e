"""A router in front of replicas that are processes, so that they can be killed; the test acts as the controller."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace_proto.control_pb2 import Member, MemberList
from headrace_proto.replica_pb2 import REPLICA_STATE_READY, ReplicaIdentity, Role
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

    def launch(self, name: str, role: Role = Role.ROLE_BOTH, **options: Any) -> None:
        """Starts a replica, or its next generation; `publish_and_wait` sends it to the router."""
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
        self.groups[name] = RankGroup(self._fork_server, config)
        self.groups[name].start()

    def publish_and_wait(self) -> None:
        """Sends the member list of a controller with all launched replicas ready, and waits for the connections."""
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
        fleet = self._router.services.fleet
        self._loop.call_soon_threadsafe(fleet.update, listed)
        expected = {group.address for group in self.groups.values()}
        self.eventually(
            lambda: {link.address for link in fleet.replicas if link.takes_work and not link.stalled} == expected
        )

    def owner(self) -> str:
        """The only replica with an attempt of the router."""
        assert self._router is not None
        (found,) = [link.replica_id for link in self._router.services.fleet.replicas if len(link.attempts) == 1]
        return found

    def count(self, name: str) -> int:
        """A counter of the router's /metrics, over all labels."""
        with self.client() as client:
            lines = client.get("/metrics").text.split("\n")
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{")))

    def wait_for_idle(self, seconds: float) -> None:
        """Until no replica has running or queued requests, or blocks in use."""
        assert self._router is not None
        fleet = self._router.services.fleet

        def idle() -> bool:
            loads = [link.load for link in fleet.replicas if link.connected]
            return not any(load.running or load.waiting or load.kv_usage for load in loads)

        self.eventually(idle, seconds)

    def kill(self, name: str) -> None:
        os.kill(self.groups[name].pids[0], signal.SIGKILL)

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
