"""A replica whose role changes while it runs: whether it computes prompts for others, and that no request fails."""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace_proto.role import Role, UnknownRoleError
from headrace_worker.replica import Replica
from support.members import MEMBER
from support.worker.tiny_models import replica_config


@pytest.fixture
def replica() -> Iterator[Callable[..., tuple[Replica, str]]]:
    """replica(folder, role): one in this process, and its address."""
    made: list[Replica] = []

    def make(folder: Path, role: str) -> tuple[Replica, str]:
        fields = {"kv_cache_memory": 8 << 20, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
        made.append(
            Replica(
                replica_config(folder, tp=1, pp=1, role=Role(role), replica_id=role, **fields),
                MEMBER.secret,
            )
        )
        return made[-1], made[-1].start().address

    yield make
    for one in made:
        one.stop()


def test_prompts_are_computed_for_others_unless_the_role_is_decode(
    replica: Callable[..., tuple[Replica, str]],
    router_client: Any,
    save_tiny: Callable[..., Path],
    check_oracle: Callable[..., None],
) -> None:
    """A router may not know the new role yet, and name a source that has another role now."""
    folder = save_tiny("llama")
    source, address = replica(folder, "decode")
    _, at = replica(folder, "both")
    target = router_client.connect(at)
    own = router_client.connect(address)

    def ask(first: int) -> int:
        """The number of grants of the source, for a new prompt of the target."""
        before = own.load.counters.grants
        prompt = [(first + 7 * place) % 290 + 5 for place in range(48)]
        check_oracle(folder, [prompt], [target.submit(prompt, 4, address).wait()])
        check_oracle(folder, [prompt[:3]], [own.submit(prompt[:3], 2).wait()])  # its answer brings the current counters
        return int(own.load.counters.grants - before)

    assert ask(1) == 0
    assert target.load.counters.fetches_failed == 1
    for place, role in enumerate(("prefill", "both")):
        source.set_role(role)
        assert ask(20 + place) == 1
    source.set_role("decode")
    assert ask(40) == 0
    assert (target.load.counters.fetches, target.load.counters.fetches_failed) == (4, 2)
    with pytest.raises(UnknownRoleError, match="'encode'"):
        source.set_role("encode")


def test_a_role_that_changes_keeps_the_cache(
    replica: Callable[..., tuple[Replica, str]], router_client: Any, save_tiny: Callable[..., Path]
) -> None:
    """For its own requests, and for those of others, which read it."""
    folder = save_tiny("llama")
    source, address = replica(folder, "decode")
    own, target = router_client.connect(address), router_client.connect(replica(folder, "both")[1])
    draw = Random(7)
    prompts = [[draw.randrange(3, 300) for _ in range(draw.randrange(40, 100))] for _ in range(10)]

    def hits(stream: Any, at: str = "") -> int:
        return sum(stream.submit(prompt, 2, *([at] if at else [])).wait().cached_tokens for prompt in prompts)

    assert hits(own) == 0
    before = hits(own)
    assert before >= 10 * 32
    source.set_role("prefill")
    assert hits(target, address) >= 0.99 * before
    source.set_role("decode")
    assert hits(own) >= 0.99 * before
