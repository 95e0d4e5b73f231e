"""Streams leave a replica that is short of memory for one that has room, and take their KV blocks along."""

from random import Random
from typing import Any

from listener import Listener

LENGTH = 350


def test_streams_move_to_a_replica_that_comes_with_room(process_house: Any) -> None:
    house = process_house
    house.open(await_ready=False)
    small = {"kv_cache_memory": 1 << 19, "max_model_len": 512}  # room for about three of the streams
    house.launch("a", **small)
    house.settle()
    random = Random(1)
    prompts = [[random.randrange(10, 300) for _ in range(60)] for _ in range(6)]
    options: list[dict[str, Any]] = [{"temperature": index % 2, "seed": index} for index in range(6)]
    pairs = list(zip(prompts, options, strict=True))
    expected = [Listener(house, prompt, LENGTH, option).end() for prompt, option in pairs]
    streams = [Listener(house, prompt, LENGTH, option) for prompt, option in pairs]
    for stream in streams[:3]:
        stream.reach(30)
    house.launch("b", **small)
    house.settle()
    assert [stream.end() for stream in streams] == expected
    assert house.count("headrace_rebalancings_total") > 0 and house.count("headrace_migrations_total") == 0
    assert house.count("headrace_kv_fetched_bytes_total", "b") > 0
    house.wait_for_idle(5)
