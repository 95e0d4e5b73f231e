"""Nothing passes between one router and one replica, in one direction; another router is connected to both."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from support.integration.one_way_cut import Direction, OneWayCut
from support.integration.process_cluster import ProcessCluster
from support.integration.stream_reader import StreamReader
from support.members import secret_file

LENGTH = 250


@pytest.fixture
def other_router(process_cluster: Any, tiny_folder: Path, fork_server: Any) -> Iterator[ProcessCluster]:
    """A second router in front of the same replicas."""
    made = ProcessCluster(tiny_folder, fork_server)
    yield made
    made.groups = {}  # they are those of the first one
    made.close()


@pytest.mark.parametrize("direction", ["to the replica", "to the router"])
def test_streams_move_and_the_other_router_is_untouched(
    process_cluster: Any, other_router: ProcessCluster, direction: Direction
) -> None:
    cluster, other = process_cluster, other_router
    cluster.open(await_ready=False)
    for name in "ab":
        cluster.launch(name)
    other.open(await_ready=False, secret_file=secret_file())
    other.share_replicas(cluster)
    other.publish_and_wait()
    cut = OneWayCut(cluster.groups["a"].address)
    cluster.publish_and_wait({"a": cut.address})
    random = Random(1)
    prompts = [[random.randrange(10, 300) for _ in range(30)] for _ in range(4)]
    options: dict[str, Any] = {"temperature": 0}
    readers = [StreamReader(other, prompt, LENGTH, options) for prompt in prompts]
    expected = [reader.end() for reader in readers]
    mine = [StreamReader(cluster, prompt, LENGTH, options) for prompt in prompts]
    others = [StreamReader(other, prompt, LENGTH, options) for prompt in prompts]
    for stream in mine + others:
        stream.reach(5)
    assert len(cluster.ready) == 2
    cut.cut(direction)
    assert [stream.end() for stream in mine] == expected
    assert [stream.end() for stream in others] == expected
    assert other.count("headrace_migrations_total") == 0 and len(other.ready) == 2
    if direction == "to the router":
        assert cluster.count("headrace_migrations_total") > 0 and cluster.ready == ["b"]
    assert cluster.complete(prompts[0], max_tokens=50).json()["choices"][0]["token_ids"] == expected[0][0][:50]
    cut.heal()
    cluster.eventually(lambda: len(cluster.ready) == 2, 10)
    assert cluster.complete(prompts[0], max_tokens=5).status_code == 200
    cluster.wait_for_idle(5)
    cut.close()
