"""Packed messages between ranks: commands from rank 0 to all, answers back to it.

A message is one send of a fixed size that begins with its length, and a second send for the rest if it does not fit:
no separate send for the length, and a decode step is one send per rank.
"""

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from headrace_worker.comm.group import Group, Sending
from headrace_worker.ranks.messages import Answer, Command, decode_answer, decode_command, encoder

FRAME_BYTES = 8192
_HEAD_BYTES = 8
_LARGEST = 1 << 30
_COMMANDS, _ANSWERS = 1, 2  # tags


class Channel:
    """Commands and answers over a group in host memory. Used by one thread at each end."""

    def __init__(self, group: Group, depth: int) -> None:
        """`depth`: steps in flight; older sends must have completed."""
        self._group = group
        self._sent: deque[list[Sending]] = deque()
        self._depth = depth

    def send_command(self, command: Command, to: int | None = None) -> None:
        """From rank 0 to all others, or to one of them; does not wait until it is received."""
        ranks = range(1, self._group.size) if to is None else (to,)
        self._send(encoder.encode(command), ranks, _COMMANDS)

    def receive_command(self) -> Command:
        """Wait for the next command of rank 0. Raises RankLostError."""
        command: Command = decode_command(self._receive(0, _COMMANDS))
        return command

    def send_answer(self, answer: Answer) -> None:
        """Send an answer to rank 0."""
        self._send(encoder.encode(answer), (0,), _ANSWERS)

    def receive_answer(self, source: int) -> Answer:
        return decode_answer(self._receive(source, _ANSWERS))

    def flush(self) -> None:
        """Wait until all sends have completed."""
        while self._sent:
            self._finish()

    def _send(self, message: bytes, to: Iterable[int], tag: int) -> None:
        capacity = FRAME_BYTES - _HEAD_BYTES
        frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        first = len(message).to_bytes(_HEAD_BYTES, "big") + message[:capacity]
        frame[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        pieces = [frame]
        if len(message) > capacity:
            pieces.append(torch.frombuffer(bytearray(message[capacity:]), dtype=torch.uint8))
        self._sent.append([self._group.send(piece, rank, tag) for rank in to for piece in pieces])
        while len(self._sent) > 2 * (self._depth + 1):  # a guided step is two messages
            self._finish()

    def _finish(self) -> None:
        for sending in self._sent.popleft():
            self._group.finish(sending)

    def _receive(self, source: int, tag: int) -> memoryview:
        frame = self._group.receive(torch.empty(FRAME_BYTES, dtype=torch.uint8), source, tag)
        length = int.from_bytes(_bytes(frame[:_HEAD_BYTES]), "big")
        capacity = FRAME_BYTES - _HEAD_BYTES
        if length <= capacity:
            return _bytes(frame[_HEAD_BYTES : _HEAD_BYTES + length])
        if length > _LARGEST:
            raise self._group.detector.explain(ValueError("a message larger than 1 GiB"))
        rest = self._group.receive(torch.empty(length - capacity, dtype=torch.uint8), source, tag)
        return memoryview(bytes(_bytes(frame[_HEAD_BYTES:])) + bytes(_bytes(rest)))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.numpy().data
