"""The C++ sources as a shared library: in the wheel, one per kind of CPU; else compiled once per user, source and CPU.

A compiled library is named by a digest of all its inputs, written under a temporary name and renamed, so that processes
that build at the same time do not interfere. The cache folder must belong to this user and be writable by no other: a
library in it is loaded. This file imports nothing of the project: the wheel's build and the set-up run it alone.
"""

import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"  # only in a wheel
_FLAGS: tuple[str, ...] = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",  # vector.h's multiply_add says why
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
    "-Wno-psabi",
)
_TIMEOUT_S = 120
_APT = "apt-get install g++"


@dataclass(frozen=True)
class Target:
    """A kind of CPU: `flags` are for the compiler, `needs` the properties that it has by /proc/cpuinfo."""

    name: str
    title: str
    flags: tuple[str, ...]
    needs: frozenset[str] = frozenset()


_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_X86 = (
    Target("avx512-bf16", "AVX-512 with bfloat16", ("-march=x86-64-v4", "-mavx512bf16"), _V4 | {"avx512_bf16"}),
    Target("avx512", "AVX-512", ("-march=x86-64-v4",), _V4),
    Target("avx2", "AVX2", ("-march=x86-64-v3",), _V3),
)
_ARM = (Target("neon", "NEON", ("-march=armv8.2-a",), frozenset({"asimd", "atomics"})),)
TARGETS = {"x86_64": _X86, "aarch64": _ARM}.get(platform.machine(), ())
"""The kinds that wheels have libraries for, best first. All compute the same bits, arithmetic in bfloat16 excepted."""
_OTHER = Target("native", "this CPU", ("-march=native",))


@dataclass(frozen=True)
class Library:
    """A library on disk, and what it was made for."""

    path: Path
    target: Target
    prebuilt: bool


class KernelBuildError(RuntimeError):
    """The C++ kernels could not be compiled here."""


def find_compiler() -> str | None:
    """Path of the C++ compiler: $CXX, else g++, c++ or clang++."""
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def targets() -> list[Target]:
    """Those that this CPU can run, best first; one for this CPU alone where no other fits."""
    properties = _cpu_lines("flags", "Features").split()
    return [target for target in TARGETS if target.needs.issubset(properties)] or [_OTHER]


def find_library(name: str | None = None) -> Library:
    """The wheel's library for this CPU, else one from the cache, which is built if it is not there.

    name: of a target, in place of the best one. Raises KernelBuildError with a remedy.
    """
    able = targets()
    target = able[0] if name is None else next((one for one in able if one.name == name), None)
    if target is None:
        known = ", ".join(one.name for one in able)
        raise KernelBuildError(f"this CPU has no kernels named {name}; it has {known}")
    prebuilt = PREBUILT / f"{target.name}.so"
    if prebuilt.exists():
        return Library(prebuilt, target, prebuilt=True)
    compiler = find_compiler()
    if compiler is None:
        raise KernelBuildError(f"there is no C++ compiler; install one (Debian: {_APT})")
    library = _cache_folder() / f"headrace-cpu-{target.name}-{_digest(compiler, target)}.so"
    if not library.exists():
        build(compiler, target, library)
    return Library(library, target, prebuilt=False)


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def _digest(compiler: str, target: Target) -> str:
    parts = [_run([compiler, "--version"]), platform.machine(), repr((_FLAGS, target.flags))]
    if target is _OTHER:  # a home folder may be shared by different machines
        parts.append(_cpu_lines("flags", "Features", "model", "cpu family", "CPU part", "CPU implementer"))
    parts += [path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _cpu_lines(*names: str) -> str:
    """What /proc/cpuinfo says about these properties of the first CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    pairs = (line.partition(":") for line in lines)
    return "\n".join(value for name, _, value in pairs if name.strip() in names)


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


def build(compiler: str, target: Target, library: Path) -> None:
    """Compiles all sources at the same time. Raises KernelBuildError."""
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as work:
        running = []
        for source in _sources():
            made = Path(work) / f"{source.stem}.o"
            command = [compiler, *_FLAGS, *target.flags, "-c", str(source), "-o", str(made)]
            running.append((made, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
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
        _run([compiler, "-shared", "-o", str(linked), *(str(made) for made, _ in running)])
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


if __name__ == "__main__":  # the set-up: what the first start would wait for
    try:
        print(find_library().path)
    except KernelBuildError as error:
        sys.exit(str(error))
