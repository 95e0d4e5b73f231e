"""The commands of the simulator."""

from pathlib import Path
from typing import Annotated

import typer

from headrace_router.core.policy.interface import Mode

app = typer.Typer(rich_markup_mode=None)


@app.command()
def simulate(
    trace: Annotated[
        str,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Requests: Mooncake's .jsonl or Azure's .csv; or a generated load: shared-prefix, hot-prefix, "
            "siblings, chat.",
        ),
    ],
    replicas: Annotated[int | None, typer.Option("--replicas", min=0, help="That do both. [default: 8]")] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy", help="predicted, least-load, round-robin, session; to compare: cache-aware, overlap-cost."
        ),
    ] = "predicted",
    prefill: Annotated[int, typer.Option("--prefill", min=0, help="Replicas that compute prompts for others.")] = 0,
    decode: Annotated[int, typer.Option("--decode", min=0, help="Replicas that fetch prompts from those.")] = 0,
    disaggregation: Annotated[
        Mode,
        typer.Option("--disaggregation", help="Of each request: auto, shared, always or off."),
    ] = "shared",
    routers: Annotated[int, typer.Option("--routers", min=1, help="Requests take turns among them.")] = 1,
    models: Annotated[
        int, typer.Option("--models", min=1, help="Each with its own replicas; requests take turns among them.")
    ] = 1,
    cache_blocks: Annotated[
        int,
        typer.Option(
            "--cache-blocks",
            min=0,
            help="KV blocks of a replica, running requests included. [default: 800,000 tokens]",
            show_default=False,
        ),
    ] = 0,
    block_size: Annotated[
        int, typer.Option("--block-size", min=0, help="Tokens per block. [default: the trace's]", show_default=False)
    ] = 0,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many requests.")] = None,
    speed: Annotated[float, typer.Option("--speed", help="So many times the trace's requests per second.")] = 1.0,
    load: Annotated[
        float | None,
        typer.Option("--load", help="Instead of --speed: this share of what round-robin can serve, measured first."),
    ] = None,
    latency: Annotated[
        str, typer.Option("--latency", help="Of a replica: h200-8b, h200-70b, or a .json file.")
    ] = "h200-8b",
    faults: Annotated[
        str, typer.Option("--faults", help="Such as kill:m0-r1@60+20,slow:m0-r2@30+60x4,add:m0-r0@90,drain:m0-r3@99.")
    ] = "",
    spread: Annotated[float, typer.Option("--spread", help="Replicas differ in speed by up to this share.")] = 0.0,
    slo_ttft: Annotated[float, typer.Option("--slo-ttft", help="Seconds, for goodput.")] = 2.0,
    slo_tpot: Annotated[float, typer.Option("--slo-tpot", help="Seconds, for goodput.")] = 0.05,
    seed: Annotated[int, typer.Option("--seed", help="Of all that is random.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write result.json, plot.png and report.html.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run a trace through simulated replicas, with production's scheduler, caches, placement and transfers."""
    from headrace_cluster.simulator import command as command
    from headrace_cluster.simulator.result import Slo
    from headrace_cluster.simulator.simulation import Setup

    if replicas is None:
        replicas = 0 if prefill or decode else 8
    setup = Setup(
        command.latency_option(latency),
        policy=command.policy_name(policy),
        replicas=replicas,
        prefill=prefill,
        decode=decode,
        routers=routers,
        models=models,
        cache_blocks=cache_blocks,
        block_size=block_size,
        disaggregation=disaggregation,
        spread=spread,
        seed=seed,
        changes=command.changes_option(faults),
    )
    slo = Slo(slo_ttft, slo_tpot)
    command.check_options(setup, slo, speed, load)
    requests = command.load_trace(trace, limit, seed)
    command.simulate(requests, setup, slo, limit=limit, speed=speed, load=load, out=out, as_json=json_)
