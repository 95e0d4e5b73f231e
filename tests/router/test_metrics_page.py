"""docs/metrics.md: its Prometheus config is valid, and the metrics that it names exist."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_router.core.placement import Decision, KvSource, Placed
from headrace_router.dispatch.measured_placement import placement_reason

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


def test_the_metrics_on_the_page_are_served(shared: Any) -> None:
    with shared.client() as client:
        client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 2})
        client.get("/nowhere")
        text = client.get("/metrics").text
    of_routers = re.sub(r"\nOf the controller, by .*?\n\n", "\n", PAGE, flags=re.DOTALL)
    for name in re.findall(r"`((?:vllm:|headrace_)\w+)`", of_routers):
        assert re.search(rf"^{name}(_count)?[{{ ]", text, re.MULTILINE), name


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
    assert placement_reason(Placed(replica, kv_source, cached, decision)) == reason


def test_prometheus_reads_the_page_without_an_error(shared: Any) -> None:
    with shared.client() as client:
        text = client.get("/metrics").text
    status, printed = _promtool("check", "metrics", stdin=text)
    assert status in (0, 3), printed  # 3: style, such as the colon in the field's names; what cannot be parsed is 1
