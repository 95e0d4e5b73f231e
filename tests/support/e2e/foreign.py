"""Packages of others that talk to a server, in an environment of their own: made once, in the cache of tests."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

TYPED = ("instructor==1.17.0",)
CODEX = ("openai-codex-cli-bin==0.163.0",)
CLAUDE = ("claude-agent-sdk==0.2.189",)
AGENTS = ("openai-agents==0.24.0", "pydantic-ai-slim[openai]==2.68.0")  # instructor needs older packages than these


def foreign_python(packages: tuple[str, ...]) -> Path:
    """The interpreter; skips the test where the packages cannot be had."""
    key = hashlib.sha256(repr((packages, sys.version)).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "headrace-tests" / f"foreign-{key}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=120)
        install = [str(python), "-m", "pip", "install", "--quiet", *packages]
        if subprocess.run(install, timeout=900, check=False).returncode:
            pytest.skip(f"missing, and not to be had from the package index: {', '.join(packages)}")
        (folder / "complete").touch()
    return python
