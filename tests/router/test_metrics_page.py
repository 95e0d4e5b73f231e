"""docs/metrics.md: its Prometheus config is valid, and the metrics that it names exist."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from headrace_router.core.placement import Decision, KvSource, Placed
from headrace_router.dispatch.router_metrics import PLACEMENT_REASONS, placement_reason

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
(CONFIG,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def _promtool(*arguments: str, stdin: str = "") -> tuple[int, str]:
    """Its exit status and its output."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("needs promtool: apt-get install -y prometheus")
    done = subprocess.run([tool, *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_scrape_config_is_valid(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("mk-12345678")
    config = yaml.safe_load(CONFIG)
    config["scrape_configs"][0]["authorization"]["credentials_file"] = str(key)
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    status, printed = _promtool("check", "config", str(path))
    assert status == 0, printed


def test_the_metrics_on_the_page_are_served(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica()])
    with harness.client() as client:
        text = client.get("/metrics").text
    of_routers = re.sub(r"\nOf the controller, by .*?\n\n", "\n", PAGE, flags=re.DOTALL)
    for name in re.findall(r"`((?:vllm:|headrace_)\w+)`", of_routers):
        assert re.search(rf"^{name}(_count)?[{{ ]", text, re.MULTILINE), name


def test_every_series_is_zero_before_the_first_request(
    harness: Any, make_replica: Any, eventually: Callable[..., None]
) -> None:
    """Else a rate lacks the first increment, and a dashboard shows no data. Requests add no series."""
    harness.start([make_replica(), make_replica(replica_id="r1")])

    def series() -> dict[str, float]:
        text = client.get("/metrics").text
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines if "_created" not in name}

    with harness.client() as client:
        cold = series()
        for replica in ("r0", "r1"):
            labels = f'model_name="tiny",replica="{replica}"'
            for reason in ("stop", "length", "tool_calls"):
                assert cold[f'vllm:request_success_total{{finished_reason="{reason}",{labels}}}'] == 0
            for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"):
                assert cold[f"vllm:{name}_seconds_count{{{labels}}}"] == 0
                assert cold[f'vllm:{name}_seconds_bucket{{le="+Inf",{labels}}}'] == 0
        assert cold['headrace_placements_total{model_name="tiny",reason="cached"}'] == 0
        assert cold['headrace_request_errors_total{code="context_length_exceeded",status="400"}'] == 0
        for body in ({"max_tokens": 2}, {"max_tokens": 0}, {"quantum": 1}, {"prompt": [5] * 300}, {"model": "none"}):
            client.post("/v1/completions", json={"model": "tiny", "prompt": "x", **body})
        client.get("/nowhere")
        warm = series()
        assert warm.keys() == cold.keys()
        errors = {name: count for name, count in warm.items() if name.startswith("headrace_request_errors_total")}
        assert sum(errors.values()) == 5


@pytest.mark.parametrize("compressed", [True, False])
def test_a_scrape_gets_the_form_that_it_asks_for(shared: Any, compressed: bool) -> None:
    asked = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5"
    encoding = {"accept-encoding": "gzip" if compressed else "identity"}
    with shared.client() as client:
        given = client.get("/metrics", headers={"accept": asked, **encoding})
        plain = client.get("/metrics", headers={"accept": "text/html", **encoding})
    assert given.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(given.text)}
    assert families["vllm:request_success"].type == "counter"
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8" and "# EOF" not in plain.text
    for answer in (given, plain):
        assert answer.headers.get("content-encoding") == ("gzip" if compressed else None)


def test_placements_are_counted_by_reason_and_timed(harness: Any, make_replica: Any) -> None:
    harness.start([make_replica()], policy="predicted")

    def value(name: str) -> float:
        text = client.get("/metrics").text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found is not None else 0.0

    with harness.client() as client:
        for _ in range(3):
            client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 2})
        assert value('headrace_placements_total{model_name="tiny",reason="computed"}') == 3
        assert value('headrace_placement_seconds_count{model_name="tiny"}') == 3
        assert value('headrace_expected_cached_tokens_total{model_name="tiny"}') == 0
        assert 'headrace_found_cached_tokens_total{model_name="tiny"}' in client.get("/metrics").text


@pytest.mark.parametrize(
    ("source", "decided", "cached", "reason"),
    [
        (None, True, 0, "computed"),
        (None, True, 64, "cached"),
        (None, False, 0, "other"),
        (True, True, 64, "fetched"),
        (False, True, 0, "prefill"),
    ],
)
def test_the_reason_of_a_placement(source: bool | None, decided: bool, cached: int, reason: str) -> None:
    """source: whether it only sends what it has."""
    replica: Any = object()
    kv_source = KvSource(replica, cached_only=source) if source is not None else None
    decision = Decision("r", 1, 64) if decided else None
    assert reason in PLACEMENT_REASONS
    assert placement_reason(Placed(replica, kv_source, cached, decision)) == reason


def test_prometheus_reads_the_page_without_an_error(shared: Any) -> None:
    with shared.client() as client:
        text = client.get("/metrics").text
    status, printed = _promtool("check", "metrics", stdin=text)
    assert status in (0, 3), printed  # 3: style, such as the colon in the field's names; what cannot be parsed is 1
