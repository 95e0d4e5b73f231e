"""Steps that are recorded once and replayed: one launch for the host instead of one per kernel.

    plan ─▶ HostBatch ─▶ smallest recorded size that holds it ─▶ one copy into its buffers ─▶ replay ─▶ its output

A recording fixes shapes, not contents: kernels read lengths, tables and sampling options from the device. It contains
the layers of one pipeline stage: it begins at hidden states that are received into a buffer, and ends at those that are
sent, or at the tokens, which it stores in the rows. Where a row needs more than a draw from the logits (a mask, a
penalty, log-probabilities), sampling continues outside, from the logits, and its tokens replace the stored ones. Large
steps are recorded as far as launching their kernels one by one takes most of their time; beyond, they run so.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import structlog
import torch
from torch import Tensor

from headrace_worker.device.rank_device import GraphRecorder
from headrace_worker.device.staging import all_to_device, pack, unpack
from headrace_worker.model.load import LoadedModel
from headrace_worker.runner.batch import PIECES, Batch, HostBatch, flatten_work
from headrace_worker.runner.rows import RowState

log = structlog.get_logger(__name__)

MIXED_TOKENS = (16, 32, 64, 128, 256, 512)  # for prompts in small pieces beside running requests
# Where it pays. Multiples of 128, to which the products' tiles pad anyway.
LARGE_TOKENS = (640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
_LAUNCHING = 0.7  # share of a step's time: below this share, the device would not be faster by much
_FEW = 16  # rows, for which a library may choose a slow product
_FASTER = 0.97
_ROUNDS = 4  # rounds of timing; the first round is not counted

Forward = Callable[[Batch, Tensor | None], Tensor | None]
Draw = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # logits, rows, positions -> tokens, largest logits


class StepSize(NamedTuple):
    """of_decode: one token per sequence."""

    tokens: int
    of_decode: bool


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What a recorded step of one size reads. packed: its inputs, of which the batch has views."""

    packed: Tensor
    batch: Batch
    sequences: int
    hidden_in: Tensor | None  # [1, T, N]; None on the first stage


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One size: its tensors, the replay of the step on them, and where its outputs are after that.

    outputs: hidden states [1, T, N]; on the last stage logits [S, V], tokens [S] int64 and the largest logits [S].
    """

    tensors: StepTensors
    replay: Callable[[], None]
    outputs: Sequence[Tensor]


class StepGraphs:
    """All recorded sizes of one runner."""

    def __init__(
        self,
        model: LoadedModel,
        rows: RowState,
        forward: Forward,
        draw: Draw,
        recorder: GraphRecorder,
        sizes: Sequence[StepSize],
    ) -> None:
        """Allocates what steps of these sizes read. Raises what the recorder or an allocation raises."""
        self._model = model
        self._layout = model.layout
        self._rows = rows
        self._forward = forward
        self._draw = draw
        self._recorder = recorder
        self._decode: dict[int, RecordedStep] = {}
        self._mixed: dict[int, RecordedStep] = {}
        self._replacement_size: dict[int, int] = {}  # decode sizes, each with the one that runs its steps
        self._tensors = recorder.allocate(lambda: dict(self._allocated(sizes)))

    @property
    def sizes(self) -> tuple[list[int], list[int]]:
        """Tokens of the recorded sizes: of steps with one token per sequence, and of any others."""
        return sorted(self._decode), sorted(self._mixed)

    @torch.inference_mode()
    def record(self, sizes: Sequence[StepSize], done: Callable[[float], None] = lambda fraction: None) -> None:
        """Record some of the sizes, in this order: what comes after the largest ones fits into their memory.

        `done` is called with the fraction. Raises whatever the model raises when it cannot be recorded, for example
        because its code waits for the device.
        """
        for place, size in enumerate(sizes):
            (self._decode if size.of_decode else self._mixed)[size.tokens] = self._record(self._tensors[size])
            done((place + 1) / len(sizes))

    def choose_sizes(self) -> None:
        """Run decode steps of few rows by the fastest recording that holds them, after `record`. Raises as it."""
        seconds = {size: inf for size in sorted(self._decode) if size <= _FEW}
        for number in range(_ROUNDS):  # over all sizes, so that none is timed at a lower clock
            for size in seconds:
                took = self._recorder.seconds(self._decode[size].replay)
                seconds[size] = min(seconds[size], took) if number else inf
        self._replacement_size = fastest_sizes(seconds)
        if changed := {size: other for size, other in self._replacement_size.items() if size != other}:
            log.info("steps_run_by_larger_recordings", rows=changed)

    def prepare(self, host: HostBatch, layers_wanted: bool = False) -> Batch | None:
        """The work in the buffers of a recorded step that holds it; None when none does.

        layers_wanted: by a transfer, as they are written, which a replay does not tell: no large step is replayed.
        """
        step = self._fitting(host)
        if step is None or (layers_wanted and len(host.token_rows) > MIXED_TOKENS[-1]):
            return None
        if len(host.changed_places) > step.tensors.batch.changes[0].shape[0]:  # a long cached prompt
            self._rows.store_changes(*all_to_device([host.changed_places, host.changed_blocks], self._rows.device))
            host = replace(host, changed_places=host.changed_places[:0], changed_blocks=host.changed_blocks[:0])
        padded = self._pad(host, step)
        self._rows.device.upload_into(step.tensors.packed, pack(padded.arrays))
        drawing = len(host.drawn_rows)
        batch = step.tensors.batch
        return replace(
            batch,
            sample_index=batch.sample_index[:drawing],
            drawn_rows=batch.drawn_rows[:drawing],
            drawn_positions=batch.drawn_positions[:drawing],
            sample_rows=host.drawn_rows.tolist(),
            sample_positions=host.drawn_positions.tolist(),
            recorded=step,
        )

    def run(self, batch: Batch) -> Tensor | None:
        """Replay a prepared batch, whose hidden states are in its buffer; the output is valid until the next run.

        The last stage returns logits [R, V], None when no row is sampled; others hidden states [1, T, N].
        """
        step: RecordedStep = batch.recorded
        step.replay()
        out = step.outputs[0]
        if not self._model.parallel.is_last_stage:
            return out
        drawing = len(batch.sample_rows)
        return out[:drawing] if drawing else None

    def drawn(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(tokens [R] int64, largest logits [R]) of the last run, of the last stage; the tokens are in their rows."""
        _, tokens, peaks = batch.recorded.outputs
        drawing = len(batch.sample_rows)
        return tokens[:drawing], peaks[:drawing]

    def _fitting(self, host: HostBatch) -> RecordedStep | None:
        found = self._decode if host.max_query_len == 1 else self._mixed
        sizes = sorted(found)
        for size in sizes[bisect_left(sizes, len(host.token_rows)) :]:
            sequences = found[size].tensors.sequences
            if sequences >= len(host.seq_lens) and PIECES * sequences >= host.state_slots.shape[1]:
                return found[self._replacement_size.get(size, size) if found is self._decode else size]
        return None

    def _pad(self, host: HostBatch, step: RecordedStep) -> HostBatch:
        batch, meta = step.tensors.batch, step.tensors.batch.metas[0]
        sizes = batch.token_rows.shape[0], step.tensors.sequences, batch.changes[0].shape[0]
        return host.padded(*sizes, meta.max_query_len, meta.max_seq_len, self._rows)

    def _allocated(self, sizes: Sequence[StepSize]) -> Iterator[tuple[StepSize, StepTensors]]:
        nothing = flatten_work([], self._rows, self._layout.block_size)
        hidden = None
        if not self._model.parallel.is_first_stage:  # all sizes have one: only the newest replay is valid
            hidden = hidden_states(self._model, max(size.tokens for size in sizes)).zero_()
        for size in sizes:
            sequences = min(size.tokens, self._rows.max_rows)
            longest = 1 if size.of_decode else size.tokens
            changes = sequences + size.tokens if self._rows.device.asynchronous else 0
            host = nothing.padded(size.tokens, sequences, changes, longest, self._rows.max_len, self._rows)
            packed = pack(host.arrays).to(self._rows.device.torch_device)
            batch = host.over(unpack(packed, host.arrays), self._rows.device_tables)
            hidden_in = hidden[:, : size.tokens] if hidden is not None else None
            yield size, StepTensors(packed, batch, sequences, hidden_in)

    def _record(self, tensors: StepTensors) -> RecordedStep:
        def step() -> Sequence[Tensor]:
            self._rows.store_changes(*tensors.batch.changes)
            found = self._forward(tensors.batch, tensors.hidden_in)
            assert found is not None  # every sequence of a padded batch counts as sampled
            if not self._model.parallel.is_last_stage:
                return (found,)
            drawn_rows, drawn_positions = tensors.batch.drawn_rows, tensors.batch.drawn_positions
            tokens, peaks = self._draw(found, drawn_rows, drawn_positions)
            self._rows.store_tokens(drawn_rows, drawn_positions, tokens)
            return found, tokens, peaks

        self._recorder.warm_up(step)
        replay, outputs = self._recorder.record(step)
        return RecordedStep(tensors, replay, outputs)


def hidden_states(model: LoadedModel, tokens: int) -> Tensor:
    """Unfilled [1, T, N], as stages exchange them."""
    shape = (1, tokens, int(model.config.hidden_size))
    return torch.empty(shape, dtype=model.dtype, device=model.device.torch_device)


def decode_sizes(max_rows: int) -> list[int]:
    """Few sizes with little padding: 1, 2, 4, then every eighth, and every 32nd from 256 on."""
    sizes = {1, 2, 4, *range(8, min(max_rows, 256) + 1, 8), *range(256, max_rows + 1, 32), max_rows}
    return sorted(size for size in sizes if size <= max_rows)


def step_sizes(max_rows: int, largest: int = MIXED_TOKENS[-1]) -> list[StepSize]:
    """All that are recorded: decode steps, then mixed ones of up to `largest` tokens, the largest first of each."""
    mixed = [tokens for tokens in MIXED_TOKENS + LARGE_TOKENS if tokens <= max(largest, MIXED_TOKENS[-1])]
    decode = decode_sizes(max_rows)
    return [StepSize(tokens, True) for tokens in decode[::-1]] + [StepSize(tokens, False) for tokens in mixed[::-1]]


def fastest_sizes(seconds: Mapping[int, float]) -> dict[int, int]:
    """For each size the larger one that takes clearly less time, or itself."""
    chosen = {}
    for size, own in seconds.items():
        best = min((larger for larger in seconds if larger >= size), key=lambda larger: (seconds[larger], larger))
        chosen[size] = best if seconds[best] < _FASTER * own else size
    return chosen


def largest_that_pays(launch_share: Callable[[int], float], budget: int) -> int:
    """Tokens of the largest step worth recording, of at most `budget`.

    launch_share: of the time of a step of so many tokens, run kernel by kernel, that passes until all are launched.
    """
    largest = MIXED_TOKENS[-1]
    for tokens in LARGE_TOKENS:
        if tokens > budget or launch_share(tokens) < _LAUNCHING:
            break
        largest = tokens
    return largest
