"""What is said once everything is up."""

from collections.abc import Sequence

from headrace_cluster.sizes import format_bytes
from headrace_cluster.state import ServeState
from headrace_worker.config import ReplicaStarted


def banner(
    state: ServeState,
    started: dict[str, ReplicaStarted],
    roles: dict[str, str],
    seconds: float,
    *,
    metrics: Sequence[str],
    auth: bool,
) -> str:
    """Every address, and per replica what it runs on. Plain text, aligned. metrics: host:port of each router."""
    lines = [f"{', '.join(state.models)} is ready after {seconds:.1f} s"]
    rows: list[tuple[str, str]] = []
    if state.http_url:
        url = state.http_url
        rows += [
            ("API", f"{url}/v1" + ("  (needs an API key)" if auth else "")),
            ("docs", f"{url}/docs"),
            ("health", f"{url}/health"),
            *(("metrics" if not index else "", f"http://{own}/metrics") for index, own in enumerate(metrics)),
            ("gRPC", state.grpc_address),
        ]
    rows.append(("admin", f"{state.admin_url}  (headrace status, headrace stop; its key is kept for you)"))
    if not state.http_url:
        rows.append(("control", f"{state.control_address}  (headrace router --controller {state.control_address})"))
        rows.append(("secret", state.secret_file))
    if state.ray_dashboard:
        token = f"  (token: cat {state.ray_token_file})" if state.ray_token_file else ""
        rows.append(("Ray", state.ray_dashboard + token))
    for replica_id, facts in sorted(started.items()):
        role = roles.get(replica_id, "both")
        rows.append((replica_id, (f"{role}, " if role != "both" else "") + _replica(facts)))
        rows += [("", note) for note in facts.notes]
    width = max(len(name) for name, _ in rows)
    lines += [f"  {name:<{width}}  {text}" for name, text in rows]
    if state.http_url:
        lines.append(f"Talk to it: headrace chat{_port_flag(state)}      Stop it: Ctrl-C, or headrace stop")
    return "\n".join(lines)


def _replica(facts: ReplicaStarted) -> str:
    tokens = facts.kv_blocks * facts.block_size
    ranks = facts.tp * facts.pp
    split = f"{ranks} ranks (tp {facts.tp}, pp {facts.pp}), the first on " if ranks > 1 else ""
    threads = f"{facts.threads} thread{'s' if facts.threads > 1 else ''}"
    return (
        f"{split}{facts.device}, {facts.dtype}, {threads}, weights {format_bytes(facts.weight_bytes)}, "
        f"KV cache {format_bytes(facts.kv_bytes)} ({tokens:,} tokens), context {facts.max_model_len:,}, "
        f"up to {facts.max_num_seqs} requests at a time"
    )


def _port_flag(state: ServeState) -> str:
    port = state.http_url.rpartition(":")[2]
    return "" if port == "8000" else f" --port {port}"
