"""The decoding replica is killed (SIGKILL) at any token: its streams continue elsewhere with equal tokens."""

from random import Random
from typing import Any

import pytest

from support.integration.stream_reader import StreamReader

LENGTH = 80
GREEDY: dict[str, Any] = {}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7, "top_p": 0.95, "presence_penalty": 0.4, "logprobs": 1}


@pytest.mark.parametrize("first", range(1, 65, 8))
def test_the_owner_is_killed_at_every_token(first: int, process_cluster: Any) -> None:
    """Tokens 1 to 64 over the parameters: a greedy and a seeded stream on one replica, and one on the other."""
    cluster = process_cluster
    cluster.open(await_ready=False, policy="round-robin")
    for name in ("a", "b"):
        cluster.launch(name)
    cluster.publish_and_wait()
    random = Random(first)
    for token in range(first, first + 8):
        prompt = [random.randrange(10, 300) for _ in range(20)]
        undisturbed = [StreamReader(cluster, prompt, LENGTH, options) for options in (GREEDY, SEEDED)]
        expected = [reader.end() for reader in undisturbed]
        greedy = StreamReader(cluster, prompt, LENGTH, GREEDY)
        greedy.reach(1)
        owner = cluster.owner()
        other = StreamReader(cluster, prompt, LENGTH, SEEDED)  # round-robin: on the other replica
        other.reach(1)
        seeded = StreamReader(cluster, prompt, LENGTH, SEEDED)
        greedy.reach(token)
        cluster.kill(owner)
        cluster.launch(owner)
        assert greedy.end() == expected[0], f"greedy, killed at token {token}"
        assert seeded.end() == other.end() == expected[1], f"seeded, killed at token {token}"
        assert len(seeded.logprobs) == LENGTH
        cluster.publish_and_wait()
    assert cluster.count("headrace_migrations_total") >= 8, "most kills came in the middle of both streams"
