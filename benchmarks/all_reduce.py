"""One all-reduce between two processes of this machine: shared memory against gloo, in one run.

    python benchmarks/all_reduce.py [--save]

The two take turns in the same pair of processes (A B A B), so that noise of the machine meets both.
"""

import argparse
import multiprocessing
import time
from statistics import median
from typing import Any

import machine
import torch

from headrace_worker.config import Meeting, ReplicaConfig
from headrace_worker.parallel.communicators import OrderedCommunicator
from headrace_worker.parallel.context import Communicator
from headrace_worker.parallel.group import host_group
from headrace_worker.parallel.meeting import MeetingHost
from headrace_worker.parallel.team import Team

SIZES = {"576 floats": (576, 200), "1 MB": (1 << 18, 40)}  # numbers, all-reduces per round
ROUNDS = 7


class GlooReduce:
    """gloo's own all-reduce, in gloo's order of adding."""

    def __init__(self, group: Any) -> None:
        self.all_reduce = group.reduce


def run(rank: int, meeting: Meeting, opened: MeetingHost | None = None) -> dict[str, dict[str, list[float]]]:
    """Microseconds of every all-reduce, by size and way."""
    torch.set_num_threads(1)
    team = Team(ReplicaConfig(replica_id="r", model="m", source="", secret=b"s", tp=2), rank, meeting, opened)
    shared: Communicator = team.context.tp
    group = host_group(team.board.store, "benchmark", "127.0.0.1", rank, 2, team.watch)
    ways: dict[str, Any] = {
        f"{type(shared).__name__} (rank order)": shared,
        "gloo all-reduce": GlooReduce(group),
        "gloo gather (rank order)": OrderedCommunicator(group),
    }
    times: dict[str, dict[str, list[float]]] = {size: {way: [] for way in ways} for size in SIZES}
    for turn in range(ROUNDS + 1):
        for size, (count, repeats) in SIZES.items():
            data = torch.ones(count)
            for name, way in ways.items():
                for _ in range(repeats):
                    began = time.perf_counter()
                    way.all_reduce(data)
                    if turn:  # the first round warms up
                        times[size][name].append((time.perf_counter() - began) * 1e6)
                data.fill_(1.0)
    team.agree(0)
    team.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write results/all_reduce.json")
    arguments = parser.parse_args()
    opened = MeetingHost("127.0.0.1")
    other = multiprocessing.get_context("spawn").Process(target=run, args=(1, opened.meeting))
    other.start()
    times = run(0, opened.meeting, opened)
    other.join(10)
    result = {}
    for size, ways in times.items():
        for way, values in ways.items():
            values.sort()
            entry = {"p50_us": round(median(values), 1), "p99_us": round(values[int(len(values) * 0.99)], 1)}
            result[f"{size}, {way}"] = entry
            print(f"{size:>10}  {way:<34} p50 {entry['p50_us']:8.1f} µs   p99 {entry['p99_us']:8.1f} µs")
    if arguments.save:
        print(machine.save("all_reduce", {"all_reduce": result}))


if __name__ == "__main__":
    main()
