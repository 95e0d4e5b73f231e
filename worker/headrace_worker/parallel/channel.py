"""Packed messages between ranks: commands from rank 0 to all, answers back to it.

A message is one send of a fixed size, with its length in front, and a second one for what does not fit: the receiver
never waits for a length of its own, and a step of decoding is one send per rank.
"""

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from headrace_worker.parallel.group import Group, Sending
from headrace_worker.parallel.messages import Answer, Command, decode_answer, decode_command, encoder

FRAME_BYTES = 8192
_HEAD_BYTES = 8
_LARGEST = 1 << 30
_COMMANDS, _ANSWERS = 1, 2  # tags


class Channel:
    """Commands and answers over a group of host memory. Of one thread at each end."""

    def __init__(self, group: Group, depth: int) -> None:
        """`depth`: steps in flight; sends that are older must be through."""
        self._group = group
        self._sent: deque[list[Sending]] = deque()
        self._depth = depth

    def command(self, command: Command, to: int | None = None) -> None:
        """From rank 0 to all others, or to one of them; does not wait until they take it."""
        ranks = range(1, self._group.size) if to is None else (to,)
        self._send(encoder.encode(command), ranks, _COMMANDS)

    def next_command(self) -> Command:
        """The next one from rank 0; waits for it. Raises RankLostError."""
        command: Command = decode_command(self._receive(0, _COMMANDS))
        return command

    def answer(self, answer: Answer) -> None:
        """To rank 0."""
        self._send(encoder.encode(answer), (0,), _ANSWERS)

    def next_answer(self, source: int) -> Answer:
        return decode_answer(self._receive(source, _ANSWERS))

    def flush(self) -> None:
        """Wait until everything sent is through."""
        while self._sent:
            self._finish()

    def _send(self, message: bytes, to: Iterable[int], tag: int) -> None:
        room = FRAME_BYTES - _HEAD_BYTES
        frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        first = len(message).to_bytes(_HEAD_BYTES, "big") + message[:room]
        frame[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        pieces = [frame]
        if len(message) > room:
            pieces.append(torch.frombuffer(bytearray(message[room:]), dtype=torch.uint8))
        self._sent.append([self._group.send(piece, rank, tag) for rank in to for piece in pieces])
        while len(self._sent) > 2 * (self._depth + 1):  # a guided step is two messages
            self._finish()

    def _finish(self) -> None:
        for sending in self._sent.popleft():
            self._group.finish(sending)

    def _receive(self, source: int, tag: int) -> memoryview:
        frame = self._group.receive(torch.empty(FRAME_BYTES, dtype=torch.uint8), source, tag)
        length = int.from_bytes(_bytes(frame[:_HEAD_BYTES]), "big")
        room = FRAME_BYTES - _HEAD_BYTES
        if length <= room:
            return _bytes(frame[_HEAD_BYTES : _HEAD_BYTES + length])
        if length > _LARGEST:
            raise self._group.watch.explain(ValueError("a message of a gigabyte"))
        rest = self._group.receive(torch.empty(length - room, dtype=torch.uint8), source, tag)
        return memoryview(bytes(_bytes(frame[_HEAD_BYTES:])) + bytes(_bytes(rest)))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.numpy().data
