"""Commands of other threads to the thread that owns the engine."""

import threading
from collections import deque
from collections.abc import Callable

from headrace_worker.core.engine import Engine
from headrace_worker.core.request import Output
from headrace_worker.core.transfer.exchange import TransferExchange

EngineCommand = Callable[[Engine], Output | None]


class CommandQueue:
    """Commands in order. Created before the engine, so that a transfer worker can report from its first order on."""

    def __init__(self) -> None:
        self._commands: deque[EngineCommand] = deque()
        self._added = threading.Condition()

    def put(self, command: EngineCommand) -> None:
        """Queues a command and wakes the engine's thread. From any thread."""
        with self._added:
            self._commands.append(command)
            self._added.notify()

    def wake(self) -> None:
        """Ends a `wait` of the engine's thread."""
        self.put(lambda engine: None)

    def exchange(self, action: Callable[[TransferExchange], None]) -> None:
        """Queues an action on the engine's exchange."""

        def command(engine: Engine) -> None:
            action(engine.exchange)

        self.put(command)

    def wait(self, seconds: float) -> None:
        """Waits until there is a command, `seconds` at most. For the engine's thread."""
        with self._added:
            if not self._commands:
                self._added.wait(seconds)

    def take(self) -> list[EngineCommand]:
        """All queued commands. For the engine's thread."""
        with self._added:
            commands = list(self._commands)
            self._commands.clear()
        return commands
