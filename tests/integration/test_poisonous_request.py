"""A request that kills the replica that runs it, among others."""

import threading
import time
from queue import SimpleQueue
from random import Random
from typing import Any

import pytest

from headrace_router.core.attempt import Attempt
from headrace_router.core.replica_state import ReplicaState
from support.integration.stream_reader import StreamReader

POISON = [7] * 40
DEATHS = 3  # two among others, one alone
LENGTH = 250


def test_a_request_that_kills_replicas_ends_and_is_refused(
    process_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = process_cluster
    cluster.open(await_ready=False)
    for name in "abcd":
        cluster.launch(name)
    cluster.publish_and_wait()
    random = Random(1)
    prompts = [[random.randrange(10, 300) for _ in range(30)] for _ in range(8)]
    readers = [StreamReader(cluster, prompt, LENGTH, {}) for prompt in prompts]
    expected = [reader.end() for reader in readers]

    submit = ReplicaState.submit
    running: SimpleQueue[tuple[str, int] | None] = SimpleQueue()  # (replica of the poison, others that run there)

    def record(self: ReplicaState[Any], request: Any, *others: Any) -> Attempt:
        if list(others[-1]) == POISON:  # the prompt, which is copied into the request when that is sent
            running.put((self.replica_id, len(self.attempts)))
        return submit(self, request, *others)

    monkeypatch.setattr(ReplicaState, "submit", record)
    killed: list[tuple[str, int]] = []

    def kill() -> None:
        while (found := running.get()) is not None:
            time.sleep(0.002)  # it runs, and has not passed a trial
            cluster.kill(found[0])
            killed.append(found)

    streams = [StreamReader(cluster, prompt, LENGTH, {}) for prompt in prompts]
    for stream in streams:
        stream.reach(5)
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        answer, again = (cluster.complete(POISON, max_tokens=200) for _ in range(2))
    finally:
        running.put(None)
        killer.join()
    for refused in (answer, again):
        assert refused.status_code == 422, refused.text
        assert refused.json()["error"]["code"] == "request_quarantined"
    assert len(killed) == DEATHS and killed[2][1] == 0, f"{killed}: the third time it runs alone"
    assert [stream.end() for stream in streams] == expected
    for name, _ in killed:
        cluster.launch(name)
    cluster.publish_and_wait()
    assert cluster.complete(prompts[0], max_tokens=5).status_code == 200
    cluster.wait_for_idle(5)
