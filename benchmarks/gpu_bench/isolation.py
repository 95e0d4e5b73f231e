"""Runs a command in a process group of its own, with a log and a time limit."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended. `problem`: why it did not end by itself with status 0; empty if it did."""

    problem: str
    seconds: float


def run(command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float) -> Ended:
    """Appends all output to `log`, native code's included. When the process has ended, so have its children."""
    began = time.monotonic()
    with log.open("a") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            problem = _describe(process.wait(seconds))
        except subprocess.TimeoutExpired:
            problem = f"it ran longer than {seconds:.0f} s and was ended"
        finally:
            _end_group(process.pid)
            process.wait()
    return Ended(problem, time.monotonic() - began)


def _describe(status: int) -> str:
    if status < 0:
        return f"the process was ended by {signal.Signals(-status).name}"
    return f"the process ended with status {status}" if status else ""


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
