"""Prometheus reads the routers of compose.yaml, and what the board shows exists and is computed as intended."""

import asyncio
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from headrace_router.dispatch.replica_metrics import FleetCollector
from headrace_router.dispatch.router_metrics import RouterMetrics

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMTOOL = ("promtool", "apt-get install -y prometheus")
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "overview.json").read_text())
EXPRESSIONS = {
    f"{panel['title']}: {target['legendFormat']}": target["expr"]
    for panel in BOARD["panels"]
    for target in panel["targets"]
}
NAME = re.compile(r"\b(?:vllm:|headrace_)\w+")


def _served() -> dict[str, str]:
    """Metrics that a router serves: the type by the name without the suffix of a histogram's series."""
    page, _ = asyncio.run(RouterMetrics().page("", ""))
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", page.decode(), re.MULTILINE))
    no_fleet: Any = None  # only `read` uses it
    for family in FleetCollector(no_fleet).metrics([]):
        types[family.name + ("_total" if family.type == "counter" else "")] = family.type
    return types


def _promtool(tool: str, *arguments: str) -> None:
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _expression(text: str) -> str:
    """As Grafana sends it, with all models chosen."""
    return text.replace("$__rate_interval", "1m").replace("$model", ".*")


def test_prometheus_scrapes_the_metrics_address_with_its_key(
    need_tool: Callable[[str, str], str], tmp_path: Path
) -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    server = COMPOSE["services"]["headrace"]
    (port,) = [word.partition("=")[2] for word in server["command"] if word.startswith("--metrics-port")]
    assert job["static_configs"] == [{"targets": [f"headrace:{port}"]}]
    (file,) = [word.partition("=")[2] for word in server["command"] if word.startswith("--metrics-key-file")]
    assert job["authorization"]["credentials_file"] == file == "/run/secrets/metrics-key"
    assert "metrics-key" in COMPOSE["services"]["prometheus"]["secrets"]
    (tmp_path / "key").write_text("a-key")
    job["authorization"]["credentials_file"] = str(tmp_path / "key")  # promtool reads it
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    _promtool(need_tool(*PROMTOOL), "check", "config", str(tmp_path / "prometheus.yml"))


def test_metrics_of_the_board_are_served() -> None:
    served = _served()
    (choice,) = BOARD["templating"]["list"]
    assert NAME.findall(choice["query"]["query"])[0] in served
    for title, expression in EXPRESSIONS.items():
        names = NAME.findall(expression)
        assert names, title
        for name in names:
            kind = served.get(name.removesuffix("_bucket"))
            assert kind is not None and (kind == "histogram") == name.endswith("_bucket"), name
            if kind != "gauge":
                rate = rf"rate\({name}(\{{[^}}]*\}})?\[\$__rate_interval\]\)"
                assert re.search(rate, expression), f"{title}: {name} needs rate()"


def test_expressions_of_the_board_are_valid(need_tool: Callable[[str, str], str], tmp_path: Path) -> None:
    rules = [{"record": f"panel_{n}", "expr": _expression(text)} for n, text in enumerate(EXPRESSIONS.values())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    _promtool(need_tool(*PROMTOOL), "check", "rules", str(tmp_path / "rules.yml"))


def test_two_routers_do_not_double_what_replicas_report(need_tool: Callable[[str, str], str], tmp_path: Path) -> None:
    """Every router serves the replica's own series; requests and cached tokens are each router's own."""
    routers = ("a:8003", "b:8003")

    def series(name: str, values: str, labels: str = "") -> list[dict[str, str]]:
        common = f'model_name="tiny",{labels}'
        return [{"series": f'{name}{{{common}instance="{router}"}}', "values": values} for router in routers]

    replica = 'replica="tiny-0",'
    given = [
        *series("headrace_replica_ready", "1+0x10", replica),
        *series("vllm:num_requests_running", "3+0x10", replica),
        *series("vllm:generation_tokens_total", "0+60x10", replica),
        *series("vllm:request_success_total", "0+15x10", f'{replica}finished_reason="stop",'),
        *series("headrace_prompt_tokens_total", "0+30x10"),
        *series("headrace_cached_prompt_tokens_total", "0+15x10"),
    ]
    expected = {
        "Ready replicas: {{model_name}}": ('{model_name="tiny"}', 1),
        "Running and waiting at replicas: {{model_name}} running": ('{model_name="tiny"}', 3),
        "Tokens per second: {{model_name}} out": ('{model_name="tiny"}', 4),
        "Finished choices: {{model_name}}: {{finished_reason}}": (
            '{finished_reason="stop", model_name="tiny"}',
            2,
        ),
        "Hit share: {{model_name}}": ('{model_name="tiny"}', 0.5),
    }
    checks = [
        {
            "expr": _expression(EXPRESSIONS[title]),
            "eval_time": "2m",
            "exp_samples": [{"labels": labels, "value": value}],
        }
        for title, (labels, value) in expected.items()
    ]
    test = {"interval": "15s", "input_series": given, "promql_expr_test": checks}
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"evaluation_interval": "15s", "tests": [test]}))
    _promtool(need_tool(*PROMTOOL), "test", "rules", str(tmp_path / "test.yml"))
