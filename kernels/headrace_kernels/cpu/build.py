"""Compiles the C++ sources into a shared library, once per user, source, compiler and CPU.

The library is named by a digest of all its inputs, written under a temporary name and renamed, so that processes that
build at the same time do not interfere. The cache folder must belong to this user and be writable by no other: a
library in it is loaded.
"""

import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
_FLAGS: tuple[str, ...] = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",  # vector.h's multiply_add says why
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
    "-Wno-psabi",
)
_TIMEOUT_S = 120
_APT = "apt-get install g++"


class KernelBuildError(RuntimeError):
    """The C++ kernels could not be compiled here."""


def find_compiler() -> str | None:
    """Path of the C++ compiler: $CXX, else g++, c++ or clang++."""
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def library_path() -> Path:
    """The compiled library; builds it if it is not in the cache. Raises KernelBuildError with a remedy."""
    compiler = find_compiler()
    if compiler is None:
        raise KernelBuildError(f"there is no C++ compiler; install one (Debian: {_APT})")
    folder = _cache_folder()
    library = folder / f"headrace-cpu-{_digest(compiler)}.so"
    if not library.exists():
        _build(compiler, library)
    return library


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def _digest(compiler: str) -> str:
    version = _run([compiler, "--version"])
    parts = [version, platform.machine(), _cpu_flags(), repr(_FLAGS)]
    parts += [path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _cpu_flags() -> str:
    """The CPU properties that -march=native depends on: a home folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    kept = ("flags", "Features", "model", "cpu family", "CPU part", "CPU implementer")
    return "\n".join(line for line in lines if line.split("\t")[0].split(":")[0].strip() in kept)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "headrace" / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError as error:
        raise KernelBuildError(
            f"the cache folder cannot be made ({error.strerror}); set XDG_CACHE_HOME to a writable one"
        ) from error
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KernelBuildError(
            "the cache folder headrace/kernels can be written by other users, and libraries are loaded from it; "
            "restrict it to your user (chmod 700) or set XDG_CACHE_HOME"
        )
    return folder


def _build(compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as work:
        running = []
        for source in _sources():
            target = Path(work) / f"{source.stem}.o"
            command = [compiler, *_FLAGS, "-c", str(source), "-o", str(target)]
            running.append((target, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
        failures = []
        for _, process in running:
            try:
                message = process.communicate(timeout=_TIMEOUT_S)[1]
            except subprocess.TimeoutExpired:
                process.kill()
                message = process.communicate()[1]
            if process.returncode:
                failures.append(message)
        if failures:
            raise KernelBuildError(_compiler_failed(failures[0]))
        # Linked without -fopenmp: the OpenMP runtime is the one that torch has already loaded (see library.py).
        linked = Path(work) / library.name
        _run([compiler, "-shared", "-o", str(linked), *(str(target) for target, _ in running)])
        linked.replace(library)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"the C++ compiler does not run: {type(error).__name__}") from error
    if done.returncode:
        raise KernelBuildError(_compiler_failed(done.stderr))
    return done.stdout


def _compiler_failed(message: str) -> str:
    lines = [line for line in message.splitlines() if "error" in line]
    reason = re.sub(r"\S*/", "", lines[0])[:200] if lines else "no message"  # no paths
    return f"the C++ compiler failed ({reason}); a current g++ is known to work ({_APT})"
