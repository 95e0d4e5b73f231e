"""Policies side by side in the simulator: hit rate beside that of one LRU cache, TTFT, TPOT and goodput for each cell.

    python benchmarks/placement.py --trace FILE|NAME [--replicas 8,64] [--load 0.8,1.2] [--cache 1,5,50] [--limit N]
                                   [--policies a,b] [--routers 1,2,4] [--latency NAME] [--seed N] [--save]

A cell is a number of replicas, a load and a size of the caches. `--load` is a share of what round-robin can serve with
these caches; `--cache` the blocks of each replica, in percent of the trace's distinct ones (0: the default size). All
times are of the simulator, whose latency models are arithmetic or fitted (`headrace simulate`): none is a measurement.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import machine

from headrace_cluster.simulator.capacity import round_robin_capacity
from headrace_cluster.simulator.command import load_trace
from headrace_cluster.simulator.latency_model import latency_model
from headrace_cluster.simulator.result import Result, Slo, result_of
from headrace_cluster.simulator.simulation import Setup, Simulation
from headrace_cluster.simulator.trace import Trace

POLICIES = "predicted,least-load,round-robin,session,cache-aware,overlap-cost"
HEAD = (
    f"{'policy':<14}{'routers':>8}{'hits':>7}{'LRU':>7}{'TTFT p50':>10}{'p90':>8}{'p99':>8}{'TPOT p90':>10}"
    f"{'goodput':>9}{'req/s':>7}{'largest':>9}{'fetched':>9}{'error p50':>11}{'p90':>6}{'decision p99':>14}"
)


def run(trace: Trace, setup: Setup) -> Result:
    """One simulation."""
    simulation, began = Simulation(trace, setup), time.perf_counter()
    simulation.run()
    return result_of(simulation, Slo(), time.perf_counter() - began)


def row(result: Result) -> str:
    """Of the table. Seconds; TPOT and decisions in milliseconds; goodput as a share of the requests."""
    ttft, error = result.ttft_seconds, result.prediction_error
    return (
        f"{result.policy:<14}{result.routers:>8}{result.hit_rate:>7.3f}{result.hit_rate_bound:>7.3f}{ttft.p50:>10.2f}"
        f"{ttft.p90:>8.2f}{ttft.p99:>8.2f}{result.tpot_seconds.p90 * 1e3:>10.1f}{result.goodput_share:>9.3f}"
        f"{result.throughput:>7.2f}{result.imbalance:>9.2f}{result.fetched:>9}{error.p50:>11.0%}{error.p90:>6.0%}"
        f"{result.decision_ms.p99:>14.2f}"
    )


def cells(trace: Trace, arguments: argparse.Namespace) -> Iterator[tuple[dict[str, float], Trace, Setup]]:
    """Each with its trace at its speed."""
    distinct = len({block for request in trace.requests for block in request.block_ids})
    longest = max(request.input_tokens + request.output_tokens for request in trace.requests)
    for replicas, cache in product(_numbers(arguments.replicas), _numbers(arguments.cache)):
        blocks = max(int(distinct * cache / 100), longest // trace.block + 2) if cache else 0
        setup = Setup(
            latency_model(arguments.latency), replicas=int(replicas), cache_blocks=blocks, seed=arguments.seed
        )
        capacity = round_robin_capacity(trace, setup)
        for load in _numbers(arguments.load):
            cell = {"replicas": replicas, "cache_percent": cache, "cache_blocks": blocks, "load": load}
            yield cell, trace.faster(load * capacity / (len(trace.requests) / trace.seconds)), setup


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    """Prints a table per cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--replicas", default="8")
    parser.add_argument("--load", default="0.8,1.2")
    parser.add_argument("--cache", default="0")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--routers", default="1")
    parser.add_argument("--latency", default="h200-8b")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    trace = load_trace(arguments.trace, arguments.limit, arguments.seed)
    found: list[dict[str, Any]] = []
    for cell, faster, setup in cells(trace, arguments):
        shown = ", ".join(f"{name} {value:g}" for name, value in cell.items())
        print(f"\n{trace.name}, {len(trace.requests)} requests, {shown}\n{HEAD}", flush=True)
        for policy, routers in product(arguments.policies.split(","), _numbers(arguments.routers)):
            result = run(faster, replace(setup, policy=policy, routers=int(routers)))
            print(row(result), flush=True)
            document = result.document()
            del document["per_replica"]
            found.append(cell | document)
            if arguments.save:
                machine.save("placement", {"runs": found})


if __name__ == "__main__":
    main()
