"""Signals that request a stop are read by a thread, whatever the main thread does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

# The main thread runs the function that the test names; `force` and a second signal end the process with 99.
PROGRAM = """
import os, signal, sys, threading, time
from headrace_cluster.launch.signals import StopSignals

def end():
    print("forced", "again" if signals.repeated else "late", flush=True)
    os._exit(99)

signals = StopSignals(end, float(sys.argv[2]) if sys.argv[2] else None)
if sys.argv[1] != "interrupted":
    signals.enter_stop()
signals.install()

def stuck():  # like a call of a library that returns to Python only when it has finished
    print("up", flush=True)
    threading.Event().wait(60)

def interrupted():
    try:
        print("up", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(signals.status)

def served():
    print("up", flush=True)
    signals.requested.wait(60)
    signals.force_within(0.3)
    time.sleep(60)

globals()[sys.argv[1]]()
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def make(what: str, time_limit: str = "", *before: str) -> "subprocess.Popen[str]":
        command = [*before, sys.executable, "-c", PROGRAM, what, time_limit]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        return process

    yield make
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_interrupts(start: Start, number: signal.Signals) -> None:
    process = start("interrupted")
    os.killpg(process.pid, number)
    assert process.wait(10) == 128 + number


def test_a_blocked_main_thread_is_ended_at_the_time_limit(start: Start) -> None:
    process = start("stuck", "0.3")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=10)[0] == "forced late\n"
    assert process.returncode == 99


def test_a_stop_that_takes_too_long_is_ended(start: Start) -> None:
    process = start("served")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=10)[0] == "forced late\n"


def test_a_second_signal_ends_at_once_and_a_forwarded_duplicate_does_not_count(start: Start) -> None:
    process = start("stuck")
    for _ in range(5):  # a terminal, and a parent
        process.send_signal(signal.SIGTERM)
    time.sleep(0.8)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10)[0] == "forced again\n"
    assert process.returncode == 99


def test_nohup_is_respected(start: Start) -> None:
    process = start("interrupted", "", "nohup")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143
