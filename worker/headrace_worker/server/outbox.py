"""Outputs that wait to be sent to one router."""

import asyncio
from collections.abc import Callable

from headrace_proto import replica_pb2 as pb
from headrace_worker.core.report_pacer import ReportPacer, ReportState
from headrace_worker.core.request import Output
from headrace_worker.server.convert import fill_delta, merge_output


class Outbox:
    """Coalesces deltas until the stream can take a frame; without deltas, a `ReportPacer` decides when one is sent.

    Its size is bounded by the router's attempts on this replica and their max_tokens, however slow the stream is: a
    slow router gets fewer, larger frames, and the step loop never waits for it.
    """

    def __init__(self, pacer: ReportPacer, clock: Callable[[], float]) -> None:
        self._pacer = pacer
        self._clock = clock
        self._frame = pb.ReplicaFrame()
        self._pending: dict[bytes, pb.Delta] = {}  # those of the frame, by attempt
        self._step = 0
        self._load = pb.Load()
        self._state = ReportState(0.0)
        self._ready = asyncio.Event()
        self._last = False  # whether the next frame is the last one
        self._closed = False

    def put(self, outputs: list[Output]) -> None:
        """Adds outputs of one step."""
        for output in outputs:
            delta = self._pending.get(output.attempt_id)
            if delta is None:
                self._pending[output.attempt_id] = delta = self._frame.deltas.add()
                fill_delta(delta, output)
            else:
                merge_output(delta, output)

    def set_heartbeat(self, step: int, load: pb.Load, state: ReportState) -> None:
        """Stores the newest heartbeat. The next frame may be sent if it has deltas, or a report is due."""
        self._step, self._load, self._state = step, load, state
        if self._pending or self._pacer.due(state, self._clock()):
            self._ready.set()

    def close(self) -> None:
        """The router has closed its side: `take` returns None from now on."""
        self._closed = True
        self._ready.set()

    def finish(self) -> None:
        """The step loop has ended: `take` returns None after the next frame."""
        self._last = True
        self._ready.set()

    async def take(self) -> pb.ReplicaFrame | None:
        """The next frame: everything since the last one. Waits until one is due; None once closed."""
        await self._ready.wait()
        if self._closed:
            return None
        self._closed = self._last
        if not self._closed:
            self._ready.clear()
        frame, self._frame = self._frame, pb.ReplicaFrame()
        self._pending.clear()
        frame.step = self._step
        frame.load.CopyFrom(self._load)
        frame.submits = self._state.submits
        self._pacer.sent(self._state, self._clock())
        return frame
