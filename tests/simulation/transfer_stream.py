"""One control stream from a target to a source, with what `server/transfer_{client,service}.py` do at its ends."""

from collections import deque
from typing import TYPE_CHECKING, cast

from model import MAX_MODEL_LEN, VOCABULARY
from world import Fifo

from headrace_worker.config import Meeting
from headrace_worker.parallel.meeting import MeetingHost
from headrace_worker.server.transfer_convert import source_frame, target_frame, to_source_message, to_target_message
from headrace_worker.transfer.messages import FromSource, ToSource

if TYPE_CHECKING:
    from sim_replica import SimReplica

HELLO_SECONDS = 3.0
_END = object()


class _Place:
    """Stands for a MeetingHost, of which only the meeting is looked at."""

    def __init__(self, number: int) -> None:
        self.meeting = Meeting("127.0.0.1", 1, 1, number.to_bytes(32, "big"))


class TransferStream:
    """Opened by the target's first word to an address."""

    def __init__(self, target: "SimReplica", address: str) -> None:
        self.target = target
        self.address = address
        self.source: SimReplica | None = None
        self.name = ""  # as the source calls its target
        self.disturbed = False  # something was held up or lost on it
        self.mischief = 0  # messages that will be lost, doubled or swapped
        self._world = world = target.world
        self._place = _Place(target.cluster.next_number())
        self._open = False  # both have said hello
        self._target_over = self._source_over = False
        self._waiting: deque[ToSource] = deque()
        self._up: Fifo | None = None
        self._down = Fifo(world, target, self._target_hears)
        self._swapped: list[tuple[Fifo, object]] = []
        world.at(world.delay(), self._reach, target)
        world.at(HELLO_SECONDS, lambda: None if self._open else self._give_up(), target)

    @property
    def over(self) -> bool:
        return self._target_over and (self.source is None or self._source_over)

    # -- what the ends do --------------------------------------------------------------------------------------

    def say(self, message: ToSource) -> None:
        """The target says it."""
        if not self._open or self._up is None:
            self._waiting.append(message)
        else:
            self._put(self._up, message)

    def answer(self, message: FromSource) -> None:
        """The source says it."""
        if not self._source_over:
            self._put(self._down, message)

    def hang_up(self) -> None:
        """The target does: it forgets the stream, the source notices."""
        self._target_over = True
        self._tell_source()

    def turn_out(self) -> None:
        """The source ends it, after what it has said."""
        self._end_source()
        self._down.put(_END)

    def break_down(self) -> None:
        """Both notice, each in its own time."""
        world = self._world
        world.at(world.delay(), self._end_target, self.target)
        self._tell_source()

    def hold(self, until: float) -> None:
        """Nothing gets through until then."""
        self.disturbed = True
        self._down.held_until = until
        if self._up is not None:
            self._up.held_until = until

    # -- inside -----------------------------------------------------------------------------------------------

    def _reach(self) -> None:
        """The target's call arrives, if there is anybody."""
        if self._target_over:
            return
        cluster, world = self.target.cluster, self._world
        source = cluster.at(self.address)
        if source is None or cluster.unreachable(self.target, source):
            world.at(world.delay(), self._end_target, self.target)
            return
        self.source = source
        self._up = Fifo(world, source, self._source_hears)
        world.at(world.delay(), self._accept, source)

    def _accept(self) -> None:
        source = self.source
        assert source is not None
        reason = source.desk.unlike(self.target.identity, self.target.shards)
        if reason or source.stopped:
            self._source_over = True
            self._down.put(_END)
            return
        self.name = source.name_of(self)
        order = source.desk.as_source(self._place.meeting, self.target.shards)
        source.command(lambda exchange: exchange.target_opened(self.name, order))
        if self._source_over:
            self._end_source()
            return
        self._down.put(None)

    def _target_hears(self, item: object) -> None:
        target = self.target
        if self._target_over:
            return
        if item is _END:
            self._end_target()
        elif item is None:
            self._open = True
            assert self.source is not None and self._up is not None
            order = target.desk.as_target(cast(MeetingHost, self._place), self.source.shards)
            target.command(lambda exchange: exchange.fetcher.opened(self.address, order))
            while self._waiting:
                self._put(self._up, self._waiting.popleft())
        else:
            message = to_target_message(source_frame(cast(FromSource, item)))
            target.command(lambda exchange: exchange.heard_source(self.address, message))

    def _source_hears(self, item: object) -> None:
        if self._source_over or self.source is None:
            return
        frame = target_frame(cast(ToSource, item))
        message = to_source_message(frame, max_model_len=MAX_MODEL_LEN, vocab_size=VOCABULARY)
        self.source.command(lambda exchange: exchange.heard_target(self.name, message))

    def _give_up(self) -> None:
        if not self._target_over:
            self._end_target()
            self._tell_source()

    def _end_target(self) -> None:
        """The target notices that the stream is gone."""
        if self._target_over:
            return
        self._target_over = True
        self.target.source_gone(self)
        self._tell_source()

    def _tell_source(self) -> None:
        if self.source is not None:
            self._world.at(self._world.delay(), self._end_source, self.source)

    def _end_source(self) -> None:
        if not self._source_over:
            self._source_over = True
            if self.name and self.source is not None:
                self.source.target_gone(self)

    def _put(self, fifo: Fifo, message: object) -> None:
        world = self._world
        if self.mischief and world.chance(0.5):
            self.mischief -= 1
            self.disturbed = True
            kind = world.random.randrange(3)
            if world.tracing:
                world.log(f"broken peer: {('loses', 'doubles', 'swaps')[kind]} {message}")
            if kind == 0:
                return
            if kind == 2:
                self._swapped.append((fifo, message))
                return
            fifo.put(message)
        fifo.put(message)
        for late, swapped in self._swapped:
            late.put(swapped)
        self._swapped.clear()
