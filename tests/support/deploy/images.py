"""The images of deploy/Dockerfile, built and run without Docker and without a registry of images: by buildah, as root.

The base is a Debian of debootstrap, in place of python:3.12-slim. `chroot` isolation shares this machine's network, and
needs no limits that a container of CI may refuse.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
BASE = "localhost/headrace-test-base"
USER = "10001:10001"
AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
_DEBIAN = "http://deb.debian.org/debian"
_ENVIRONMENT = {"BUILDAH_ISOLATION": "chroot"}


def buildah(*arguments: str) -> str:
    """The output of one command. Raises RuntimeError with the end of its messages."""
    done = subprocess.run(
        ["buildah", *arguments], env=os.environ | _ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"buildah {arguments[0]} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout.strip()


def build(target: str) -> str:
    """Builds a target of the Dockerfile; returns the image's name. pip's variables of this machine apply there, too."""
    name = f"localhost/headrace-test-{target}"
    folders = [folder for folder in os.environ.get("PIP_FIND_LINKS", "").split() if Path(folder).is_dir()]
    mounts = [word for folder in folders for word in ("--volume", f"{folder}:{folder}:ro")]
    index = os.environ.get("TORCH_CPU_INDEX")
    buildah(
        "build", "--quiet", "--layers", "--network", "host", *mounts, "--file", "deploy/Dockerfile", "--target", target,
        "--build-arg", f"PYTHON_IMAGE={_base()}", *(["--build-arg", f"TORCH_CPU_INDEX={index}"] if index else []),
        "--tag", name, ".",
    )  # fmt: skip
    return name


def _base() -> str:
    """A Debian with Python, made once."""
    with contextlib.suppress(RuntimeError):
        buildah("inspect", "--type", "image", BASE)
        return BASE
    with tempfile.TemporaryDirectory() as folder:
        root, archive = Path(folder) / "root", Path(folder) / "base.tar"
        packages = "--include=python3,python3-venv,ca-certificates"
        made = subprocess.run(
            ["debootstrap", "--variant=minbase", packages, "bookworm", str(root), _DEBIAN],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            raise RuntimeError(f"debootstrap failed: {made.stdout[-2000:]}")
        (root / "usr/bin/python").symlink_to("python3")
        shutil.copy(AUTHORITIES, f"{root}{AUTHORITIES}")
        shutil.rmtree(root / "var/cache/apt")
        subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)
        container = buildah("from", "scratch")
        buildah("add", "--quiet", container, str(archive), "/")
        settings = {"PIP_CERT": AUTHORITIES, "SSL_CERT_FILE": AUTHORITIES}
        settings |= {"PIP_FIND_LINKS": links} if (links := os.environ.get("PIP_FIND_LINKS")) else {}
        variables = [word for name, value in settings.items() for word in ("--env", f"{name}={value}")]
        buildah("config", *variables, "--cmd", "/bin/bash", container)
        buildah("commit", "--quiet", "--rm", container, BASE)
    return BASE


def megabytes(image: str) -> float:
    """The size of all files of an image."""
    with container(image) as made:
        listed = subprocess.run(
            ["du", "--summarize", "--apparent-size", "--bytes", made.root], capture_output=True, text=True, check=True
        )
        return int(listed.stdout.split()[0]) / 1e6


class Container:
    """A container of an image, and the processes that were started in it."""

    def __init__(self, image: str) -> None:
        self.name = buildah("from", image)
        self.root = buildah("mount", self.name)
        self._mark = f"HEADRACE_TEST_CONTAINER={self.name}"
        self._running: list[subprocess.Popen[str]] = []

    def run(self, *command: str) -> str:
        """The output of a command as the image's user. Raises RuntimeError if it fails."""
        return buildah("run", "--network", "host", "--user", USER, self.name, "--", *command)

    def start(self, *command: str, log: Path) -> "subprocess.Popen[str]":
        """Starts a command as the image's user; what it prints is in `log`."""
        line = ["buildah", "run", "--network", "host", "--user", USER, "--env", self._mark, self.name, "--", *command]
        with log.open("w") as file:
            process = subprocess.Popen(
                line, env=os.environ | _ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
            )  # fmt: skip
        self._running.append(process)
        return process

    def close(self) -> None:
        """Ends all processes of the container, and removes it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + 30
            while (left := self._processes()) and time.monotonic() < deadline:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(1)
        for process in self._running:
            process.wait(30)
        buildah("umount", self.name)
        buildah("rm", self.name)

    def _processes(self) -> list[int]:
        """Those that were started in the container, and their children, by a variable of their environment."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found


@contextlib.contextmanager
def container(image: str) -> Iterator[Container]:
    """A container for the block."""
    made = Container(image)
    try:
        yield made
    finally:
        made.close()
