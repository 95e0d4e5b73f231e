"""Replicas whose model output was not finite where a later attempt's was: their devices may be defective. Pure.

An output that is not finite may be the fault of the model or of the prompt: then no attempt succeeds, and no replica is
counted. The controller compares the reports of all routers.
"""

from collections.abc import Callable, Iterator

from headrace_proto.control_pb2 import NotFinite

Build = tuple[str, int]  # id and generation of a replica
COUNTED_SECONDS = 600.0  # since the last such output for a prompt
AVOID_SECONDS = 30.0  # since the last such output of a replica, that others are preferred
MAX_PROMPTS = 16  # that are counted for a pair; the controller needs fewer
MAX_PAIRS = 64  # the oldest ones are dropped


class NotFiniteTable:
    """What this router found, by replica and by the replica that sent it KV blocks of the prompt."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._prompts: dict[tuple[Build, Build | None], dict[bytes, float]] = {}  # when, by fingerprint
        self._avoided_until: dict[Build, float] = {}

    def add(self, replica: Build, source: Build | None, fingerprint: bytes) -> None:
        """The output for a prompt was not finite on the replica, and was in a later attempt."""
        now = self._clock()
        self._remove_old(now)
        prompts = self._prompts.setdefault((replica, source), {})
        prompts.pop(fingerprint, None)
        prompts[fingerprint] = now
        if len(prompts) > MAX_PROMPTS:
            del prompts[next(iter(prompts))]
        if len(self._prompts) > MAX_PAIRS:
            del self._prompts[next(iter(self._prompts))]
        for build in (replica, source):
            if build is not None:
                self._avoided_until[build] = now + AVOID_SECONDS

    def __bool__(self) -> bool:
        return bool(self._avoided_until)

    def avoids(self, build: Build) -> bool:
        """Whether other replicas are preferred now."""
        return self._avoided_until.get(build, 0.0) > self._clock()

    def report(self) -> Iterator[NotFinite]:
        """For the controller."""
        self._remove_old(self._clock())
        for (replica, source), prompts in self._prompts.items():
            entry = NotFinite(replica_id=replica[0], generation=replica[1], prompts=len(prompts))
            if source is not None:
                entry.source_id, entry.source_generation = source
            yield entry

    def _remove_old(self, now: float) -> None:
        kept = {
            pair: {prompt: at for prompt, at in prompts.items() if now - at <= COUNTED_SECONDS}
            for pair, prompts in self._prompts.items()
        }
        self._prompts = {pair: prompts for pair, prompts in kept.items() if prompts}
        self._avoided_until = {build: until for build, until in self._avoided_until.items() if until > now}
