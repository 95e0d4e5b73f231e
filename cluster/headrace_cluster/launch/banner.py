"""The summary that `serve` shows once all replicas and routers are ready."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace_base.address import port_of
from headrace_base.errors import counted
from headrace_base.logs import LogFormat, stderr, stderr_width, wrapped
from headrace_cluster.core.view import ClusterView, Opened
from headrace_cluster.launch.display import show_message
from headrace_cluster.local.state import ServeState
from headrace_cluster.program import program_name
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.key_rules import KeyRules
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_worker.core.config import ReplicaStarted


@dataclass(frozen=True, slots=True)
class Banner:
    """A headline, rows of (name, text), and hints. A row without a name continues the one above it."""

    headline: str
    rows: list[tuple[str, str]]
    hint: str = ""

    def text(self, width: int | None = None) -> str:
        """Rows and hint, aligned, each with a line break; wrapped at `width` columns if given."""
        indent = max(len(name) for name, _ in self.rows) + 4
        lines = []
        for name, row in self.rows:
            shown = wrapped(row, width, indent) if width is not None else row
            lines.append(f"  {name:<{indent - 4}}  {shown}\n")
        return "".join(lines) + (f"{self.hint}\n" if self.hint else "")

    def show(self, format: LogFormat) -> None:
        """The headline as a log line and the rest below it; as JSON, one object with the rows as its fields."""
        if format == "json":
            show_message(self.headline, **self.facts())
            return
        show_message(self.headline)
        stderr().write(self.text(stderr_width()))
        stderr().flush()

    def facts(self) -> dict[str, Any]:
        """The rows by name, for a JSON log."""
        found: dict[str, Any] = {}
        name = ""
        for key, row in self.rows:
            name = key or name
            found[name] = f"{found[name]}; {row}" if name in found else row
        return found


def show_ready(state: ServeState, view: ClusterView, spec: ClusterSpec, seconds: float) -> None:
    """Shows the banner of a cluster that has become ready within `seconds`."""
    keys, logs = KeyRules.of(spec), spec.logs
    banner(state, view.started, view.roles, seconds, keys=keys, verbose=logs.verbose).show(logs.format)


def banner(
    state: ServeState,
    started: dict[str, ReplicaStarted],
    roles: dict[str, str],
    seconds: float,
    *,
    keys: KeyRules,
    verbose: bool = False,
) -> Banner:
    """Every address, and per replica its device and sizes; verbose: all values that it chose."""
    headline = f"{_listed(state.models)} {'is' if len(state.models) == 1 else 'are'} ready after {seconds:.1f} s"
    rows: list[tuple[str, str]] = []
    if state.http_url:
        url, scheme = state.http_url, state.http_url.partition("://")[0]
        grpc = "; ".join(filter(None, ("TLS" if scheme == "https" else "", keys.api)))
        rows += [
            ("API", f"{url}/v1{_note(keys.api)}"),
            ("docs", f"{url}/docs{_note(keys.docs)}"),
            ("health", f"{url}/health{_note(keys.health)}"),
            *(
                ("metrics" if not index else "", f"{scheme}://{own}/metrics{_note(keys.metrics)}")
                for index, own in enumerate(state.metrics)
            ),
            ("gRPC", f"{state.grpc_address}{_note(grpc)}"),
        ]
    rows.append(("admin", f"{state.admin_url}  (its key is kept for you)"))
    if not state.http_url:
        rows.append(
            ("control", f"{state.control_address}  ({program_name()} router --controller {state.control_address})")
        )
        rows.append(("secret", state.secret_file))
    if state.ray_dashboard:
        token = f"  (token: cat {state.ray_token_file})" if state.ray_token_file else ""
        rows.append(("Ray", state.ray_dashboard + token))
    for replica_id, facts in sorted(started.items()):
        role = roles.get(replica_id, "both")
        rows.append((replica_id, (f"{role}, " if role != "both" else "") + _replica(facts, verbose)))
        rows += [("", warning) for warning in facts.warnings]
        rows += [("", note) for note in facts.notes if note not in facts.warnings] if verbose else []
    rows += defaults_rows(started)
    if state.log_folder:
        rows.append(("logs", f"{state.log_folder}  ({program_name()} logs)"))
    hints = [("Talk to it", f"{program_name()} chat {_flag(state)}")] if state.http_url else []
    hints.append(("Look at it", f"{program_name()} status {_flag(state)}"))
    stop = f"{program_name()} stop {_flag(state)}"
    hints.append(("Stop it", f"{stop}  (Ctrl-C ends this process alone)" if state.detaches else f"Ctrl-C, or {stop}"))
    return Banner(headline, rows, "\n".join(f"{what + ':':<12} {how}" for what, how in hints))


def defaults_rows(started: dict[str, ReplicaStarted]) -> list[tuple[str, str]]:
    """A row per model with default options for requests."""
    models = {facts.model: facts.defaults for facts in started.values()}
    rows: list[tuple[str, str]] = []
    for model, defaults in sorted(models.items()):
        if defaults:
            text = ", ".join(f"{name} {value:.12g}" for name, value in defaults.items())
            owner = f"{model}: " if len(models) > 1 else ""
            rows.append(("defaults" if not rows else "", f"{owner}{text}  (a request's own values override them)"))
    return rows


def _note(rule: str) -> str:
    return f"  ({rule})" if rule else ""


def starting(models: Sequence[ModelSpec]) -> str:
    """A sentence with the models and replicas that will be started."""
    counts = [sum(pool.replicas for pool in model.pools) for model in models]
    parts = [f"{model.name} ({counted(count, 'replica')})" for model, count in zip(models, counts, strict=True)]
    return f"starting {_listed(parts)}"


def attached_note(opened: Opened) -> str:
    """What was found of an earlier process's cluster; empty without any."""
    if not opened.adopted:
        return ""
    outdated = f"; {opened.outdated} with other settings are replaced one after the other" if opened.outdated else ""
    return f"attached to {counted(opened.adopted, 'build')} of an earlier controller{outdated}"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _replica(facts: ReplicaStarted, verbose: bool) -> str:
    split = f"tp {facts.tp}, pp {facts.pp}, " if facts.tp * facts.pp > 1 else ""
    kept = f"KV cache {facts.kv_tokens:,} tokens, context {facts.max_model_len:,}"
    text = f"{split}{facts.device}, {facts.dtype}, {counted(facts.threads, 'thread')}, {kept}"
    if not verbose:
        return text
    weights, cache = (f"{size / (1 << 30):.2f} GiB" for size in (facts.weight_bytes, facts.kv_bytes))
    return f"{text}, weights {weights}, KV cache {cache}, up to {counted(facts.max_num_seqs, 'request')} at a time"


def _flag(state: ServeState) -> str:
    """The flag that selects this server among all others."""
    port = port_of(state.http_url)
    return f"--port {port}" if port else f"--admin-port {state.admin_port}"
