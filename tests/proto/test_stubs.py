"""The generated stubs match the .proto files."""

import filecmp
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "proto"


def test_stubs_are_current(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="pip install grpcio-tools")
    protos = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("headrace_proto/*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *outputs, *protos], cwd=ROOT, check=True)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*"))
    stale = [str(path) for path in made if not filecmp.cmp(tmp_path / path, ROOT / path, shallow=False)]
    assert made
    assert not stale, f"run proto/generate.sh: {stale}"
