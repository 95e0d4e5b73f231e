"""Signals that request a stop are read by a thread, whatever the main thread does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

# The main thread waits as in a call of a library that returns to Python only when it has finished.
PROGRAM = """
import os, sys, threading
from headrace_cluster.launch.signals import StopSignals

signals = StopSignals(lambda number: os._exit(100 + number))
signals.serving = sys.argv[1] == "serving"
signals.install()
print("up", flush=True)
threading.Event().wait(60)
"""

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def make(what: str, *before: str) -> "subprocess.Popen[bytes]":
        command = [*before, sys.executable, "-c", PROGRAM, what]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        return process

    yield make
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_start_at_once(start: Start, number: signal.Signals) -> None:
    process = start("starting")
    os.killpg(process.pid, number)
    assert process.wait(10) == 100 + number


def test_a_second_signal_ends_at_once_and_a_forwarded_duplicate_does_not_count(start: Start) -> None:
    process = start("serving")
    for _ in range(5):  # a terminal, and a parent
        process.send_signal(signal.SIGTERM)
    time.sleep(0.8)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 100 + signal.SIGINT


def test_nohup_is_respected(start: Start) -> None:
    process = start("starting", "nohup")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
