"""One all-reduce between two processes of this machine: shared memory against gloo, in one run.

    python benchmarks/all_reduce.py [--save]

The two alternate in the same pair of processes (A B A B), so that noise of the machine affects both.
"""

import argparse
import multiprocessing
import time
from statistics import median
from typing import Any

import machine
import torch

from headrace_worker.comm.communicators import OrderedCommunicator
from headrace_worker.comm.group import host_group
from headrace_worker.comm.parallel_context import Communicator
from headrace_worker.comm.rendezvous import RendezvousHost
from headrace_worker.core.config import Rendezvous, ReplicaConfig
from headrace_worker.device.cpu import CpuDevice
from headrace_worker.ranks.join import join_team

SIZES = {"576 floats": (576, 200), "1 MB": (1 << 18, 40)}  # numbers, all-reduces per round
ROUNDS = 7


class GlooReduce:
    """gloo's own all-reduce, in gloo's order of additions."""

    def __init__(self, group: Any) -> None:
        self.all_reduce = group.reduce


def run(rank: int, rendezvous: Rendezvous, opened: RendezvousHost | None = None) -> dict[str, dict[str, list[float]]]:
    """Microseconds of every all-reduce, by size and method."""
    torch.set_num_threads(1)
    team = join_team(ReplicaConfig(replica_id="r", model="m", source="", tp=2), CpuDevice(), rank, rendezvous, opened)
    shared: Communicator = team.context.tp
    group = host_group(team.store, "benchmark", "127.0.0.1", rank, 2, team.detector)
    methods: dict[str, Any] = {
        f"{type(shared).__name__} (rank order)": shared,
        "gloo all-reduce": GlooReduce(group),
        "gloo gather (rank order)": OrderedCommunicator(group),
    }
    times: dict[str, dict[str, list[float]]] = {size: {method: [] for method in methods} for size in SIZES}
    for turn in range(ROUNDS + 1):
        for size, (count, repeats) in SIZES.items():
            data = torch.ones(count)
            for name, method in methods.items():
                for _ in range(repeats):
                    began = time.perf_counter()
                    method.all_reduce(data)
                    if turn:  # the first round warms up
                        times[size][name].append((time.perf_counter() - began) * 1e6)
                data.fill_(1.0)
    team.gather_all(0)
    team.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="append to results/all_reduce.jsonl")
    arguments = parser.parse_args()
    opened = RendezvousHost("127.0.0.1")
    other = multiprocessing.get_context("spawn").Process(target=run, args=(1, opened.rendezvous))
    other.start()
    times = run(0, opened.rendezvous, opened)
    other.join(10)
    result = {}
    for size, methods in times.items():
        for method, values in methods.items():
            values.sort()
            entry = {"p50_us": round(median(values), 1), "p99_us": round(values[int(len(values) * 0.99)], 1)}
            result[f"{size}, {method}"] = entry
            print(f"{size:>10}  {method:<34} p50 {entry['p50_us']:8.1f} µs   p99 {entry['p99_us']:8.1f} µs")
    if arguments.save:
        print(machine.save("all_reduce", {"all_reduce": result}))


if __name__ == "__main__":
    main()
