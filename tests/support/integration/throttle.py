"""A process that runs for a part of the time only: a slow machine."""

import subprocess
import sys

_TURNS = """
import os, signal, sys, time
pid, run, pause = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
try:
    while os.getppid() != 1:
        os.kill(pid, signal.SIGCONT)
        time.sleep(run)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(pause)
except ProcessLookupError:
    pass
"""


class Throttle:
    """From its creation until `close`, stops and continues a process in turns, from a separate process."""

    def __init__(self, pid: int, share: float, period: float = 0.02) -> None:
        """share: of the time in which it runs. period: seconds of a turn."""
        self._pid = pid
        turns = (str(share * period), str((1 - share) * period))
        self._process = subprocess.Popen([sys.executable, "-c", _TURNS, str(pid), *turns])

    def close(self) -> None:
        """The process runs all the time again. Idempotent."""
        self._process.kill()
        self._process.wait()
        subprocess.run(["kill", "-CONT", str(self._pid)], stderr=subprocess.DEVNULL, check=False)
