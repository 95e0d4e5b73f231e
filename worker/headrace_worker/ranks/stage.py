"""One step on one rank of several: what every rank does, rank 0 included.

    tokens sampled in earlier steps ─▶ rows      plan ─▶ batch
    hidden states from the stage before ─▶ forward ─▶ hidden states for the stage after
                                                  └─▶ last stage: its first rank samples

In a guided step the rank that samples keeps the logits until `draw` passes the masks; others wait for its tokens.
A recording contains the forward of this stage alone: hidden states are received and sent outside, as are tokens.

With one stage the sampled tokens are sent to the other ranks at once, from device to device, so that a later step can
be launched before the host reads them. With several, rank 0 must have them before it plans their row again, and so
they are sent with its next commands.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
import torch
from torch import Tensor

from headrace_worker.comm.group import Sending
from headrace_worker.core.guide import Mask
from headrace_worker.device.pinned_ring import PinnedRing
from headrace_worker.device.rank_device import GraphRecorder
from headrace_worker.model.load import LoadedModel
from headrace_worker.ranks.messages import Drawn, Step
from headrace_worker.ranks.recording import CollectiveRecorder
from headrace_worker.ranks.team import Team
from headrace_worker.runner.batch import Batch
from headrace_worker.runner.rank_runner import Runner
from headrace_worker.sampler import NO_MASKS, SampleOutput

log = structlog.get_logger(__name__)

_HIDDEN = 3  # tag
_DRAWN_BYTES = 3 * 16  # row, position and token, aligned
DRAWING_FAILED = "drawing a token failed"


@dataclass(slots=True)
class StageResult:
    """The outcome of a step on the rank that samples; on others both are None."""

    samples: SampleOutput | None = None
    error: Exception | None = None  # error in sampling: the ranks stay synchronized


@dataclass(slots=True)
class _Drawing:
    """Rows that wait for their tokens: the position of each, and which use of the row."""

    rows: list[int]
    positions: list[int]
    uses: list[int]


class StageRunner:
    """Runs this rank's part of every step, in the order of the commands."""

    def __init__(self, model: LoadedModel, runner: Runner, team: Team, name: str = "record") -> None:
        """For a rank's loaded part of a model. `name`: of its all-gather, the same on all ranks."""
        self.runner = runner
        self._team = team
        # Not `gather_all`: a follower's other thread uses that until all ranks are warm.
        self._all_gather = team.new_all_gather(name)
        self._topology = team.topology
        self._dtype = model.dtype
        self._drawings: dict[int, _Drawing] = {}
        # As many steps as stages are in flight, and a step's copy is done when it is collected: no slot is waited for.
        self._uploads = PinnedRing(model.device, team.topology.pp + 1, runner.max_rows * _DRAWN_BYTES)
        self._sent: deque[Sending] = deque()
        self._undrawn: tuple[Batch, Tensor | None] | None = None

    @torch.inference_mode()
    def run(self, step: Step) -> StageResult:
        """Raises whatever the model raises: then the ranks are out of sync, and the replica must end."""
        self._store_drawn(step.drawn)
        batch = self.runner.prepare(step.plan)
        if batch is None:
            return StageResult()
        out = self.runner.forward(batch, self._receive_hidden(batch))
        if not self._topology.is_last_stage:
            if out is not None:
                # The next replay overwrites the buffer, and it does not wait until this step's part of it is sent.
                self._send_hidden(out.clone() if batch.recorded is not None else out)
            if self._topology.is_first_stage and batch.sample_rows:
                owners = [int(self.runner.rows.uses[row]) for row in batch.sample_rows]
                self._drawings[step.plan.step] = _Drawing(batch.sample_rows, batch.sample_positions, owners)
            return StageResult()
        if not batch.sample_rows and not batch.scored_rows:
            return StageResult()
        if step.plan.guided and self._topology.samples:
            self._undrawn = batch, out
            return StageResult()
        return self._draw(batch, out, NO_MASKS)

    def record(
        self, recorder: GraphRecorder, done: Callable[[float], None] = lambda fraction: None
    ) -> tuple[list[int], list[int]]:
        """Record this rank's part of steps, on all ranks; returns the sizes, which are the same on all.

        Raises RecordingFailedError on all ranks when it fails on one; they stay synchronized, without recordings.
        Raises RankLostError.
        """
        collective = CollectiveRecorder(recorder, self._all_gather, self._team.detector, self.runner.device)
        return self.runner.record(collective, done)

    @torch.inference_mode()
    def draw(self, masks: Mapping[int, Mask]) -> StageResult:
        """Finish the last guided step, on the rank that samples. Raises as `run`."""
        assert self._undrawn is not None
        (batch, logits), self._undrawn = self._undrawn, None
        return self._draw(batch, logits, masks)

    def _draw(self, batch: Batch, logits: Tensor | None, masks: Mapping[int, Mask]) -> StageResult:
        result = StageResult()
        tokens = torch.zeros(len(batch.sample_rows), dtype=torch.int64, device=self.runner.device.torch_device)
        if self._topology.samples and logits is not None:
            try:
                result.samples = self.runner.sample(batch, logits, masks)
                tokens = result.samples.tokens
            except Exception as error:  # caused by requests of this step: the other ranks must not wait for tokens
                self.runner.check_device(error)
                log.error("drawing_failed", error=type(error).__name__)
                result.error = error
        if not batch.sample_rows:
            return result
        if self._topology.pp == 1:
            tokens = self._team.context.tp.all_gather(tokens.unsqueeze(0), 0)[0]
        elif not self._topology.samples:
            return result  # the first stage embeds tokens, and the rank that samples needs them for penalties
        self.runner.apply_tokens(batch, tokens)
        return result

    def _store_drawn(self, drawn: Sequence[Drawn]) -> None:
        """Store tokens in the rows that are still in the use for which they were sampled."""
        uses = self.runner.rows.uses
        stored: list[tuple[int, int, int]] = []
        for step in drawn:
            drawing = self._drawings.pop(step.step, None)
            if drawing is None:
                continue
            found = zip(drawing.rows, drawing.positions, drawing.uses, step.tokens, strict=True)
            stored += [(row, position, token) for row, position, use, token in found if int(uses[row]) == use]
        if stored:
            rows, positions, tokens = self._uploads.upload(list(np.array(stored, np.int64).T))
            self.runner.rows.store_tokens(rows, positions, tokens)

    def _receive_hidden(self, batch: Batch) -> Tensor | None:
        if self._topology.is_first_stage:
            return None
        return self._team.pipe.receive(self.runner.hidden_buffer(batch), self._topology.before, _HIDDEN)

    def _send_hidden(self, hidden: Tensor) -> None:
        hidden = hidden.to(self._dtype).contiguous()
        self._sent.append(self._team.pipe.send(hidden, self._topology.after, _HIDDEN))
        while len(self._sent) > self._topology.pp:
            self._team.pipe.finish(self._sent.popleft())
