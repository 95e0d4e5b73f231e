"""A run as a picture: the first tokens' times, the load of the replicas, and what was waited for when."""

from io import BytesIO

from headrace_cluster.simulator.result import Result
from headrace_cluster.simulator.simulation import WARM_UP_SECONDS, Simulation


def plot(simulation: Simulation, result: Result) -> bytes:
    """A PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(11, 7), layout="constrained")
    (over_time, ttft), (tpot, replicas) = figure.subplots(2, 2)
    served = [request for request in simulation.requests if request.ttft is not None]
    ttfts = [request.ttft or 0.0 for request in served]
    tpots = [request.tpot for request in served if request.tpot is not None]
    over_time.scatter([request.began - WARM_UP_SECONDS for request in served], ttfts, s=4)
    over_time.set(title="time until the first token, by arrival", xlabel="arrival, s", ylabel="s")
    for axes, name, values, limit in (
        (ttft, "time until the first token, distribution", ttfts, result.slo.ttft),
        (tpot, "time per token, distribution", tpots, result.slo.tpot),
    ):
        ordered = sorted(values)
        axes.plot(ordered, [(rank + 1) / len(ordered) for rank in range(len(ordered))])
        axes.axvline(limit, color="tab:red", linestyle="--", label="SLO")
        axes.set(title=name, xlabel="s", ylabel="share of the requests", xscale="log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.legend()
    replicas.bar(range(len(result.per_replica)), [100 * entry["busy_share"] for entry in result.per_replica], width=0.9)
    replicas.set(title="computing", xlabel="replica", ylabel="% of the time")
    figure.suptitle(
        f"{result.trace}, {result.policy}, {len(result.per_replica)} replicas ({result.latency_model}): "
        f"hit rate {result.hit_rate:.1%} (one LRU cache: {result.hit_rate_bound:.1%}), goodput {result.goodput:.2f}/s"
    )
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
