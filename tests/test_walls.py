"""The walls between rooms (docs/design.md), and the calls that no room may make (RELIABILITY R1, R16)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("proto", "kernels", "worker", "router", "cluster")
MAY_IMPORT = {
    "proto": set(),
    "kernels": set(),
    "worker": {"kernels", "proto"},
    "router": {"proto"},
    "cluster": {"proto", "kernels", "worker", "router"},
}
NEVER = {
    "proto": {"torch", "ray", "transformers"},
    "kernels": {"ray", "grpc", "fastapi", "transformers"},
    "worker": {"ray", "fastapi", "uvicorn", "starlette"},
    "router": {"torch", "ray", "transformers", "gguf", "safetensors"},
    "cluster": set(),
}
PURE = {
    "worker": (
        "kv/*.py",
        "scheduler.py",
        "scheduled_step.py",
        "scheduler_counters.py",
        "roster.py",
        "row_pool.py",
        "deadlines.py",
        "queue.py",
        "request.py",
        "engine.py",
        "latency.py",
        "plan.py",
        "layout.py",
        "transfer/shards.py",
        "transfer/orders.py",
        "transfer/messages.py",
        "transfer/fetch.py",
        "transfer/fetching.py",
        "transfer/granting.py",
        "transfer/exchange.py",
    ),
    "router": ("policy/*.py", "journey.py"),
}
PURE_NEVER = {"torch", "ray", "grpc", "asyncio", "time", "threading", "random", "socket", "numpy"}
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_NAMES = {"eval", "exec"}


def sources(room: str) -> list[Path]:
    found = [path for path in (ROOT / room).rglob("*.py") if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))]
    assert found
    return found


def imported(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    foreign = {f"headrace_{other}" for other in ROOMS if other != room and other not in MAY_IMPORT[room]}
    bad = [
        f"{path.relative_to(ROOT)}: {names}"
        for path in sources(room)
        if (names := imported(path) & (foreign | NEVER[room]))
    ]
    assert not bad, "\n".join(bad)


def test_only_cluster_imports_ray() -> None:
    assert any("ray" in imported(path) for path in sources("cluster"))


@pytest.mark.parametrize("room", PURE)
def test_the_pure_cores_take_clock_randomness_and_transport_from_outside(room: str) -> None:
    files = [path for pattern in PURE[room] for path in (ROOT / room / f"headrace_{room}").glob(pattern)]
    assert len(files) >= len(PURE[room])
    bad = [f"{path.relative_to(ROOT)}: {names}" for path in files if (names := imported(path) & PURE_NEVER)]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_has_an_init_that_would_shadow_a_library(room: str) -> None:
    assert not (ROOT / room / "__init__.py").exists()


@pytest.mark.parametrize(
    ("room", "never"),
    [("router", {"torch", "ray", "transformers"}), ("proto", {"torch", "ray"})],
)
def test_what_a_room_brings_along(room: str, never: set[str]) -> None:
    """Imports every module of a room in a fresh interpreter and looks at what came with them."""
    modules = [
        ".".join(path.relative_to(ROOT / room).with_suffix("").parts)
        for path in sources(room)
        if path.name not in ("__init__.py", "__main__.py")
    ]
    script = f"import sys\nfor name in {modules!r}: __import__(name)\nprint(*(set(sys.modules) & {never!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_is_unpickled_or_evaluated(room: str) -> None:
    bad: list[str] = []
    for path in sources(room):
        bad += [f"{path.relative_to(ROOT)}: imports {name}" for name in imported(path) & FORBIDDEN_MODULES]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in FORBIDDEN_NAMES or called in ("torch.load", "yaml.load", "np.load", "numpy.load"):
                    bad.append(f"{path.relative_to(ROOT)}:{node.lineno}: {called}")
                bad += [
                    f"{path.relative_to(ROOT)}:{node.lineno}: trust_remote_code=True"
                    for keyword in node.keywords
                    if keyword.arg == "trust_remote_code"
                    and isinstance(keyword.value, ast.Constant)
                    and keyword.value.value is True
                ]
    assert not bad, "\n".join(bad)
