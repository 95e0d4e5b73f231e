"""Rules that every trace of a rank follows. Each function returns sentences about the calls that break its rule."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from support.worker.traced_device import CAPTURE, Call

PAIR = "headrace-pair-"  # threads of transfers
ANY_THREAD = ("serve", "nccl.connect", "nccl.abort")  # they use no device, or get it with the call
ACCESSES = {"kernel.read": False, "kv.read": False, "kernel.write": True, "kv.write": True}  # whether it writes
WAITS = ("mark.synchronize", "download.wait", "synchronize")

Known = dict[str, int]  # stream -> place in the trace up to which its work is done


def device_before_use(trace: Sequence[Call]) -> list[str]:
    """A thread's first call is `use`."""
    first: dict[str, Call] = {}
    for call in trace:
        if call.name not in ANY_THREAD:
            first.setdefault(call.thread, call)
    return [f"{call.thread} begins with {call.name}" for call in first.values() if call.name != "use"]


def streams_of_threads(trace: Sequence[Call]) -> list[str]:
    """Transfers run on a stream of their own, nothing else does."""
    broken = []
    for call in trace:
        own = call.stream not in ("default", CAPTURE)
        if call.name not in ("use", "own_stream") and own != call.thread.startswith(PAIR):
            broken.append(f"{call.thread}: {call.name} on stream {call.stream}")
        elif own and call.stream != call.thread:
            broken.append(f"{call.thread}: {call.name} on the stream of {call.stream}")
    return broken


def blocks_before_marks(trace: Sequence[Call]) -> list[str]:
    """Of two accesses to a block on different streams, one of which writes it, the later one is launched after a wait
    for a mark behind the earlier one: by its stream or its thread. For a transfer's access the wait of another thread
    is no proof.
    """
    broken = []
    marks: dict[int, Known] = {}
    streams: dict[str, Known] = defaultdict(dict)  # what work launched on a stream from now on runs after
    threads: dict[str, Known] = defaultdict(dict)  # what a thread has waited for
    everywhere: Known = {}
    accesses: dict[tuple[int, int], dict[tuple[str, bool], int]] = defaultdict(dict)
    for place, call in enumerate(trace):
        if call.stream == CAPTURE:
            continue
        if call.name in ("mark", "download"):
            marks[call.mark] = _later(streams[call.stream], threads[call.thread], {call.stream: place})
        elif call.name == "wait_for":
            streams[call.stream] = _later(streams[call.stream], marks[call.mark])
        elif call.name in ("mark.synchronize", "download.wait"):
            threads[call.thread] = _later(threads[call.thread], marks[call.mark])
            everywhere = _later(everywhere, marks[call.mark])
        elif call.name in ACCESSES:
            writes = ACCESSES[call.name]
            done = threads[call.thread] if call.thread.startswith(PAIR) else everywhere
            done = _later(done, streams[call.stream])
            for block in call.blocks:
                if block == 0:  # the null block
                    continue
                earlier = accesses[call.memory, block]
                for (stream, wrote), at in earlier.items():
                    if stream != call.stream and (writes or wrote) and done.get(stream, -1) < at:
                        broken.append(f"{place}: {call.name} of block {block} does not wait for {trace[at].name} {at}")
                earlier[call.stream, writes] = place
    return broken


def copies_that_are_reported_early(trace: Sequence[Call]) -> list[str]:
    """A transfer waits for its access to blocks before it copies to the host, and for that copy before it sends.

    Else a block could be used again while it is read.
    """
    broken = []
    pending: dict[str, int] = {}  # thread -> its last access or download that was not waited for
    marks: dict[int, int] = {}
    for place, call in enumerate(trace):
        if call.name == "download" and call.thread.startswith(PAIR) and call.thread in pending:
            broken.append(f"{place}: a download before {trace[pending[call.thread]].name} is done")
        if call.name in ("kv.read", "kv.write", "download"):
            pending[call.thread] = place
        if call.name in ("mark", "download"):
            marks[call.mark] = place
        elif call.name in ("mark.synchronize", "download.wait"):
            if marks[call.mark] >= pending.get(call.thread, place):
                pending.pop(call.thread)
        elif call.name in ("pair.send", "pair.report") and call.thread in pending:
            broken.append(f"{place}: {call.name} before {trace[pending[call.thread]].name} is done")
    return broken


def pinned_memory_in_use(trace: Sequence[Call]) -> list[str]:
    """Pinned memory is the source of another copy only when a mark after the last copy was waited for; until then it is
    not written.
    """
    broken = [
        f"{place}: a copy's source was written" for place, call in enumerate(trace) if call.name.endswith("changed")
    ]
    copies: dict[int, int] = {}  # memory -> its last copy
    marks: dict[int, int] = {}
    done: Known = {}
    for place, call in enumerate(trace):
        if call.name in ("mark", "download"):
            marks[call.mark] = place
        elif call.name in ("mark.synchronize", "download.wait"):
            stream = trace[marks[call.mark]].stream
            done[stream] = max(done.get(stream, -1), marks[call.mark])
        elif call.name == "upload" and call.memory:
            last = copies.get(call.memory, -1)
            if last > done.get(call.stream, -1):
                broken.append(f"{place}: an upload from memory that upload {last} may still read")
            copies[call.memory] = place
    return broken


def waits_of_step_threads(trace: Sequence[Call]) -> list[str]:
    """A thread that launches a model's kernels does not wait for the device once it serves: only for tokens of a step
    that it begins to copy itself, and for a slot's copy before it copies from the slot.
    """
    broken = []
    steps = {call.thread for call in trace if call.name.startswith("kernel.")}
    made = {call.mark: place for place, call in enumerate(trace) if call.name in ("mark", "download")}
    served = max((place for place, call in enumerate(trace) if call.name == "serve"), default=len(trace))
    for place, call in enumerate(trace):
        if call.thread not in steps or call.name not in WAITS or place < served:
            continue
        if call.name == "synchronize":
            broken.append(f"{place}: {call.thread} waits for its stream")
            continue
        place_of_mark = made[call.mark]
        before = [one for one in trace[:place_of_mark] if one.thread == trace[place_of_mark].thread]
        of_slot = before and before[-1].name == "upload" and before[-1].memory and before[-1].thread in steps
        if not (of_slot if call.name == "mark.synchronize" else trace[place_of_mark].thread == call.thread):
            broken.append(f"{place}: {call.thread} waits for mark {call.mark}")
    return broken


def calls_during_captures(trace: Sequence[Call]) -> list[str]:
    """While a thread captures, it launches kernels and collectives alone; others call no collective."""
    broken = []
    capturing = ""
    for place, call in enumerate(trace):
        if call.name == "capture.begin":
            if capturing:
                broken.append(f"{place}: {call.thread} captures while {capturing} does")
            capturing = call.thread
        elif call.name == "capture.end":
            capturing = ""
        elif capturing:
            launched = call.name.startswith(("kernel.", "nccl."))
            if call.thread == capturing and not (launched and call.stream == CAPTURE):
                broken.append(f"{place}: {call.name} in a capture")
            elif call.thread != capturing and call.name.startswith("nccl."):
                broken.append(f"{place}: {call.thread} calls {call.name} while {capturing} captures")
    return broken


def replays_without_inputs(trace: Sequence[Call]) -> list[str]:
    """A replay follows a copy into its inputs, on the same thread and stream, and all captures."""
    broken = []
    copied: set[tuple[str, str]] = set()
    last = max((place for place, call in enumerate(trace) if call.name == "capture.end"), default=-1)
    for place, call in enumerate(trace):
        if call.name == "upload_into":
            copied.add((call.thread, call.stream))
        elif call.name == "graph.replay":
            if (call.thread, call.stream) not in copied or place < last:
                broken.append(f"{place}: a replay on {call.thread} without new inputs")
            copied.discard((call.thread, call.stream))
    return broken


RULES: Sequence[Callable[[Sequence[Call]], list[str]]] = (
    device_before_use,
    streams_of_threads,
    blocks_before_marks,
    copies_that_are_reported_early,
    pinned_memory_in_use,
    waits_of_step_threads,
    calls_during_captures,
    replays_without_inputs,
)


def different_collectives(traces: Sequence[Sequence[Call]]) -> list[str]:
    """All ranks of a group call its collectives in the same order."""
    found: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for rank, trace in enumerate(traces):
        for call in trace:
            if call.name in ("nccl.allreduce", "nccl.allgather"):
                found[call.group][rank].append(call.name)
    return [group for group, ranks in found.items() if len({tuple(calls) for calls in ranks.values()}) > 1]


def broken_rules(trace: Sequence[Call]) -> list[str]:
    """At most three sentences of each rule."""
    return [f"{rule.__name__}: {sentence}" for rule in RULES for sentence in rule(trace)[:3]]


def _later(*known: Known) -> Known:
    found: Known = {}
    for one in known:
        for stream, place in one.items():
            found[stream] = max(found.get(stream, -1), place)
    return found
