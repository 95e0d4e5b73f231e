"""Starts rank processes quickly: the libraries and the model types given as arguments are imported once, and every rank
is a fork of this process.

Reads one JSON line per rank from stdin: {"config": hex of a msgpack ReplicaConfig, "rank": n, "rendezvous": hex, or
null for a rank 0 that opens one}, and optionally "hold": the stage of its start in which it blocks, "busy": true for a
rank 0 that submits endless requests to itself, "fault": the number of a step that raises, "unread": of one whose
tokens cannot be read from the device, "hang": of one that does not end although the process lives, "record": options of
a recorder (see recorders.py) to replay steps with. Prints JSON lines that begin with the process id: when it is forked,
has opened a rendezvous, reaches a stage, is ready, has ended (with the outcome), has exited.
Ranks are killed when stdin closes.
"""

import contextlib
import faulthandler
import gc
import json
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from headrace_kernels.cpu.library import missing
from headrace_worker.core.config import Rendezvous, ReplicaConfig
from headrace_worker.core.plan import RowSampling
from headrace_worker.core.request import Request
from headrace_worker.ranks.stage import StageRunner
from headrace_worker.replica import Replica
from headrace_worker.sampler import SampleOutput
from support.members import MEMBER
from support.worker.recording_device import RecordingDevice, ReplayingDevice, replaying_device

LAST_CALLS = 50
REPORTS = os.dup(1)  # logs go to stderr
os.dup2(2, 1)


def report_facts(**facts: object) -> None:
    os.write(REPORTS, (json.dumps({"pid": os.getpid()} | facts) + "\n").encode())


def run_rank(order: dict[str, Any]) -> str:
    """Runs one rank as the `cluster` package does; returns the outcome as a sentence."""
    config = msgspec.msgpack.decode(bytes.fromhex(order["config"]), type=ReplicaConfig)

    def report(stage: str, fraction: float) -> None:
        report_facts(stage=stage)
        if stage == order.get("hold"):
            time.sleep(1000)

    device = replaying_device(order.get("record"), lambda: report_facts(stage="recording fails"))
    replica = Replica(config, MEMBER.secret, order["rank"], report, lambda name: device)
    signal.signal(signal.SIGUSR1, lambda number, frame: replica.stop())
    faulthandler.register(signal.SIGUSR2)  # prints the stack of each thread to stderr
    if order.get("fault"):
        raise_in_step(order["fault"])
    if order.get("unread"):
        raise_when_read(order["unread"])
    if order.get("hang"):
        hang_in_step(order["hang"])
    try:
        if order["rendezvous"] is None:
            rendezvous = replica.open_rendezvous()
            report_facts(rendezvous=msgspec.msgpack.encode(rendezvous).hex())
        else:
            rendezvous = msgspec.msgpack.decode(bytes.fromhex(order["rendezvous"]), type=Rendezvous)
        started = replica.start(rendezvous)
        report_facts(notes=started.notes)
        report_facts(weight_bytes=started.weight_bytes, kv_bytes=started.kv_bytes, address=started.address)
        report_facts(kv_blocks=started.kv_blocks)
        if order.get("busy"):
            threading.Thread(target=keep_busy, args=(replica,), daemon=True).start()
        replica.wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        replica.stop()
        if isinstance(device, ReplayingDevice):
            report_facts(replays=device.steps.replays)
        if isinstance(device, RecordingDevice):
            # The last ones of each thread: a longer line could be mixed with that of another rank.
            report_facts(calls={name: calls[-LAST_CALLS:] for name, calls in device.calls.items()})
    return "stopped"


def keep_busy(replica: Any) -> None:
    """Submits requests endlessly, as the server does."""
    loop = replica._running.loop
    start_chain = loop._engine.scheduler.kv.start_chain
    while True:
        prompt = [random.randrange(3, 300) for _ in range(random.randrange(1, 40))]
        loop.submit(
            Request(
                attempt_id=os.urandom(16),
                tokens=prompt,
                prompt_len=len(prompt),
                max_len=len(prompt) + 80,
                sampling=RowSampling(temperature=0.0),
                stop_ids=frozenset(),
                chain=start_chain(b"", ""),
                arrival=time.monotonic(),
            )
        )
        time.sleep(0.02)


def raise_in_step(number: int) -> None:
    """Let the step of that number raise in this process."""
    run = StageRunner.run

    def faulty(self: Any, step: Any) -> Any:
        if step.plan.step == number and step.plan.work:
            raise FloatingPointError("a secret detail")
        return run(self, step)

    StageRunner.run = faulty  # type: ignore[method-assign]


def raise_when_read(number: int) -> None:
    """Let the tokens of the step of that number raise when they are read in this process."""
    to_result = SampleOutput.to_result

    def faulty(self: Any, step: int) -> Any:
        if step == number:
            raise FloatingPointError("a secret detail")
        return to_result(self, step)

    SampleOutput.to_result = faulty  # type: ignore[method-assign]


def hang_in_step(number: int) -> None:
    """Let the step of that number not end in this process: other ranks wait for it in their collectives."""
    run = StageRunner.run

    def hanging(self: Any, step: Any) -> Any:
        if step.plan.step == number and step.plan.work:
            report_facts(stage="hanging")
            time.sleep(1000)
        return run(self, step)

    StageRunner.run = hanging  # type: ignore[method-assign]


def orders(alive: set[int]) -> Iterator[dict[str, Any]]:
    """The orders from stdin; meanwhile reports exited processes: on one thread, as others would be lost in the fork.

    Exited processes are removed from `alive`: a process id may be reused soon.
    """
    received = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.01)
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                alive.discard(pid)
                report_facts(pid=pid, exited=True)
        if not readable:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            return
        *lines, received = (received + data).split(b"\n")
        yield from map(json.loads, lines)


def main() -> None:
    alive: set[int] = set()
    for model_type in sys.argv[1:]:
        MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.for_model(model_type))]  # imports its module
    missing()  # loads the kernels
    gc.collect()
    gc.freeze()  # or a collection in each rank would traverse, and so copy, the shared objects
    for order in orders(alive):
        pid = os.fork()
        if pid == 0:
            try:
                os.close(0)
                report_facts(forked=True)  # by the rank itself, so that it is its first report
                report_facts(ended=run_rank(order))
            finally:
                os._exit(0)
        alive.add(pid)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)  # not reaped, so the id is not reused


if __name__ == "__main__":
    main()
