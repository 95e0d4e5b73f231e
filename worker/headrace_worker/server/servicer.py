"""headrace.v1.Replica: one stream per router, fed after each step, and between two steps with refusals and arrivals."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import structlog

from headrace_base.cluster_member import ClusterMember
from headrace_proto import CONTRACT_VERSION, is_compatible
from headrace_proto import replica_pb2 as pb
from headrace_proto.grammar import GrammarError
from headrace_proto.replica_pb2_grpc import ReplicaServicer
from headrace_proto.stall import stall_limit
from headrace_worker.assembly.loop import IDLE_TICK, EngineLoop, StepReport
from headrace_worker.core.guide import TokenGuide
from headrace_worker.core.kv.manager import PrefixChain
from headrace_worker.core.load_reports import EARLY_SECONDS, LoadReports, ReportPacer, ReportState, RouterReportPacer
from headrace_worker.core.request import Finish, Output, Request
from headrace_worker.core.transfer.exchange import Outbound
from headrace_worker.server.cache_events import CacheEventHub
from headrace_worker.server.convert import (
    InvalidSubmitError,
    fill_delta,
    merge_output,
    to_load,
    to_request,
    tokens_to_compute,
)
from headrace_worker.server.description import Description
from headrace_worker.server.grammars import Grammars
from headrace_worker.server.transfer_client import TransferClient
from headrace_worker.server.transfer_peer import TransferPeer
from headrace_worker.server.transfer_service import TransferService


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


# Entries of one frame handled in a turn of the event loop: other streams run between turns.
SUBMITS_PER_TURN = 32
CANCELS_PER_TURN = 1024
LONGEST_INTERVAL = 10.0  # seconds between two reports, at a router's request

log = structlog.get_logger(__name__)


class _RouterStream:
    """One router's stream: its attempts on this replica, and the outputs that wait to be sent."""

    def __init__(self, router: str, outbox: Outbox, reports: RouterReportPacer) -> None:
        self.router = router
        self.outbox = outbox
        self.reports = reports
        self.attempts: set[bytes] = set()


class Servicer(ReplicaServicer):
    """Runs on the server's event loop; the step loop passes its reports with one call per step."""

    def __init__(
        self,
        description: Description,
        loop: EngineLoop,
        start_chain: Callable[[bytes, str], PrefixChain],
        boot_id: bytes,
        peer: TransferPeer,
        member: ClusterMember,
    ) -> None:
        self._description = description
        self._loop = loop
        self._start_chain = start_chain
        self._cache = CacheEventHub(boot_id)
        self._sources = TransferClient(peer, member)
        self._targets = TransferService(peer)
        self._owners: dict[bytes, _RouterStream] = {}
        self._streams: set[_RouterStream] = set()
        self._grammars = Grammars(description)
        self._compiling: dict[bytes, asyncio.Task[None]] = {}  # by attempt
        self._reports = LoadReports(IDLE_TICK)
        self._last: StepReport | None = None
        self._last_at = loop.clock()

    def deliver(self, report: StepReport) -> None:
        """Handles one report of the step loop. Called on the event loop."""
        self._last, self._last_at = report, self._loop.clock()
        for stream, outputs in self._by_stream(report.outputs).items():
            stream.outbox.put(outputs)
        self._reports.accepted(report.accepted)
        load = self._load()
        for stream in self._streams:
            self._set_heartbeat(stream, report, load)
            if report.last:  # a stream that stayed open would show a process that lives on
                stream.outbox.finish()
        self._cache.publish(report.cache_changes)
        if report.outbound is not None:
            self.send_out(report.outbound)

    def send_out(self, outbound: Outbound) -> None:
        """Sends the step loop's messages to other replicas. Called on the event loop."""
        for source, message in outbound.to_sources:
            self._sources.send(source, message)
        for target, answer in outbound.to_targets:
            self._targets.send(target, answer)
        for source in outbound.disconnect:
            self._sources.disconnect(source)

    async def Transfer(
        self,
        request_iterator: AsyncIterator[pb.TransferFrame],
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> AsyncIterator[pb.TransferFrame]:
        async for frame in self._targets.serve(request_iterator, context):
            yield frame

    async def close(self) -> None:
        """Ends the streams that this replica opened to others."""
        self._grammars.close()
        await self._sources.close()

    async def Describe(
        self, request: pb.DescribeRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> AsyncIterator[pb.DescribeChunk]:
        for chunk in self._description.chunks(request.known_digest, facts_only=request.facts_only):
            yield chunk

    async def WatchCache(
        self, request: pb.CacheWatchRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> AsyncIterator[pb.CacheFrame]:
        async for frame in self._cache.watch(request.interval_ms / 1e3):
            yield frame

    async def WatchHealth(
        self, request: pb.HealthRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> AsyncIterator[pb.ReplicaHealth]:
        interval = min(max(request.interval_ms, 50), 10_000) / 1000
        while True:
            yield self._health()
            await asyncio.sleep(interval)

    async def Serve(
        self,
        request_iterator: AsyncIterator[pb.RouterFrame],
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> AsyncIterator[pb.ReplicaFrame]:
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("hello"):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the first frame must be a hello")
            return
        if not is_compatible(first.hello.contract_version):
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this replica uses contract version {CONTRACT_VERSION}, the router {first.hello.contract_version}; "
                "they may differ by one: update the older one",
            )
            return
        if self._loop.ended.is_set() or (self._last is not None and self._last.last):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the step loop of this replica has ended")
            return
        interval = first.hello.report_interval_ms / 1e3
        reports = self._reports.connect(min(interval, LONGEST_INTERVAL))
        stream = _RouterStream(first.hello.router_id, Outbox(reports.pacer, self._loop.clock), reports)
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(stream, first, request_iterator))
        reader.add_done_callback(lambda _: stream.outbox.close())
        try:
            yield pb.ReplicaFrame(hello=self._description.identity, load=self._load())
            while (frame := await stream.outbox.take()) is not None:
                yield frame
        finally:
            reader.cancel()
            self._close(stream)

    async def _read(self, stream: _RouterStream, first: pb.RouterFrame, frames: AsyncIterator[pb.RouterFrame]) -> None:
        await self._handle_frame(stream, first)
        async for frame in frames:
            await self._handle_frame(stream, frame)

    async def _handle_frame(self, stream: _RouterStream, frame: pb.RouterFrame) -> None:
        for count, cancel in enumerate(frame.cancels, 1):
            if cancel.attempt_id in stream.attempts:
                self._cancel(stream, cancel.attempt_id)
            if count % CANCELS_PER_TURN == 0:
                await asyncio.sleep(0)
        for count, submit in enumerate(frame.submits, 1):
            if count % SUBMITS_PER_TURN == 0:
                await asyncio.sleep(0)
            refusal = self._submit(stream, submit)
            later = refusal is not None or submit.attempt_id in self._compiling
            self._reports.received(stream.reports, None if later else tokens_to_compute(submit))
            if refusal is not None:
                stream.outbox.put([refusal])
                if self._last is not None:
                    self._set_heartbeat(stream, self._last, self._load())
        if frame.submits and self._reports.begin_announcement():
            asyncio.get_running_loop().call_later(EARLY_SECONDS, self._announce)

    def _announce(self) -> None:
        """Informs each router of what the others have sent since the last step ended."""
        informed, last = self._reports.announcement(), self._last
        if last is None:
            return
        load = self._load()
        for stream in self._streams:
            if stream.reports in informed:
                self._set_heartbeat(stream, last, load)

    def _set_heartbeat(self, stream: _RouterStream, report: StepReport, load: pb.Load) -> None:
        """load: with the arrivals, so that it includes all submits of the stream."""
        state = self._reports.state(stream.reports, report.load, draining=report.draining)
        stream.outbox.set_heartbeat(report.step, load, state)

    def _submit(self, stream: _RouterStream, submit: pb.Submit) -> Output | None:
        """Submits a request to the step loop, or returns its refusal."""
        facts = self._description.facts
        identity = facts.identity
        wrong = (
            (submit.model and submit.model != identity.model)
            or (submit.revision and submit.revision != identity.revision)
            or (submit.adapter and submit.adapter not in identity.adapters)
        )
        if wrong:
            return _refusal(submit, Finish.REFUSED, "this replica serves another model, revision or adapter")
        if submit.attempt_id in self._owners:
            return _refusal(submit, Finish.REFUSED, "this attempt id is in use")
        guide = self._grammars.known(submit.grammar) if submit.grammar else None
        if submit.grammar and guide is None:
            self._add(stream, submit.attempt_id)
            compiling = asyncio.create_task(self._submit_compiled(stream, submit))
            self._compiling[submit.attempt_id] = compiling
            return None
        request = self._request(submit, guide)
        if isinstance(request, Output):
            return request
        self._add(stream, submit.attempt_id)
        self._loop.submit(request)
        return None

    def _add(self, stream: _RouterStream, attempt_id: bytes) -> None:
        self._owners[attempt_id] = stream
        stream.attempts.add(attempt_id)

    async def _submit_compiled(self, stream: _RouterStream, submit: pb.Submit) -> None:
        """Submits a request once its grammar is compiled; other submits of the stream go on meanwhile."""
        attempt_id, found = submit.attempt_id, None
        try:
            found = self._request(submit, await self._grammars.compile(submit.grammar))
        except GrammarError as error:
            found = _refusal(submit, Finish.ERROR, f"the grammar cannot be followed: {error}")
        except Exception:
            log.exception("submit_failed", request=submit.request_label)
            found = _refusal(submit, Finish.ERROR, "the replica failed on this request; see its log")
        del self._compiling[attempt_id]
        if attempt_id not in stream.attempts:
            return  # it was cancelled meanwhile
        if isinstance(found, Output):
            self._remove(stream, attempt_id)
            stream.outbox.put([found])
            return
        self._reports.passed(stream.reports, tokens_to_compute(submit))
        self._loop.submit(found)

    def _remove(self, stream: _RouterStream, attempt_id: bytes) -> None:
        self._owners.pop(attempt_id, None)
        stream.attempts.discard(attempt_id)

    def _cancel(self, stream: _RouterStream, attempt_id: bytes) -> None:
        if attempt_id in self._compiling:
            self._remove(stream, attempt_id)
        else:
            self._loop.cancel(attempt_id)

    def _request(self, submit: pb.Submit, guide: TokenGuide | None) -> Request | Output:
        """The engine's request, or why there is none."""
        facts = self._description.facts
        try:
            return to_request(
                submit,
                now=self._loop.clock(),
                max_model_len=facts.max_model_len,
                vocab_size=facts.vocab_size,
                eos_token_ids=facts.eos_token_ids,
                start_chain=self._start_chain,
                guide=guide,
            )
        except InvalidSubmitError as error:
            return _refusal(submit, Finish.ERROR, str(error))
        except GrammarError:  # tokens of an earlier attempt, by a replica whose library reads the grammar differently
            return _refusal(submit, Finish.REFUSED, "the tokens so far do not follow the grammar here")
        except Exception:
            # It would end the router's stream, and with it all of its attempts.
            log.exception("submit_failed", request=submit.request_label)
            return _refusal(submit, Finish.ERROR, "the replica failed on this request; see its log")

    def _by_stream(self, outputs: list[Output]) -> dict[_RouterStream, list[Output]]:
        """Outputs by the stream that owns the attempt; those of closed streams are dropped."""
        batches: dict[_RouterStream, list[Output]] = {}
        for output in outputs:
            stream = self._owners.get(output.attempt_id)
            if stream is None:
                continue
            batches.setdefault(stream, []).append(output)
            if output.finish is not None:
                del self._owners[output.attempt_id]
                stream.attempts.discard(output.attempt_id)
        return batches

    def _close(self, stream: _RouterStream) -> None:
        """The router has disconnected: cancels its attempts."""
        self._streams.discard(stream)
        self._reports.disconnect(stream.reports)
        for attempt_id in list(stream.attempts):
            self._owners.pop(attempt_id, None)
            self._cancel(stream, attempt_id)
        stream.attempts.clear()

    def _load(self) -> pb.Load:
        report = self._last
        if report is None:
            return pb.Load()
        return to_load(report.load, report.step, report.draining, report.idle_steps, self._reports.arrivals)

    def _health(self) -> pb.ReplicaHealth:
        """Health by the step loop's heartbeat: that this server answers does not show that the loop runs."""
        report = self._last
        state = pb.REPLICA_STATE_STARTING
        if self._loop.ended.is_set():
            state = pb.REPLICA_STATE_DEAD
        elif report is not None:
            silence = self._loop.clock() - self._last_at
            stalled = silence > stall_limit(report.load.predicted_step)
            ready = pb.REPLICA_STATE_DRAINING if report.draining else pb.REPLICA_STATE_READY
            state = pb.REPLICA_STATE_UNHEALTHY if stalled else ready
        return pb.ReplicaHealth(
            identity=self._description.identity,
            state=state,
            step=report.step if report is not None else 0,
            load=self._load(),
            routers=len({stream.router for stream in self._streams}),
        )


def _refusal(submit: pb.Submit, finish: Finish, sentence: str) -> Output:
    return Output(submit.attempt_id, len(submit.output_token_ids), [], finish=finish, error=sentence)
