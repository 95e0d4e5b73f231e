"""docs/metrics.md: its Prometheus config is valid, and the metrics that it names exist."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

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
    for name in re.findall(r"`((?:vllm:|headrace_)\w+)`", PAGE):
        assert re.search(rf"^{name}[{{ ]", text, re.MULTILINE), name


def test_prometheus_reads_the_page_without_an_error(shared: Any) -> None:
    with shared.client() as client:
        text = client.get("/metrics").text
    status, printed = _promtool("check", "metrics", stdin=text)
    assert status in (0, 3), printed  # 3: style, such as the colon in the field's names; what cannot be parsed is 1
