"""Real processes of this release and of the next one serve together (docs/reliability.md I20)."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet

from headrace_proto.replica_pb2 import Role
from support.next_release import NextRelease
from support.ranks.process_ranks import ForkServer

PROMPTS = [[10 + number, 11, 12, 13, 14] for number in range(2)]
TOKENS = 1000


@pytest.fixture(scope="module")
def next_release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """The process from which replicas of the next release are forked."""
    made = ForkServer({"llama"}, NextRelease(tmp_path_factory.mktemp("next")).environment)
    yield made
    made.close()


def _complete(cluster: Any, prompt: list[int]) -> list[int]:
    answer = cluster.complete(prompt, max_tokens=TOKENS)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


class _Stream:
    """A streamed completion in a thread."""

    def __init__(self, cluster: Any, prompt: list[int]) -> None:
        self.tokens: list[int] = []
        self._thread = threading.Thread(target=self._read, args=(cluster, prompt))
        self._thread.start()

    def _read(self, cluster: Any, prompt: list[int]) -> None:
        for choice in cluster.stream(prompt, max_tokens=TOKENS):
            self.tokens += choice["token_ids"]

    def all_tokens(self) -> list[int]:
        self._thread.join(60)
        return self.tokens


def test_streams_continue_on_a_replica_of_another_release(process_cluster: Any, next_release: ForkServer) -> None:
    cluster = process_cluster
    servers = {"this": None, "next": next_release}
    cluster.open(await_ready=False, rebalancing="off", policy="round-robin")
    for name, server in servers.items():
        cluster.launch(name, fork_server=server)
    cluster.publish_and_wait()
    assert len(UnknownFieldSet(cluster.load("next"))) == 1 and not len(UnknownFieldSet(cluster.load("this")))
    expected = [_complete(cluster, prompt) for prompt in PROMPTS]
    for moves, (lost, server) in enumerate(servers.items(), 1):
        streams = [_Stream(cluster, prompt) for prompt in PROMPTS]
        cluster.eventually(lambda: all(len(stream.tokens) > 20 for stream in streams))  # noqa: B023
        fleet = cluster._router.services.fleet
        assert [len(link.attempts) for link in fleet.replicas] == [1, 1], "one at each"
        cluster.kill(lost)
        assert [stream.all_tokens() for stream in streams] == expected
        assert cluster.count("headrace_migrations_total") == moves
        cluster.launch(lost, fork_server=server)
        cluster.publish_and_wait()


@pytest.mark.parametrize("prefills", ["this", "next"])
def test_blocks_are_fetched_from_a_replica_of_another_release(
    process_cluster: Any, next_release: ForkServer, prefills: str
) -> None:
    cluster = process_cluster
    cluster.open(await_ready=False, disaggregation="always")
    for name, server in {"this": None, "next": next_release}.items():
        role = Role.ROLE_PREFILL if name == prefills else Role.ROLE_DECODE
        cluster.launch(name, role, fork_server=server)
    cluster.publish_and_wait()
    fetched = [_complete(cluster, [10 + number] * 200) for number in range(3)]
    cluster.eventually(lambda: cluster.count("headrace_kv_fetches_total") >= 3)
    assert cluster.count("headrace_kv_fetches_failed_total") == 0
    for group in cluster.groups.values():
        group.kill()
    cluster.groups.clear()
    cluster.launch("alone")
    cluster.publish_and_wait()
    assert [_complete(cluster, [10 + number] * 200) for number in range(3)] == fetched
