"""Messages that wait to be sent to a replica, and those that it has not reported yet: pure.

A prompt is copied into its message when that is sent: of a request with many choices the queue holds one copy.
"""

from collections import deque
from collections.abc import Callable, Sequence

from headrace_proto.replica_pb2 import Cancel, RouterFrame, Submit

MAX_FRAME_TOKENS = 256 << 10  # prompt tokens in one RouterFrame: about 1 MiB


class SubmitQueue:
    """Submits and cancels of one replica until its stream sends them; within a frame, cancels come first."""

    def __init__(self, on_put: Callable[[], None]) -> None:
        """`on_put` is called after a message was added."""
        self._submits: list[tuple[Submit, Sequence[int]]] = []  # with the tokens of the prompt that are not in it
        self._cancels: list[bytes] = []
        self._sent: deque[bytes] = deque()  # attempts of this stream that the replica has not reported
        self._reported = 0  # submits of this stream
        self._on_put = on_put

    def submit(self, submit: Submit, prompt: Sequence[int] = ()) -> None:
        """prompt: token ids to add to it before it is sent."""
        self._submits.append((submit, prompt))
        self._on_put()

    def cancel(self, attempt_id: bytes) -> None:
        """Cancels an attempt; a submit that is still queued is dropped."""
        kept = [entry for entry in self._submits if entry[0].attempt_id != attempt_id]
        if len(kept) < len(self._submits):
            self._submits = kept
            return
        self._cancels.append(attempt_id)
        self._on_put()

    def clear(self) -> None:
        """Drops everything: the stream has ended."""
        self._submits.clear()
        self._cancels.clear()
        self._sent.clear()
        self._reported = 0

    def take(self) -> RouterFrame | None:
        """The queued messages as one frame, up to about 1 MiB of prompts; None when there are none."""
        if not (self._submits or self._cancels):
            return None
        submits = self._take_submits()
        cancels, self._cancels = self._cancels, []
        self._sent.extend(submit.attempt_id for submit in submits)
        sent = [Cancel(attempt_id=attempt_id) for attempt_id in cancels]
        return RouterFrame(submits=submits, cancels=sent)

    def _take_submits(self) -> list[Submit]:
        """All, or the oldest and then the shortest ones: none waits for all of another request's choices."""
        lengths = [_length(*entry) for entry in self._submits]
        places = range(len(lengths))
        order: Sequence[int] = places
        if sum(lengths) > MAX_FRAME_TOKENS:
            order = [0, *sorted(places[1:], key=lengths.__getitem__)]
        tokens, taken = 0, list[int]()
        for place in order:
            if taken and tokens + lengths[place] > MAX_FRAME_TOKENS:
                break
            tokens += lengths[place]
            taken.append(place)
        submits = []
        for place in taken:
            submit, prompt = self._submits[place]
            submit.prompt_token_ids.extend(prompt)
            submits.append(submit)
        chosen = set(taken)
        self._submits = [entry for place, entry in enumerate(self._submits) if place not in chosen]
        return submits

    def take_reported(self, count: int) -> list[bytes]:
        """The attempts that are new among the first `count` submits of this stream, which the replica has by now."""
        reported = []
        while self._reported < count and self._sent:
            reported.append(self._sent.popleft())
            self._reported += 1
        return reported


def _length(submit: Submit, prompt: Sequence[int]) -> int:
    return len(submit.prompt_token_ids) + len(submit.output_token_ids) + len(prompt)
