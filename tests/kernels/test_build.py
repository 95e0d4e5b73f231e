"""The C++ kernels in new processes: kinds of CPU, the wheel, one OpenMP runtime, concurrent builds, the fallback."""

import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from headrace_kernels.cpu import compile_library

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(
    compile_library.find_compiler() is None, reason="no C++ compiler: apt-get install g++"
)


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
from headrace_kernels.cpu import compile_library
compile_library._FLAGS = tuple(flag for flag in compile_library._FLAGS if flag != "-O3")  # that takes most of the time
torch.set_num_threads(1)
x = torch.randn(64, 576)
torch.testing.assert_close(k.rms_norm(x, torch.ones(576), 1e-5), torch.nn.functional.rms_norm(x, (576,), eps=1e-5))
scores, rows = torch.zeros(64, 50_000), torch.zeros(64, dtype=torch.long)
options = k.DrawOptions(torch.tensor([[1.0, 1.0, -1e9]]), torch.zeros(1, 2, dtype=torch.long))
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
k.draw(scores, rows, rows, options), k.silu_mul(torch.randn(512, 3072))
alone = threads() == before
torch.set_num_threads(2)
k.draw(scores, rows, rows, options)
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


_BITS = """
import hashlib, torch, headrace_kernels as k
from headrace_kernels.meta import StateMeta
from headrace_kernels.packed import Codes, Form, Kind, pack_codes, pack_dense
torch.manual_seed(0)
results = []
x = torch.randn(30, 512)
for weight in (torch.randn(100, 512), torch.randn(100, 512).bfloat16()):
    results.append(k.ops.packed_matmul(x, pack_dense(weight)))
for form in (Form.CODES8, Form.CODES4):
    codes = torch.randint(0, 1 << form.bits, (100, 512), dtype=torch.uint8)
    results.append(k.ops.packed_matmul(x, pack_codes(Codes(codes, torch.rand(100, 16), torch.rand(100, 16)), form)))
for form, kind, sizes in ((Form.E4M3, Kind.E4M3, 127), (Form.E2M1, Kind.E2M1, 8)):
    codes = torch.randint(0, sizes, (100, 512), dtype=torch.uint8)
    codes[::2] |= 1 << form.bits - 1
    results.append(k.ops.packed_matmul(x, pack_codes(Codes(codes, torch.rand(100, 16), kind=kind), form)))
results += [k.rms_norm(x, torch.rand(512), 1e-5), k.silu_mul(x), k.gelu_mul(x), k.ops.row_logsumexp(x)]
results += [k.ops.sigmoid(x[:, :77]), k.ops.softplus(x[:, :77])]
meta = k.AttentionMeta(
    query_starts=torch.tensor([0, 20, 30]).int(), seq_lens=torch.tensor([20, 700]).int(),
    block_tables=torch.randperm(100).int().view(2, 50), slots=torch.empty(0).long(), max_query_len=20, max_seq_len=700,
)
steps = StateMeta(*(torch.tensor(part).int() for part in ([0, 11, 30], [0, 1], [1, 2])))
inputs, states = torch.zeros(3, 3, 512), torch.zeros(3, 4, 33, 50)
results.append(k.ops.causal_conv(x, torch.randn(512, 4), inputs, steps, None, True))
query, key, value = torch.randn(30, 2, 33), torch.randn(30, 2, 33), torch.randn(30, 4, 50)
results.append(k.ops.delta_rule(query, key, value, -torch.rand(30, 4), torch.rand(30, 4), states, steps))
results.append(k.ops.delta_rule(query, key, value, -torch.rand(30, 4, 33), torch.rand(30, 4), states, steps))
results.append(states)
results.append(k.paged_attention(torch.randn(30, 8, 64), torch.randn(2, 100, 2, 16, 64), meta, scale=0.1, softcap=20.0))
print(hashlib.sha256(b"".join(result.numpy().tobytes() for result in results)).hexdigest())
"""


@pytest.mark.faults("tools")
@needs_compiler
def test_all_kinds_of_cpu_compute_the_same_bits() -> None:
    names = [target.name for target in compile_library.targets()]
    assert len(names) == 1 or "avx2" in names
    assert len({_output(_start(_BITS, HEADRACE_CPU_KERNELS=name)) for name in names}) == 1


@pytest.mark.faults("tools")
@needs_compiler
def test_a_wheel_has_the_kernels_and_needs_no_compiler(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    libraries = {path.stem for path in (tmp_path / "headrace_kernels" / "cpu" / "prebuilt").iterdir()}
    assert libraries == {target.name for target in compile_library.TARGETS}
    code = "import headrace_kernels as k; print(k.__file__, k.describe()[0])"
    output = _output(_start(code, PYTHONPATH=str(tmp_path), PATH="/nowhere", CXX="", XDG_CACHE_HOME="/nowhere"))
    assert output.startswith(str(tmp_path)) and f"{compile_library.targets()[0].title}, prebuilt" in output


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"HEADRACE_CPU_KERNELS": "off"}, "HEADRACE_CPU_KERNELS=off"),
        ({"HEADRACE_CPU_KERNELS": "sse"}, "is none of on, off, avx"),
        ({"PATH": "/nowhere", "CXX": ""}, "apt-get install g++"),
        ({"CXX": "false"}, "the C++ compiler failed"),
    ],
)
def test_without_them_torch_runs_and_the_reason_is_reported(
    environment: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    code = """
import torch, headrace_kernels as k
print(k.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5).sum().item(), k.find_slow_backends()[0])
"""
    output = _output(_start(code, XDG_CACHE_HOME=str(tmp_path), **environment))
    assert "torch only" in output and sentence in output
