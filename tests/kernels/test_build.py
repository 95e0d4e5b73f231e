"""The C++ kernels in new processes: one OpenMP runtime, concurrent builds, and the fallback without them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_kernels.cpu import build

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler: apt-get install g++")


def _start(code: str, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(str(ROOT / package) for package in ("kernels", "proto"))
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "HEADRACE_CPU_KERNELS": "on", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _output(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    return output


_BUILD = """
import os, torch, headrace_kernels as k
torch.set_num_threads(1)
x = torch.randn(64, 576)
torch.testing.assert_close(k.rms_norm(x, torch.ones(576), 1e-5), torch.nn.functional.rms_norm(x, (576,), eps=1e-5))
scores, keys = torch.zeros(64, 50_000), torch.zeros(64, dtype=torch.long)
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
k.gumbel_argmax(scores, keys), k.silu_mul(torch.randn(512, 3072))
alone = threads() == before
torch.set_num_threads(2)
k.gumbel_argmax(scores, keys)
maps = {line.split()[-1] for line in open("/proc/self/maps")}
print([path for path in maps if "omp" in os.path.basename(path) and ".so" in path], alone, threads() - before)
print(k.describe()[0])
"""


@needs_compiler
def test_concurrent_builds_share_torchs_openmp(tmp_path: Path) -> None:
    processes = [_start(_BUILD, XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]
    for output in map(_output, processes):
        runtimes, note = output.splitlines()
        assert runtimes.count(".so") == 1 and "torch" in runtimes
        assert runtimes.endswith("True 1")  # torch.set_num_threads applies: 1 = no other thread, 2 = one more
        assert note.startswith("CPU kernels: C++")
    assert len(list((tmp_path / "headrace" / "kernels").iterdir())) == 1  # one library, nothing left over


@needs_compiler
def test_a_cache_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "headrace" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    output = _output(_start("import headrace_kernels as k; print(k.describe()[0])", XDG_CACHE_HOME=str(tmp_path)))
    assert "torch only" in output and "chmod 700" in output


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"HEADRACE_CPU_KERNELS": "off"}, "HEADRACE_CPU_KERNELS=off"),
        ({"PATH": "/nowhere", "CXX": ""}, "apt-get install g++"),
        ({"CXX": "false"}, "the C++ compiler failed"),
    ],
)
def test_without_them_torch_runs_and_the_reason_is_reported(
    environment: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    code = """
import torch, headrace_kernels as k
print(k.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5).sum().item(), k.describe()[0])
"""
    output = _output(_start(code, XDG_CACHE_HOME=str(tmp_path), **environment))
    assert "torch only" in output and sentence in output
