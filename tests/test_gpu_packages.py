"""The sections of the GPU benchmark import no Ray, and nothing that benchmarks/gpu_wheels.sh does not carry."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.child_environment import child_environment

ROOT = Path(__file__).parents[1]
THERE = ("torch", "triton", "transformers", "numpy")  # on the machine with the GPU, with all that they need
UNUSED = {"requests", "tomli", "colorama", "exceptiongroup"}  # gguf downloads with it; older Pythons or Windows only
IMPORT_ALL = """
import importlib, json, pathlib, pkgutil, sys
sys.modules["ray"] = None  # an import of it raises ImportError
import gpu, replicas, gpu_bench, headrace_kernels, headrace_proto, headrace_worker, support.members
for package in (gpu_bench, headrace_kernels, headrace_proto, headrace_worker):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith("headrace_kernels.gpu."):  # needs Triton, which macOS has not
            importlib.import_module(module.name)
files = {getattr(module, "__file__", None) for module in sys.modules.values()}
print(json.dumps(sorted(file for file in files if file)))
"""


def imported_names(files: Iterable[Path]) -> set[str]:
    """Top-level names of all modules that files import, when they are loaded or called."""
    names: set[str] = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names.add(node.module.split(".")[0])
    return names - sys.stdlib_module_names


def carried() -> set[str]:
    """The packages of gpu_wheels.sh."""
    text = (ROOT / "benchmarks" / "gpu_wheels.sh").read_text()
    return {canonicalize_name(name) for name in text.split('PACKAGES="')[1].split('"')[0].split()}


def needs(name: str) -> set[str]:
    """Distributions that one needs for itself, without extras; of one that is not installed, none."""
    try:
        found = map(Requirement, requires(name) or ())
    except PackageNotFoundError:
        return set()
    return {canonicalize_name(one.name) for one in found if one.marker is None or one.marker.evaluate({"extra": ""})}


def there() -> set[str]:
    found, waiting = set[str](), list(THERE)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += needs(name)
    return found


def our_files() -> list[Path]:
    folders = ("benchmarks", "proto", "kernels", "worker", "router", "cluster")
    path = ":".join(str(ROOT / name) for name in folders)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        env=child_environment(PYTHONPATH=f"{path}:{ROOT / 'tests'}"), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = [Path(name) for name in json.loads(done.stdout.splitlines()[-1])]
    ours = [path for path in loaded if path.is_relative_to(ROOT) and ".venv" not in path.parts]
    tests = [*(ROOT / "tests" / "kernels").glob("*.py"), *(ROOT / "tests" / "support" / "kernels").glob("*.py")]
    return [*ours, *tests, ROOT / "tests" / "conftest.py"]


def test_what_the_sections_import_is_carried_and_is_not_ray() -> None:
    files = our_files()
    assert len(files) > 200 and ROOT / "worker/headrace_worker/replica/replica.py" in files
    ours = {path.name.removesuffix(".py") for path in (*ROOT.glob("*/headrace_*"), *(ROOT / "benchmarks").iterdir())}
    names = imported_names(files) - ours - {"support"}
    assert "ray" not in names and {"msgspec", "grpc", "hypothesis"} <= names
    owners = packages_distributions()
    have = there() | carried()
    missing = {name for name in names if not {canonicalize_name(one) for one in owners.get(name, [name])} & have}
    assert not missing, "name these in benchmarks/gpu_wheels.sh"
    assert not carried() & {"torch", "triton", "transformers"}


def test_the_carried_packages_need_nothing_else() -> None:
    missing = {name: needs(name) - carried() - there() - UNUSED for name in carried()}
    assert not any(missing.values()), missing
