"""Streams move from a replica that is short of memory to one with free blocks, with their KV blocks."""

from random import Random
from typing import Any

from support.integration.stream_reader import StreamReader
from support.integration.throttle import Throttle

LENGTH = 350


def test_streams_move_to_a_new_replica_with_free_blocks(process_cluster: Any) -> None:
    cluster = process_cluster
    cluster.open(await_ready=False)
    small = {"kv_cache_memory": 1 << 19, "max_model_len": 512}  # enough for about three of the streams
    cluster.launch("a", **small)
    cluster.publish_and_wait()
    random = Random(1)
    prompts = [[random.randrange(10, 300) for _ in range(60)] for _ in range(6)]
    options: list[dict[str, Any]] = [{"temperature": index % 2, "seed": index} for index in range(6)]
    pairs = list(zip(prompts, options, strict=True))
    expected = [StreamReader(cluster, prompt, LENGTH, option).end() for prompt, option in pairs]
    cluster.launch("b", **small)
    # On a fast machine the blocks of a stream that waits would be overwritten before it moves.
    throttle = Throttle(cluster.groups["a"].pids[0], share=0.1)
    try:
        streams = [StreamReader(cluster, prompt, LENGTH, option) for prompt, option in pairs]
        for stream in streams[:3]:
            stream.reach(30)
        cluster.publish_and_wait()
        cluster.eventually(lambda: cluster.count("headrace_rebalancings_total") > 0)
    finally:
        throttle.close()
    assert [stream.end() for stream in streams] == expected
    assert cluster.count("headrace_rebalancings_total") > 0 and cluster.count("headrace_migrations_total") == 0
    assert cluster.count("headrace_kv_fetched_bytes_total", "b") > 0
    cluster.wait_for_idle(5)
