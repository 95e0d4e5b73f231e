"""The summary of `serve` once it is ready: grammar, width, and the detail of each replica."""

import json
from typing import Any

import msgspec
import pytest

from headrace_cluster.launch import display
from headrace_cluster.launch.banner import Banner, banner, starting
from headrace_cluster.local.state import ServeState
from headrace_cluster.program import program_name
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_cluster.spec.key_rules import KeyRules
from headrace_worker.core.config import ReplicaStarted

LOGS = "/home/user/.headrace/logs/headrace-9152-20261122T024717Z"
STARTED = ReplicaStarted(
    address="127.0.0.1:1",
    boot_id=b"",
    pid=1,
    device="cpu",
    dtype="float32",
    revision="",
    threads=2,
    max_model_len=2048,
    max_num_seqs=256,
    max_num_batched_tokens=512,
    kv_blocks=363,
    kv_tokens=363 * 16,
    kv_bytes=268_000_000,
    block_size=16,
    weight_bytes=538_000_000,
    notes=["Fused from outside: 61 norms.", "Steps: one at a time."],
)


def _banner(*models: str, verbose: bool = False, **changes: Any) -> Banner:
    state = ServeState(
        pid=1,
        started=1,
        cluster="headrace",
        admin_url="http://127.0.0.1:9152",
        admin_key="",
        admin_port=9152,
        http_url="http://127.0.0.1:9150",
        grpc_address="127.0.0.1:9151",
        models=models,
        metrics=("127.0.0.1:9150",),
        ray_dashboard="http://127.0.0.1:8265",
        ray_token_file="/home/user/.headrace/ray-token-4242",
        log_folder=LOGS,
    )
    facts = msgspec.structs.replace(STARTED, **changes)
    return banner(
        state,
        {f"{models[0]}-0": facts},
        {},
        14.25,
        keys=KeyRules.of(parse_spec({})),
        verbose=verbose,
    )


@pytest.mark.parametrize(
    ("models", "headline"),
    [
        (("tiny",), "tiny is ready after 14.2 s"),
        (("tiny", "f32"), "tiny and f32 are ready after 14.2 s"),
        (("a", "b", "c"), "a, b and c are ready after 14.2 s"),
    ],
)
def test_the_headline_has_singular_and_plural(models: tuple[str, ...], headline: str) -> None:
    assert _banner(*models).headline == headline


def test_the_start_message_counts_replicas() -> None:
    spec = parse_spec({"models": [{"name": "tiny", "replicas": 2}, {"name": "f32", "prefill": {}, "decode": {}}]})
    assert starting(spec.models) == "starting tiny (2 replicas) and f32 (2 replicas)"
    assert starting(spec.models[:1]) == "starting tiny (2 replicas)"
    assert starting(parse_spec({}).models) == "starting smollm2 (1 replica)"


@pytest.mark.parametrize("changes", [{}, {"tp": 2, "pp": 2}])
def test_lines_fit_80_columns_except_long_words(changes: dict[str, Any]) -> None:
    for line in _banner("smollm2", **changes).text(80).splitlines():
        assert len(line) <= 80, line
    wrapped = [line for line in _banner("smollm2").text(80).splitlines() if line.startswith("   ")]
    assert wrapped and all(line.startswith(" " * 13) and line[13] != " " for line in wrapped)
    assert _banner("smollm2").text().count("\n") < _banner("smollm2").text(80).count("\n"), "no wrapping in a pipe"


def test_what_makes_a_replica_slow_is_shown_without_verbose() -> None:
    slow = "CPU kernels: torch only, several times slower, since there is no C++ compiler."
    facts = {"warnings": [slow], "notes": [slow, "Steps: one at a time."]}
    assert [_banner("smollm2", verbose=verbose, **facts).text().count(slow) for verbose in (False, True)] == [1, 1]


def test_a_replica_has_one_line_unless_verbose() -> None:
    short = _banner("smollm2").text()
    assert "  smollm2-0  cpu, float32, 2 threads, KV cache 5,808 tokens, context 2,048\n" in short
    assert "Fused" not in short
    full = _banner("smollm2", verbose=True).text()
    for words in ("weights 0.50 GiB", "up to 256 requests", "Fused from outside: 61 norms.", "Steps: one at a time."):
        assert words in full
    assert f"  logs       {LOGS}  ({program_name()} logs)\n" in short


def test_as_json_the_banner_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[str, dict[str, object]]] = []

    class Log:
        def info(self, sentence: str, **facts: object) -> None:
            logged.append((sentence, facts))

    monkeypatch.setattr(display, "_log", Log())
    _banner("smollm2", verbose=True).show("json")
    ((sentence, facts),) = logged
    assert sentence == "smollm2 is ready after 14.2 s"
    assert facts["API"] == "http://127.0.0.1:9150/v1" and str(facts["smollm2-0"]).endswith("; Steps: one at a time.")
    json.dumps(facts)
