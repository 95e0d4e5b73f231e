"""Import rules of the packages (docs/design.md), and calls that no package may make."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"base": ROOT / "proto" / "headrace_base"} | {
    name: ROOT / name / f"headrace_{name}" for name in ("proto", "kernels", "worker", "router", "cluster")
}
PACKAGES = tuple(FOLDERS)
MAY_IMPORT = {
    "base": set(),
    "proto": {"base"},
    "kernels": set(),
    "worker": {"base", "kernels", "proto"},
    "router": {"base", "proto"},
    "cluster": {"base", "proto", "kernels", "worker", "router"},
}
NEVER = {
    "base": {"torch", "ray", "transformers"},
    "proto": {"torch", "ray", "transformers"},
    "kernels": {"ray", "grpc", "fastapi", "transformers"},
    "worker": {"ray", "fastapi", "uvicorn", "starlette"},
    "router": {"torch", "ray", "transformers", "gguf", "safetensors"},
    "cluster": set(),
}
PURE = {"worker": "core", "router": "core", "cluster": "core"}  # a folder whose files are all pure
PURE_MAY_IMPORT = {  # modules whose functions return the same for the same arguments, and declarations of data
    *(
        "abc",
        "array",
        "bisect",
        "collections",
        "contextlib",
        "dataclasses",
        "enum",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
    ),
    *("math", "operator", "re", "statistics", "typing", "blake3", "msgspec", "pydantic"),
    "numpy",  # without numpy.random, see below
    "structlog",  # it takes events and returns nothing that a decision could depend on
}
PURE_ENDS = "headrace_cluster.spec."  # data; its settings are declared beside the programs that read them
PURE_ALLOWED = {  # by file
    "proto/headrace_proto/block_hash.py": {"sys"},  # the byte order of this machine
}
LAYERS = re.compile(r"^Layers(?: of `(\w+)`)?, lowest first: (.+)\.$", re.MULTILINE)
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_NAMES = {"eval", "exec"}


def sources(package: str) -> list[Path]:
    found = [path for path in FOLDERS[package].rglob("*.py") if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))]
    assert found
    return found


def imported(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def impure_imports(path: Path) -> set[str]:
    """Modules, not our own, that a pure file imports and that are not known to be pure."""
    allowed = PURE_ALLOWED.get(str(path).removeprefix(f"{ROOT}/"), set())
    foreign = {name for name in imported(path) if not name.startswith("headrace_")}
    return foreign - PURE_MAY_IMPORT - allowed


def module_name(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(module: str) -> Path:
    """The folder of a package, or of one inside of it, by its dotted name."""
    return FOLDERS[module.split("_")[1].split(".")[0]].parent / module.replace(".", "/")


def headrace_modules(path: Path) -> set[str]:
    """Dotted names of our own modules that a file imports when it is loaded or called."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("headrace_")}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("headrace_"):
            folder = folder_of(node.module)
            for alias in node.names:
                inside = (folder / f"{alias.name}.py").exists() or (folder / alias.name / "__init__.py").exists()
                names.add(f"{node.module}.{alias.name}" if inside else node.module)
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    foreign = {f"headrace_{other}" for other in PACKAGES if other != package and other not in MAY_IMPORT[package]}
    bad = [
        f"{path.relative_to(ROOT)}: {names}"
        for path in sources(package)
        if (names := imported(path) & (foreign | NEVER[package]))
    ]
    assert not bad, "\n".join(bad)


def test_one_folder_imports_ray() -> None:
    folders = {path.relative_to(ROOT).parts[2] for path in sources("cluster") if "ray" in imported(path)}
    assert folders == {"ray"}


def test_the_worker_reaches_cuda_through_the_device_alone() -> None:
    """Tests have a device that records the calls of every thread: a call beside it would not be among them."""
    allowed = {"device", "profiling"}
    files = [path for path in sources("worker") if path.relative_to(ROOT).parts[2] not in allowed]
    bad = [str(path.relative_to(ROOT)) for path in files if "torch.cuda" in path.read_text()]
    assert len(files) > 50 and not bad, bad


@pytest.mark.parametrize("package", PURE)
def test_the_pure_cores_import_no_clock_randomness_or_transport(package: str) -> None:
    files = sorted((FOLDERS[package] / PURE[package]).rglob("*.py"))
    assert len(files) > 3
    bad = [f"{path.relative_to(ROOT)}: {name}" for path in files for name in sorted(impure_imports(path))]
    assert not bad, "\n".join(bad)
    assert not [path for path in files if re.search(r"\b(np|numpy)\.random", path.read_text())]


def our_modules() -> dict[str, Path]:
    """Our modules by dotted name; a package is its `__init__`."""
    return {module_name(path, folder): path for name, folder in FOLDERS.items() for path in sources(name)}


def loaded_with(name: str, modules: dict[str, Path]) -> set[str]:
    """Our modules that an import of this one loads: what it imports in turn, and the packages around each."""
    loaded: set[str] = set()
    waiting = [name]
    while waiting:
        name = waiting.pop()
        if name.startswith(PURE_ENDS):
            continue
        parts = name.split(".")
        for found in {".".join(parts[:end]) for end in range(1, len(parts) + 1)} & modules.keys() - loaded:
            loaded.add(found)
            waiting += headrace_modules(modules[found])
    return loaded


@pytest.mark.parametrize("package", PURE)
def test_nothing_that_a_pure_core_loads_is_impure(package: str) -> None:
    modules = our_modules()
    core = f"headrace_{package}.{PURE[package]}"
    loaded = set[str]().union(*(loaded_with(name, modules) for name in modules if name.startswith(core)))
    files = sorted(modules[name] for name in loaded)
    bad = [f"{path.relative_to(ROOT)}: {name}" for path in files for name in sorted(impure_imports(path))]
    assert not bad, "\n".join(bad)


def declared_layers(readme: Path, package: str) -> dict[str, int]:
    """Each folder or file that a README declares, and its layer."""
    (line,) = (line for name, line in LAYERS.findall(readme.read_text()) if name in ("", package))
    steps = [re.findall(r"`([a-z0-9_]+)`", step) for step in line.split(" · ")]
    return {name: height for height, names in enumerate(steps) for name in names}


LAYERED = {f"headrace_{package}": folder.parent / "README.md" for package, folder in FOLDERS.items()} | {
    f"headrace_router.{folder}": ROOT / "router" / "headrace_router" / folder / "README.md"
    for folder in ("core", "answer")
}


@pytest.mark.parametrize("layered", LAYERED)
def test_imports_go_down(layered: str) -> None:
    folder = folder_of(layered)
    layers = declared_layers(LAYERED[layered], layered)
    found = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found - {"__init__", "__main__"} == layers.keys(), "each folder and file has a layer"
    bad = []
    for path in sorted(folder.rglob("*.py")):
        here = path.relative_to(folder).parts[0].removesuffix(".py")
        if here in ("__init__", "__main__"):
            continue
        for name in headrace_modules(path):
            there = name.removeprefix(f"{layered}.").partition(".")[0]
            top = len(layers)  # the package's own `__init__` is above its layers
            inside = name == layered or name.startswith(f"{layered}.")
            if inside and there != here and layers.get(there, top) >= layers[here]:
                bad.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_form_no_cycle(package: str) -> None:
    folder = FOLDERS[package]
    imports = {module_name(path, folder): headrace_modules(path) for path in folder.rglob("*.py")}
    graph = {name: {target for target in targets if target in imports} - {name} for name, targets in imports.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules of a cycle


@pytest.mark.parametrize(
    ("package", "never"),
    [("router", {"torch", "ray", "transformers"}), ("proto", {"torch", "ray"}), ("base", {"torch", "ray"})],
)
def test_transitive_imports_of_a_package(package: str, never: set[str]) -> None:
    """Imports every module of a package in a new interpreter and checks which libraries were loaded."""
    modules = [
        ".".join(path.relative_to(FOLDERS[package].parent).with_suffix("").parts)
        for path in sources(package)
        if path.name not in ("__init__.py", "__main__.py")
    ]
    script = f"import sys\nfor name in {modules!r}: __import__(name)\nprint(*(set(sys.modules) & {never!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_unpickled_or_evaluated(package: str) -> None:
    bad: list[str] = []
    for path in sources(package):
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


def files_of_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


def full_imports(path: Path) -> set[str]:
    """Dotted names of all modules and members that a file imports; a relative import begins with a dot."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return names


def test_helpers_of_tests_are_in_support() -> None:
    outside = [path for path in files_of_tests() if not path.is_relative_to(ROOT / "tests" / "support")]
    bad = [str(path) for path in outside if not path.name.startswith("test_") and path.name != "conftest.py"]
    bad += [str(path) for path in set(files_of_tests()) - set(outside) if path.name.startswith(("test_", "conftest"))]
    assert not bad, "a file of tests/support, or a file of tests: " + "\n".join(bad)


def test_no_test_imports_another_one() -> None:
    """What several tests share is in tests/support, and each of them is imported under one name."""
    bad = []
    for path in files_of_tests():
        for name in full_imports(path):
            first, *rest = name.split(".")
            if first in ("", "tests") or any(part.startswith(("test_", "conftest")) for part in (first, *rest[:-1])):
                bad.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not bad, "\n".join(bad)


SIMULATED = {  # decisions that the simulation runs as in production
    "headrace_worker.core.engine.Engine",
    "headrace_worker.core.scheduler.Scheduler",
    "headrace_worker.core.kv.manager.KVManager",
    "headrace_worker.core.transfer.exchange.TransferExchange",
    "headrace_router.core.fleet.Fleet",
    "headrace_router.core.choice_run.ChoiceRun",
    "headrace_router.core.policy.LeastLoad",
    "headrace_cluster.controller.control_loop.ControlLoop",
    "headrace_cluster.controller.operations.replica_operations",
    "headrace_cluster.controller.control_service.ControlService",
    "headrace_cluster.core.backoff.Restarts",
}
REPLACED = {  # what the simulation has its own of: devices, threads, sockets
    *(f"headrace_worker.{folder}" for folder in ("runner", "kv_transfer", "ranks", "sampler")),
    *(f"headrace_router.{folder}" for folder in ("dispatch", "replicas", "access", "api")),
    "headrace_cluster.ray",
}


def public_names(path: Path) -> set[str]:
    """Classes and functions of a file, without those of the program's own entry point."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    names = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, kinds)}
    return {name for name in names if not name.startswith("_") and name not in ("main", "run")}


def test_the_simulation_runs_the_decisions_of_production() -> None:
    files = sorted((ROOT / "tests" / "support" / "simulation").glob("*.py"))
    imports = set[str]().union(*map(full_imports, files))
    assert imports >= SIMULATED, "the simulation runs these, not a copy of them"
    replaced = [name for name in imports if any(name.startswith(f"{module}.") for module in REPLACED)]
    bad = [name for name in replaced if not name.rpartition(".")[2].isupper()]
    assert not bad, "the simulation replaces these by devices and connections in virtual time; it has their constants"
    ours = set[str]().union(*map(public_names, files))
    for package in PURE:
        core = (FOLDERS[package] / PURE[package]).rglob("*.py")
        copies = ours & set[str]().union(*map(public_names, core))
        assert not copies, f"the simulation defines its own {copies}"
