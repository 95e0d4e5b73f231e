"""The replica that answers is killed −9 at any token: its streams go on elsewhere as if nothing had been (I1, I2)."""

from random import Random
from typing import Any

import pytest
from listener import Listener

LENGTH = 80
GREEDY: dict[str, Any] = {}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7, "top_p": 0.95, "presence_penalty": 0.4, "logprobs": 1}


@pytest.mark.parametrize("first", range(1, 65, 8))
def test_the_owner_is_killed_at_every_token(first: int, process_house: Any) -> None:
    """Tokens 1 to 64 over the parameters: a greedy and a seeded stream of the same replica, beside others elsewhere."""
    house = process_house
    house.open(await_ready=False, policy="round-robin")
    for name in ("a", "b"):
        house.launch(name)
    house.settle()
    random = Random(first)
    for token in range(first, first + 8):
        prompt = [random.randrange(10, 300) for _ in range(20)]
        undisturbed = [Listener(house, prompt, LENGTH, options) for options in (GREEDY, SEEDED)]
        expected = [listener.end() for listener in undisturbed]
        greedy = Listener(house, prompt, LENGTH, GREEDY)
        greedy.reach(1)
        owner = house.owner()
        other = Listener(house, prompt, LENGTH, SEEDED)  # the next in turn
        other.reach(1)
        seeded = Listener(house, prompt, LENGTH, SEEDED)
        greedy.reach(token)
        house.kill(owner)
        house.launch(owner)
        assert greedy.end() == expected[0], f"greedy, killed at token {token}"
        assert seeded.end() == other.end() == expected[1], f"seeded, killed at token {token}"
        assert len(seeded.logprobs) == LENGTH
        house.settle()
    assert house.count("headrace_migrations_total") >= 8, "most kills came in the middle of both streams"
