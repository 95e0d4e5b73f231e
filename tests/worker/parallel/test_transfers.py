"""KV blocks between replicas of real ranks: same tokens as plain transformers, however the source fails."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SPLITS = [((1, 1), (1, 1)), ((2, 1), (1, 1)), ((1, 1), (2, 1)), ((2, 1), (2, 1)), ((1, 2), (2, 1)), ((4, 1), (1, 2))]
"""Source and target as (tp, pp); with 4 ranks the two KV heads are held by two ranks each."""
WINDOWED = [((1, 1), (1, 1)), ((2, 1), (1, 1)), ((1, 2), (1, 2))]


def prompts(count: int, seed: int, longest: int = 90) -> list[list[int]]:
    """Some of them have a common prefix."""
    draw = random.Random(seed)
    common = [draw.randrange(3, 300) for _ in range(24)]
    made = []
    for _ in range(count):
        own = [draw.randrange(3, 300) for _ in range(draw.randrange(14, longest - 24))]
        made.append((common if draw.random() < 0.5 else []) + own)
    return made


def wait_until_idle(*streams: Any, seconds: float = 5.0) -> None:
    """Every block is free or cached again."""
    end = time.monotonic() + seconds
    while any(stream.load.kv_usage or stream.load.running or stream.load.waiting for stream in streams):
        assert time.monotonic() < end, [
            (stream.load.kv_usage, stream.load.running, stream.load.waiting) for stream in streams
        ]
        time.sleep(0.05)


@pytest.fixture
def pair(rank_group: Callable[..., Any], router_client: Any) -> Callable[..., Any]:
    """A source and a target that are ready, and a stream to each."""

    def make(
        source: tuple[int, int],
        target: tuple[int, int],
        model: Path | None = None,
        record: dict[int, Any] | None = None,
        kv_cache_dtype: str = "auto",
        **options: Any,
    ) -> Any:
        """options: of the source alone."""
        both = {"kv_cache_dtype": kv_cache_dtype}
        groups = [
            rank_group(*source, model, replica_id="p", **both, **options),
            rank_group(*target, model, replica_id="d", **both),
        ]
        for group in groups:
            group.start(record=record)
        for group in groups:
            group.ready()
        return groups, [router_client.connect(group.address) for group in groups]

    return make


OTHERS = ("mistral", "gemma2", "deepseek_v3", "gemma4_text", "mimo_v2_flash")
CASES = [("llama", *split) for split in SPLITS] + [(family, *split) for family in OTHERS for split in WINDOWED]


@pytest.mark.parametrize(("family", "source", "target"), CASES)
def test_tokens_through_prefill_and_decode(
    family: str,
    source: tuple[int, int],
    target: tuple[int, int],
    pair: Callable[..., Any],
    save_tiny: Callable[..., Path],
    check_oracle: Callable[..., None],
) -> None:
    folder = save_tiny(family)
    (prefill, _), (from_source, from_target) = pair(source, target, folder)
    alone = prompts(1, seed=1)
    check_oracle(folder, alone, [from_target.submit(alone[0], 6, prefill.address).wait()])
    # Prefix hits at the source, at the target, and at both.
    mixed = prompts(32, seed=2)
    from_source.submit(mixed[0], 2).wait()
    from_target.submit(mixed[1], 2).wait()
    sent = [from_target.submit(prompt, 8, prefill.address) for prompt in mixed]
    done = [one.wait() for one in sent]
    check_oracle(folder, mixed, done)
    # What the source computed for a request is not cached: only the common prefix and the two earlier prompts are.
    common = max((prompt[:24] for prompt in mixed), key=[prompt[:24] for prompt in mixed].count)
    for index, (one, prompt) in enumerate(zip(done, mixed, strict=True)):
        cacheable = (len(prompt) - 1) // 4 * 4
        if index < 2:
            assert one.cached_tokens >= cacheable - 4, "less than two blocks are not fetched"
        else:
            assert one.cached_tokens <= (min(cacheable, 24) if prompt[:24] == common else 0)
    counters = from_target.load.counters
    assert counters.fetches >= 24 and counters.fetches_failed == 0 and counters.fetched_bytes > 0
    # Fetched blocks do not count as hits.
    assert counters.prefix_cache_hits <= 24 * 34 + len(mixed[1])
    assert counters.prompt_tokens == sum(map(len, [*alone, mixed[1], *mixed]))
    assert from_source.load.counters.prompt_tokens == len(mixed[0])
    wait_until_idle(from_source, from_target)


@pytest.mark.parametrize(("source", "target"), [((1, 1), (2, 1)), ((2, 1), (1, 2))])
def test_keys_and_values_of_8_bits_move_with_their_scales(
    source: tuple[int, int], target: tuple[int, int], pair: Callable[..., Any], save_tiny: Callable[..., Path]
) -> None:
    folder = save_tiny("llama")
    (prefill, _), (from_source, from_target) = pair(source, target, folder, kv_cache_dtype="fp8")
    mixed = prompts(8, seed=2)
    alone = [from_source.submit(prompt, 8).wait().token_ids for prompt in mixed]
    moved = [from_target.submit(prompt, 8, prefill.address).wait().token_ids for prompt in mixed]
    counters = from_target.load.counters
    assert counters.fetches >= 6 and counters.fetches_failed == 0
    assert sum(one == other for one, other in zip(alone, moved, strict=True)) >= 7  # a bit may round to another number


@pytest.mark.parametrize(
    ("family", "source", "target"),
    [
        *(("qwen3_next", *split) for split in (*WINDOWED, ((1, 2), (2, 1)))),
        ("kimi_linear", (1, 1), (1, 1)),
        ("bamba", (1, 1), (2, 1)),
        ("bamba", (2, 1), (1, 1)),
        ("granitemoehybrid", (2, 2), (1, 1)),
        ("jamba", (1, 1), (2, 2)),
        ("lfm2", (2, 1), (1, 2)),
    ],
)
def test_states_move_with_the_blocks(
    family: str,
    source: tuple[int, int],
    target: tuple[int, int],
    pair: Callable[..., Any],
    save_tiny: Callable[..., Path],
    check_oracle: Callable[..., None],
) -> None:
    """Computed for the request, or cached at the source; and the next turn starts from the state that was moved."""
    folder = save_tiny(family)
    (prefill, _), (from_source, from_target) = pair(source, target, folder)
    mixed = prompts(16, seed=2)
    from_source.submit(mixed[0], 2).wait()
    done = []
    for first in range(0, 16, 4):  # each state needs a slot
        sent = [from_target.submit(prompt, 8, prefill.address) for prompt in mixed[first : first + 4]]
        done += [one.wait() for one in sent]
    check_oracle(folder, mixed, done)
    counters = from_target.load.counters
    assert counters.fetches >= 12 and counters.fetches_failed == 0 and counters.fetched_bytes > 0
    turns = [prompt + one.token_ids + [7, 8, 9] for prompt, one in zip(mixed[-2:], done[-2:], strict=True)]
    again = [from_target.submit(turn, 4).wait() for turn in turns]
    check_oracle(folder, turns, again)
    assert all(
        one.cached_tokens >= (len(prompt) - 1) // 4 * 4 - 4 for one, prompt in zip(again, mixed[-2:], strict=True)
    )
    wait_until_idle(from_source, from_target)


@pytest.mark.parametrize(("source", "target"), [((1, 1), (1, 1)), ((2, 1), (2, 1))])
def test_blocks_of_steps_that_are_replayed(
    source: tuple[int, int],
    target: tuple[int, int],
    pair: Callable[..., Any],
    save_tiny: Callable[..., Path],
    check_oracle: Callable[..., None],
) -> None:
    """In a replay no layer is marked as written: transfers start at the step's end."""
    folder = save_tiny("llama")
    groups, (from_source, from_target) = pair(source, target, folder, record={})
    for group in groups:
        assert any("decode steps" in note for note in group.fork_server.wait_for(group.pids[0], "notes", 1))
    mixed = prompts(16, seed=11)
    sent = [from_target.submit(prompt, 8, groups[0].address) for prompt in mixed]
    check_oracle(folder, mixed, [one.wait() for one in sent])
    counters = from_target.load.counters
    assert counters.fetches >= 12 and counters.fetches_failed == 0
    wait_until_idle(from_source, from_target)


def test_sources_killed_in_the_middle(
    rank_group: Callable[..., Any],
    router_client: Any,
    save_tiny: Callable[..., Path],
    check_oracle: Callable[..., None],
) -> None:
    """Sources are killed one by one at a random moment of their transfers: no error, no wrong token."""
    folder = save_tiny("llama", num_hidden_layers=8)
    target = rank_group(2, 1, folder, replica_id="d")
    target.start()
    target.ready()
    stream = router_client.connect(target.address)
    draw = random.Random(4)
    for number in range(4):
        source = rank_group(1, 1, folder, replica_id=f"p{number}")
        source.start()
        source.ready()
        warm = prompts(1, seed=1000 + number)
        check_oracle(folder, warm, [stream.submit(warm[0], 2, source.address).wait()])
        some = prompts(8, seed=2000 + number)
        sent = [stream.submit(prompt, 6, source.address) for prompt in some]
        time.sleep(draw.random() * 0.15)
        os.kill(source.pids[0], signal.SIGKILL)
        check_oracle(folder, some, [one.wait() for one in sent])
        wait_until_idle(stream)
    counters = stream.load.counters
    assert 0 < counters.fetches_failed < counters.fetches, "some were killed in time, some too late"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_source_delays_no_request(
    rank: int, pair: Callable[..., Any], save_tiny: Callable[..., Path], check_oracle: Callable[..., None]
) -> None:
    folder = save_tiny("llama")
    (prefill, _), (_, from_target) = pair((2, 1), (1, 1), folder)
    address = prefill.address
    warm = prompts(1, seed=6)
    check_oracle(folder, warm, [from_target.submit(warm[0], 4, address).wait()])
    os.kill(prefill.pids[rank], signal.SIGSTOP)
    started = time.monotonic()
    some = prompts(4, seed=7)
    done = [one.wait() for one in [from_target.submit(prompt, 8, address) for prompt in some]]
    assert time.monotonic() - started < 8
    check_oracle(folder, some, done)
    os.kill(prefill.pids[rank], signal.SIGCONT)
    time.sleep(1)  # its late messages arrive now, and are dropped
    more = prompts(4, seed=8)
    done = [one.wait() for one in [from_target.submit(prompt, 8, address) for prompt in more]]
    check_oracle(folder, more, done)
    wait_until_idle(from_target)


def test_cancels_at_any_time_leave_nothing(
    pair: Callable[..., Any], save_tiny: Callable[..., Path], check_oracle: Callable[..., None]
) -> None:
    folder = save_tiny("llama")
    (prefill, _), (from_source, from_target) = pair((1, 1), (2, 1), folder)
    draw = random.Random(9)
    for prompt in prompts(40, seed=9):
        sent = from_target.submit(prompt, 20, prefill.address)
        time.sleep(draw.random() * 0.02)
        from_target.cancel(sent)
    wait_until_idle(from_source, from_target)
    last = prompts(4, seed=10)
    done = [one.wait() for one in [from_target.submit(prompt, 8, prefill.address) for prompt in last]]
    check_oracle(folder, last, done)
    wait_until_idle(from_source, from_target)
