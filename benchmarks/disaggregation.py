"""When does disaggregation pay? Goodput against prompt length and load: colocated, always, or chosen per request.

    python benchmarks/disaggregation.py [--lengths 512,2048,8192,32768] [--loads 0.5,0.7,0.9,1.1] [--replicas 8]
                                        [--prefill 2] [--output 256] [--requests 400] [--seeds 2] [--out DIR] [--save]

Simulated replicas (`headrace simulate`): as many in each setup. `colocated`: all do both. `always`: `--prefill` of them
compute every prompt, the others answer. `auto`: the same pools, where each prompt is computed is predicted. `shared`:
where it is answered, too. Arrivals are Poisson; the load is a share of what the colocated replicas can serve. Goodput:
answers with a first token within 2 s and 50 ms per token after it, as a share of the requests. `--out DIR` writes
disaggregation.png.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import machine
from placement import run

from headrace_cluster.simulator.capacity import round_robin_capacity
from headrace_cluster.simulator.latency_model import latency_model
from headrace_cluster.simulator.simulation import Setup
from headrace_cluster.simulator.trace import PRIVATE, Trace, TraceRequest

BLOCK = 64


def poisson(length: int, output: int, count: int, seed: int) -> Trace:
    """One request a second, on average; no two share anything."""
    random, at = Random(f"{length}/{seed}"), 0.0
    requests = []
    for number in range(count):
        at += random.expovariate(1.0)
        tokens = max(1, int(length * random.uniform(0.7, 1.3)))
        first = PRIVATE + number * 10_000
        answer = max(2, int(output * random.uniform(0.5, 1.5)))
        requests.append(TraceRequest(at, tokens, answer, tuple(range(first, first + -(-tokens // BLOCK)))))
    return Trace(f"poisson {length}+{output}", requests, BLOCK, hashed=False)


def main() -> None:
    """Prints a line per point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,2048,8192,32768")
    parser.add_argument("--loads", default="0.5,0.7,0.9,1.1")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--latency", default="h200-8b")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    together = Setup(latency_model(arguments.latency), replicas=arguments.replicas)
    pools = replace(together, replicas=0, prefill=arguments.prefill, decode=arguments.replicas - arguments.prefill)
    setups = {
        "colocated": together,
        "always": replace(pools, disaggregation="always"),
        "auto": replace(pools, disaggregation="auto"),
        "shared": replace(pools, disaggregation="shared"),
    }
    points: list[dict[str, Any]] = []
    print(
        f"{'tokens':>8}{'load':>6}"
        + "".join(f"{name:>12}" for name in setups)
        + "   (goodput; TTFT p90, s; TPOT p90, ms)"
    )
    for length in map(int, arguments.lengths.split(",")):
        capacity = round_robin_capacity(poisson(length, arguments.output, 1000, 99), together)
        for load in map(float, arguments.loads.split(",")):
            point: dict[str, Any] = {"length": length, "load": load}
            for name, setup in setups.items():
                results = [
                    run(poisson(length, arguments.output, arguments.requests, seed).faster(load * capacity), setup)
                    for seed in range(arguments.seeds)
                ]
                point[name] = {
                    "goodput": mean(result.goodput_share for result in results),
                    "ttft_p90": mean(result.ttft_seconds.p90 for result in results),
                    "tpot_p90": mean(result.tpot_seconds.p90 for result in results),
                }
            points.append(point)
            shown = "".join(
                f"{point[name]['goodput']:>8.3f} ({point[name]['ttft_p90']:.2f}, {point[name]['tpot_p90'] * 1e3:.0f})"
                for name in setups
            )
            print(f"{length:>8}{load:>6.2f}{shown}", flush=True)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        draw(points, list(setups), arguments.out / "disaggregation.png")
    if arguments.save:
        print(machine.save("disaggregation", {"points": points}))


def draw(points: list[dict[str, Any]], names: list[str], path: Path) -> None:
    """A panel per prompt length."""
    from matplotlib.figure import Figure

    lengths = sorted({point["length"] for point in points})
    figure = Figure(figsize=(3.2 * len(lengths), 3.2), layout="constrained")
    axes = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    for axis, length in zip(axes, lengths, strict=True):
        mine = sorted((point for point in points if point["length"] == length), key=lambda point: point["load"])
        for name in names:
            axis.plot([point["load"] for point in mine], [point[name]["goodput"] for point in mine], "o-", label=name)
        axis.set_title(f"prompts of {length:,} tokens")
        axis.set_xlabel("load")
        axis.set_ylim(0, 1.05)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("goodput, share of requests")
    axes[0].legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
