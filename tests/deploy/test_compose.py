"""compose.yaml is valid, its command is one that `serve` accepts, and what it starts is closed to others."""

import json
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from headrace_cluster.cli.app import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILE = DEPLOY / "compose.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
SERVERS = {"headrace": "cpu", "headrace-gpu": "gpu"}  # service: profile
LONGEST_STOP = 20  # seconds of `serve` to end Ray, after those for requests


def _service(name: str) -> dict[str, Any]:
    found: dict[str, Any] = COMPOSE["services"][name]
    return found


def _default(text: str) -> str:
    """The text where no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_the_file_fits_the_schema_of_compose(need_tool: Callable[[str, str], str]) -> None:
    tool = need_tool("check-jsonschema", "pip install check-jsonschema")
    command = [tool, "--builtin-schema", "vendor.compose-spec", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_image_has_a_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name in COMPOSE["services"]:
        image, _, tag = _default(_service(name)["image"]).rpartition(":")
        assert image and re.fullmatch(r"v?\d+\.\d+\.\d+", tag), name
        if name in SERVERS:
            assert tag == version
            build = _service(name)["build"]
            dockerfile = (DEPLOY / build["context"] / build["dockerfile"]).read_text()
            assert f" AS {build['target']}\n" in dockerfile and image == f"headrace-{build['target']}"


@pytest.mark.parametrize("server", SERVERS)
def test_the_command_makes_a_spec_that_needs_keys(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HEADRACE_CONFIG", "HEADRACE_API_KEYS", "HEADRACE_METRICS_KEY"):
        monkeypatch.delenv(variable, raising=False)
    for name in ("api-keys", "metrics-key"):
        assert name in _service(server)["secrets"]
        (tmp_path / name).write_text(f"key-of-{name}\n")
        (tmp_path / name).chmod(0o600)
    command, *flags = [_default(word).replace("/run/secrets", str(tmp_path)) for word in _service(server)["command"]]
    assert command == "serve"
    done = CliRunner().invoke(app, ["config", "show", *flags], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    spec = yaml.safe_load(done.output)
    assert spec["models"][0]["source"] == "smollm2"
    assert spec["routers"]["host"] == "0.0.0.0" and spec["routers"]["metrics_port"] == 8003
    assert spec["auth"]["keys_file"] == str(tmp_path / "api-keys")
    assert spec["auth"]["metrics_key_file"] == str(tmp_path / "metrics-key")
    assert not spec["auth"]["allow_no_auth"] and not spec["routers"]["metrics_no_auth"]
    assert spec["admin"]["host"] == "127.0.0.1"
    grace = float(_service(server)["stop_grace_period"].removesuffix("s"))
    assert grace >= spec["routers"]["shutdown_seconds"] + LONGEST_STOP


def test_nothing_is_reachable_from_other_machines_by_default() -> None:
    for name, service in COMPOSE["services"].items():
        assert all(_default(port).startswith("127.0.0.1:") for port in service["ports"]), name
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "network_mode", "pid", "ipc", "cap_add", "user"} & service.keys(), name
        assert "docker.sock" not in json.dumps(service), name


def test_secrets_are_files_and_each_service_has_its_own_only() -> None:
    files = {name: secret["file"] for name, secret in COMPOSE["secrets"].items()}
    assert files == {name: f"./secrets/{name}" for name in ("api-keys", "metrics-key", "grafana-password")}
    assert _service("prometheus")["secrets"] == ["metrics-key"]
    assert _service("grafana")["secrets"] == ["grafana-password"]
    assert "/deploy/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
