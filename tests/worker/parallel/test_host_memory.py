"""KV blocks that were evicted to host memory and disk come back: a replica in this process, and several ranks."""

import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace_worker.replica import Replica
from support.members import MEMBER
from support.worker.tiny_models import replica_config

BLOCK_BYTES = 2 * 3 * 2 * 4 * 16 * 4  # keys and values, layers, KV heads, positions, head size, float32
BLOCKS = 200
BYTES_OF = {"llama": BLOCK_BYTES, "deepseek_v3": 3 * 4 * 48 * 4, "mimo_v2_flash": 2 * 4 * 2 * (32 + 16) * 4}
OPTIONS = {"kv_cache_memory": BLOCKS * BLOCK_BYTES, "kv_offload_memory": 8 << 20, "max_num_batched_tokens": 64}


def prompts(count: int) -> list[list[int]]:
    draw = Random(5)
    return [[draw.randrange(3, 300) for _ in range(90)] for _ in range(count)]


def ask_twice(stream: Any, folder: Path, check_oracle: Callable[..., None]) -> None:
    """More prompts than the cache has room for, and the first ones again."""
    many, done = prompts(14), []
    for prompt in many:
        done.append(stream.submit(prompt, 4).wait())
        time.sleep(0.3)  # steps of this model are faster than copies: an idle engine stores what is evicted next
    check_oracle(folder, many, done)
    again = [stream.submit(prompt, 4).wait() for prompt in many[:4]]
    check_oracle(folder, many[:4], again)
    # The first one at least: from then on a load is known to take longer than the few layers of this model.
    assert sum(one.cached_tokens for one in again) >= 88
    counters = stream.load.counters
    assert counters.blocks_stored > 100 and counters.blocks_loaded >= 20 and counters.load_seconds > 0


def ask_after_a_restart(stream: Any, folder: Path, check_oracle: Callable[..., None]) -> None:
    """What `ask_twice` has left on disk."""
    again = [stream.submit(prompt, 4).wait() for prompt in prompts(3)]
    check_oracle(folder, prompts(3), again)
    assert sum(one.cached_tokens for one in again) >= 88
    counters = stream.load.counters
    assert counters.blocks_filled >= 20 and counters.blocks_loaded >= 20 and stream.load.load_token_ms > 0


@pytest.mark.faults("ranks")
@pytest.mark.parametrize("family", BYTES_OF)
def test_a_replica_that_starts_again_finds_what_is_on_disk(
    family: str, router_client: Any, save_tiny: Callable[..., Path], check_oracle: Callable[..., None], tmp_path: Path
) -> None:
    folder = save_tiny(family)
    fields: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 128, "kv_offload_dir": str(tmp_path / "kv")}
    fields |= OPTIONS | {"kv_cache_memory": BLOCKS * BYTES_OF[family]}
    for ask in (ask_twice, ask_after_a_restart):
        made = Replica(replica_config(folder, replica_id="one", block_size=4, **fields), MEMBER.secret)
        ask(router_client.connect(made.start().address), folder, check_oracle)
        made.stop()
    assert len(list((tmp_path / "kv").glob("*.blocks"))) == 1


@pytest.mark.faults("ranks")
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_with_several_ranks(
    tp: int,
    pp: int,
    rank_group: Callable[..., Any],
    router_client: Any,
    save_tiny: Callable[..., Path],
    check_oracle: Callable[..., None],
    tmp_path: Path,
) -> None:
    share = OPTIONS | {"kv_cache_memory": BLOCKS * BLOCK_BYTES // tp * (2 if pp == 2 else 3) // 3}
    for ask in (ask_twice, ask_after_a_restart):
        group = rank_group(tp, pp, save_tiny("llama"), replica_id="one", kv_offload_dir=str(tmp_path), **share)
        group.start()
        group.ready()
        ask(router_client.connect(group.address), save_tiny("llama"), check_oracle)
        group.kill()
