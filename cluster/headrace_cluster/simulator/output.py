"""The results of a run as text, and as files."""

import json
from base64 import b64encode
from html import escape
from os import W_OK, access
from pathlib import Path

from headrace_cluster.simulator.errors import SimulationError
from headrace_cluster.simulator.plot import plot
from headrace_cluster.simulator.result import Percentiles, Result
from headrace_cluster.simulator.simulation import Simulation

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c2430; }}
table {{ border-collapse: collapse; }} td, th {{ padding: .2rem 1.2rem .2rem 0; text-align: left; }}
td + td {{ font-variant-numeric: tabular-nums; }} tr {{ border-bottom: 1px solid #dde3ea; }} img {{ width: 100%; }}
</style></head><body><h1>{title}</h1><p>{model}</p><p>{options}</p><table>{rows}</table><img alt="plots of the run"
src="data:image/png;base64,{image}"><h2>Replicas</h2><table>
<tr><th>replica</th><th>requests</th><th>computing</th><th>steps</th></tr>{replicas}</table></body></html>
"""


def rows(result: Result) -> list[tuple[str, str]]:
    """What is shown of a result: names and values."""
    setup = result.setup
    shown = [
        ("cache", f"{setup['cache_blocks']} blocks of {setup['block_size']} tokens per replica"),
        ("requests", f"{result.requests}, {result.failed} failed, {result.arrivals_per_second:.2f}/s"),
        ("hit rate", f"{result.hit_rate:.2%}; of one LRU cache of this size {result.hit_rate_bound:.2%}, of one that "
         f"keeps everything {result.hit_rate_unlimited:.2%}" if result.hashed else "the trace has no hashes"),
        ("TTFT", _seconds(result.ttft_seconds)),
        ("TPOT", _seconds(result.tpot_seconds)),
        ("goodput", f"{result.goodput:.2f}/s, {result.goodput_share:.1%} of the requests (TTFT <= {result.slo.ttft:g} "
         f"s, TPOT <= {result.slo.tpot:g} s)"),
        ("throughput", f"{result.throughput:.2f} requests/s, {result.tokens_per_second:.0f} tokens/s"),
        ("imbalance", f"{result.imbalance:.2f} (largest share x replicas), busiest replica {result.busiest:.0%}"),
        ("decision", f"p50 {result.decision_ms.p50:.2f}  p90 {result.decision_ms.p90:.2f}  p99 "
         f"{result.decision_ms.p99:.2f} ms of this machine"),
        ("prediction", f"of TTFT, off by p50 {result.prediction_error.p50:.0%}  p90 {result.prediction_error.p90:.0%}"),
        ("preemptions", str(result.preemptions)),
        ("fetched", f"planned: {result.fetched} prefixes from other replicas' caches, {result.prefilled} prompts from "
         f"prefill replicas; {result.transfers} transfers completed"),
        ("simulated", f"{result.seconds:.0f} s in {result.wall_seconds:.1f} s, {result.requests_per_minute:.0f} "
         "requests/min"),
    ]  # fmt: skip
    return [
        (name, value) for name, value in shown if "nan" not in value
    ]  # values are NaN where no request was predicted or served


def _seconds(values: Percentiles) -> str:
    return f"p50 {values.p50:.3f}  p90 {values.p90:.3f}  p99 {values.p99:.3f} s"


def check_output(folder: Path) -> None:
    """Before a long run: makes the folder, and imports what draws. Raises SimulationError if it cannot be written."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise SimulationError(f"--out draws with matplotlib ({error}); install it, or use --json.") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not access(folder, W_OK):
            raise PermissionError("permission denied")
    except OSError as error:
        raise _unwritten(folder, error) from None


def write(folder: Path, simulation: Simulation, result: Result) -> list[Path]:
    """result.json, which needs no drawing, then plot.png and report.html. Raises SimulationError."""
    document = json.dumps(result.document(), indent=2, allow_nan=False)
    paths = [_write(folder / "result.json", f"{document}\n".encode())]
    image = plot(simulation, result)
    return [
        *paths,
        _write(folder / "report.html", f"{_page(result, image)}\n".encode()),
        _write(folder / "plot.png", image),
    ]


def _write(path: Path, data: bytes) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise _unwritten(path.parent, error) from None
    return path


def _unwritten(folder: Path, error: OSError) -> SimulationError:
    return SimulationError(f"The results cannot be written to {folder} ({error}); pass another --out.")


def _page(result: Result, image: bytes) -> str:
    title = f"{result.trace}: {result.policy}, {len(result.per_replica)} replicas"
    options = {**result.setup, "latency": result.latency_model}
    return _PAGE.format(
        title=escape(title),
        model=escape(f"Latency model {result.latency_model}: {result.latency_source}."),
        options=escape(", ".join(f"{name} {value}" for name, value in options.items() if value not in ("", None))),
        rows="".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows(result)),
        image=b64encode(image).decode(),
        replicas="".join(
            f"<tr><td>{escape(entry['replica'])}</td><td>{entry['requests']}</td><td>{entry['busy_share']:.0%}</td>"
            f"<td>{entry['steps']}</td></tr>"
            for entry in result.per_replica
        ),
    )
