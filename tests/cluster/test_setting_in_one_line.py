"""A setting of replicas is one declaration: flag, variable, file, schema, and what a rank receives follow from it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace_worker.core import config

DECLARATION = """
    dummy_limit: Annotated[int, Field(ge=1, description="of nothing", json_schema_extra=flag("--dummy-limit"))] = 7"""
CLASS_END = "\n\n\n@dataclass(frozen=True, kw_only=True)\nclass ReplicaConfig"

RECEIVED = """
from headrace_cluster.core.rank_config import fingerprint, replica_config
from headrace_cluster.spec.settings import build_spec
config = replica_config(build_spec({}).models[0], replica_id="m-0")
print(config.dummy_limit, fingerprint(config).hex())
"""


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """run(ARGUMENTS, VARIABLE=VALUE): the interpreter's output, with a copy of the worker that has another setting."""
    package = Path(config.__file__).parents[1]
    copy = tmp_path / package.name
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    module = copy / "core" / "config.py"
    before = module.read_text()
    assert before.count(CLASS_END) == 1
    module.write_text(before.replace(CLASS_END, f"{DECLARATION}{CLASS_END}"))
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))

    def call(*arguments: str, **variables: str) -> str:
        environ = os.environ | {"PYTHONPATH": path} | variables
        return subprocess.run(
            [sys.executable, *arguments], env=environ, capture_output=True, text=True, check=True
        ).stdout

    return call


def test_one_line_declares_a_setting(run: Any, tmp_path: Path) -> None:
    serve = ("-m", "headrace_cluster")
    assert "--dummy-limit" in run(*serve, "serve", "--help")
    assert "dummy_limit: 8\n" in run(*serve, "config", "show", "--dummy-limit", "8")
    (tmp_path / "c.yaml").write_text("models: [{dummy_limit: 9}]")
    assert "dummy_limit: 9\n" in run(*serve, "config", "show", "-f", str(tmp_path / "c.yaml"))
    field = json.loads(run(*serve, "config", "schema"))["$defs"]["ModelSpec"]["properties"]["dummy_limit"]
    assert (field["flag"], field["minimum"], field["default"]) == ("--dummy-limit", 1, 7)
    received, fingerprint = run("-c", RECEIVED, HEADRACE_DUMMY_LIMIT="10").split()
    assert received == "10" and fingerprint != run("-c", RECEIVED).split()[1], (
        "a rank with another value is not adopted"
    )
