"""Which addresses need a key: the banner and the spec agree."""

from typing import Any

import pytest

from headrace_cluster.launch.banner import banner
from headrace_cluster.local.state import ServeState
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_cluster.spec.key_rules import KeyRules
from headrace_cluster.spec.settings import build_spec

KEYS = {"keys": ["sk-12345678"]}
METERED = KEYS | {"metrics_key": "mk-12345678"}
OPEN = {"metrics_no_auth": True}
STATE = ServeState(
    1,
    1,
    "headrace",
    "http://127.0.0.1:8002",
    "k",
    8002,
    "http://127.0.0.1:8000",
    "127.0.0.1:8001",
    ("m",),
    metrics=("127.0.0.1:8003",),
)


@pytest.mark.parametrize(
    ("auth", "routers", "expected"),
    [
        ({}, {}, ("", "", "", "")),
        (KEYS, {}, ("needs an API key", "Authorize takes an API key", "no key", "needs an API key")),
        (METERED, {}, ("needs an API key", "Authorize takes an API key", "no key", "needs a metrics key")),
        ({"metrics_key": "mk-12345678"}, {}, ("", "", "", "needs a metrics key")),
        (KEYS, OPEN, ("needs an API key", "Authorize takes an API key", "no key", "no key")),
    ],
)
def test_each_address_has_its_rule(auth: Any, routers: Any, expected: tuple[str, str, str, str]) -> None:
    rules = KeyRules.of(parse_spec({"auth": auth, "routers": routers}))
    assert (rules.api, rules.docs, rules.health, rules.metrics) == expected
    text = banner(STATE, {}, {}, 1.0, keys=rules).text()
    rows = {line.split()[0]: line for line in text.split("\n") if line.startswith("  ")}
    for row, rule in zip(("API", "docs", "health", "metrics", "gRPC"), (*expected, expected[0]), strict=True):
        assert rows[row].endswith(f"  ({rule})") if rule else "key" not in rows[row], row
    assert "sk-12345678" not in text and "mk-12345678" not in text


def test_public_metrics_are_reported() -> None:
    spec = parse_spec({"auth": KEYS, "routers": OPEN | {"metrics_host": "10.0.0.5"}})
    assert KeyRules.of(spec).metrics == "no key: open to all who can reach it"


def test_a_metrics_key_comes_from_the_environment_too() -> None:
    spec = build_spec({}, environ={"HEADRACE_METRICS_KEY": " mk-12345678 "})
    (key,) = spec.auth.load_metrics()
    assert key.key.get_secret_value() == "mk-12345678" and "mk-12345678" not in str(spec.model_dump(mode="json"))
