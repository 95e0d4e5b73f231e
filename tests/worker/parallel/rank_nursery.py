"""Starts rank processes quickly: the libraries are imported once, and every rank is a fork of this process.

Reads one JSON line per rank from stdin: {"config": hex of a msgpack ReplicaConfig, "rank": n, "meeting": hex}. Prints
{"pid": n} for each, and {"pid": n, "ended": sentence} when it is over. Ranks are killed when stdin closes.
"""

import json
import os
import signal
import sys
import threading

import msgspec

from headrace_worker.config import Meeting, ReplicaConfig
from headrace_worker.replica import Replica


def say(**facts: object) -> None:
    os.write(1, (json.dumps(facts) + "\n").encode())


def be_rank(order: dict[str, object]) -> str:
    """The life of one rank, as the cluster room would run it; how it ended, in a sentence."""
    config = msgspec.msgpack.decode(bytes.fromhex(str(order["config"])), type=ReplicaConfig)
    meeting = msgspec.msgpack.decode(bytes.fromhex(str(order["meeting"])), type=Meeting)
    replica = Replica(config, int(str(order["rank"])))
    try:
        started = replica.start(meeting)
        say(pid=os.getpid(), weight_bytes=started.weight_bytes, kv_bytes=started.kv_bytes)
        replica.wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        replica.stop()
    return "stopped"


def reap() -> None:
    while True:
        try:
            os.wait()
        except ChildProcessError:
            threading.Event().wait(0.05)


def main() -> None:
    children: list[int] = []
    threading.Thread(target=reap, daemon=True).start()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                os.close(0)
                say(pid=os.getpid(), ended=be_rank(order))
            finally:
                os._exit(0)
        children.append(pid)
        say(pid=pid)
    for pid in children:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
