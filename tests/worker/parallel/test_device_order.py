"""Rules about the order of calls that hold for each rank of every shape, with KV transfers too: see device_rules.py.

Ranks are processes that start, record, serve and stop as on GPUs, on devices that trace the calls of all threads.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.ranks.prompts import prompts
from support.worker.device_rules import PAIR, broken_rules, different_collectives
from support.worker.traced_device import Call, read_trace

SHAPES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]
TRANSFERS = [((1, 1), (2, 1)), ((2, 1), (1, 1)), ((4, 1), (1, 2)), ((1, 2), (2, 2)), ((2, 2), (4, 1)), ((1, 1), (4, 2))]


@pytest.fixture
def traced(rank_group: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Starts a group whose ranks write a trace each when they end; returns it and the files."""

    def start(tp: int, pp: int, name: str = "r", **options: Any) -> tuple[Any, list[Path]]:
        files = [tmp_path / f"{name}-{rank}.json" for rank in range(tp * pp)]
        group = rank_group(tp, pp, replica_id=name, **options)
        group.start(record={rank: {"trace": str(file)} for rank, file in enumerate(files)})
        return group, files

    return start


def stop(group: Any, files: list[Path]) -> list[list[Call]]:
    """The trace of each rank."""
    group.fork_server.signal(group.pids[0], signal.SIGUSR1)
    for pid in group.pids:
        assert group.fork_server.ended(pid, 20) == "stopped"
    return [read_trace(file) for file in files]


def check_rules(traces: list[list[Call]]) -> None:
    found = {rank: broken for rank, trace in enumerate(traces) if (broken := broken_rules(trace))}
    assert not found
    assert not different_collectives(traces)


def names(trace: list[Call], thread: str = "") -> Counter[str]:
    return Counter(call.name for call in trace if call.thread.startswith(thread))


@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_rules_hold_on_every_rank(
    tp: int,
    pp: int,
    traced: Callable[..., Any],
    router_client: Any,
    save_tiny: Callable[..., Path],
    check_oracle: Callable[..., None],
) -> None:
    group, files = traced(tp, pp)
    group.ready()
    stream = router_client.connect(group.address)
    some = prompts(6)
    check_oracle(save_tiny("llama"), some, [sent.wait() for sent in [stream.submit(one, 6) for one in some]])
    traces = stop(group, files)
    check_rules(traces)
    for rank, trace in enumerate(traces):
        stage, calls = rank // tp, names(trace)
        assert calls["capture.end"] >= 5 and calls["graph.replay"] >= 6 and calls["kernel.write"]
        assert bool(calls["nccl.allreduce"]) is (tp > 1)
        assert bool(calls["nccl.recv"]) is (stage > 0) and bool(calls["nccl.send"]) is (stage < pp - 1)


@pytest.mark.parametrize(
    ("source", "target", "graphs"),
    [(*shapes, "off") for shapes in TRANSFERS] + [(*shapes, "full") for shapes in TRANSFERS[1:4:2]],
)
def test_rules_hold_while_blocks_are_transferred(
    source: tuple[int, int],
    target: tuple[int, int],
    graphs: str,
    traced: Callable[..., Any],
    router_client: Any,
    save_tiny: Callable[..., Path],
    check_oracle: Callable[..., None],
) -> None:
    """Without recordings each layer is sent as soon as the running step has stored it."""
    replicas = [traced(*shape, name, cuda_graphs=graphs) for shape, name in ((source, "p"), (target, "d"))]
    for group, _ in replicas:
        group.ready()
    (prefill, _), (decode, _) = replicas
    stream = router_client.connect(decode.address)
    some = [one * 4 for one in prompts(8, seed=3)]
    some = [one[:80] for one in some]
    sent = [stream.submit(one, 6, prefill.address) for one in some]
    check_oracle(save_tiny("llama"), some, [one.wait() for one in sent])
    assert stream.load.counters.fetches >= 4 and stream.load.counters.fetches_failed == 0
    sources, targets = (stop(*replica) for replica in replicas)
    check_rules(sources)
    check_rules(targets)
    assert any(names(trace, PAIR)["kv.read"] and names(trace, PAIR)["pair.send"] for trace in sources)
    for trace in targets:
        assert names(trace, PAIR)["kv.write"] and names(trace, PAIR)["pair.report"]
    for trace in (*sources, *targets):
        assert bool(names(trace)["graph.replay"]) is (graphs == "full")


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_a_lost_rank_aborts_each_group_once(tp: int, pp: int, traced: Callable[..., Any]) -> None:
    group, files = traced(tp, pp)
    group.ready()
    os.kill(group.pids[-1], signal.SIGKILL)
    for pid, file in zip(group.pids[:-1], files, strict=False):
        group.fork_server.ended(pid, 20)
        aborts = [call for call in read_trace(file) if call.name == "nccl.abort"]
        assert {call.thread for call in aborts} == {"headrace-nccl-abort"}
        own = {call.group for call in read_trace(file) if call.name == "nccl.connect"}
        assert sorted(call.group for call in aborts) == sorted(own)
