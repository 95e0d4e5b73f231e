"""Packages of others that talk to a server, in an environment of their own: made once, in the cache of tests."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = (
    "lm-eval[api]==0.4.13",
    "instructor==1.17.0",
    "openai-agents==0.24.0",
    "pydantic-ai-slim[openai]==2.68.0",
)


def foreign_python() -> Path:
    """The interpreter; skips the test where the packages cannot be had."""
    key = hashlib.sha256(repr((PACKAGES, sys.version)).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "headrace-tests" / f"foreign-{key}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=120)
        install = [str(python), "-m", "pip", "install", "--quiet", *PACKAGES]
        if subprocess.run(install, timeout=900, check=False).returncode:
            pytest.skip(f"missing, and not to be had from the package index: {', '.join(PACKAGES)}")
        (folder / "complete").touch()
    return python
