"""One rank's step execution: `launch` a plan, `collect` its samples.

    plan ──▶ rows (tokens, tables) ──gather──▶ batch ──▶ model + paged cache ──▶ logits ──▶ sampler ──▶ rows
                                                                                    ▲         └──▶ collect
                                                                       masks ───────┘

`launch` never waits for the device: sampled tokens are stored in the rows there, and the next plan may be launched
before this one is collected. For a guided plan it ends at the logits, and `draw` continues when the masks are ready.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from headrace_worker.core.guide import Mask
from headrace_worker.core.plan import StepPlan, StepResult
from headrace_worker.core.step_runner import RunnerBrokenError
from headrace_worker.core.transfer.orders import Order
from headrace_worker.device.loss import loss_sentence
from headrace_worker.device.rank_device import GraphRecorder
from headrace_worker.model.attention import StepContext, step_context
from headrace_worker.model.forward import LogitsModel
from headrace_worker.model.load import LoadedModel
from headrace_worker.runner.batch import Batch, flatten_work, upload
from headrace_worker.runner.graphs import MIXED_TOKENS, StepGraphs, StepSize, hidden_states, step_sizes
from headrace_worker.runner.pools import KVPools
from headrace_worker.runner.rows import RowState
from headrace_worker.sampler import NO_MASKS, SampleBatch, SampleOutput, Sampler


@dataclass(slots=True)
class StepHandle:
    """A launched step, whose samples may not be ready yet."""

    step: int
    samples: SampleOutput | None = None  # None: the plan samples nothing, or not yet
    undrawn: tuple[Batch, Tensor] | None = None  # its logits [R, V] wait for masks


class KVListener(Protocol):
    """Is notified when a step has written keys and values, such as a transfer that sends them."""

    def begin_step(self, orders: Sequence[Order], *, computes: bool) -> Callable[[int, Tensor], None] | None:
        """Starts the orders of a plan before its work. Returns what to call with each layer and its written values."""

    def end_step(self) -> None:
        """The step is over, also if it failed: no further layer will be reported."""


class Runner:
    """Runs steps of one model, or of one rank's part of it. Owns the rows and the sampler's state; writes the KV pools.

    A replica of several ranks calls the parts of `launch` itself, with the communication between the ranks in between.

    Block 0 of the pools is the null block. Pools are zeroed once; after that every slot that a query attends to has
    been written by the same row, or belongs to an equal prefix.
    """

    def __init__(
        self,
        model: LoadedModel,
        pools: KVPools,
        *,
        max_rows: int,
        max_len: int,
        kv_listener: KVListener | None = None,
        max_recorded: int = MIXED_TOKENS[-1],
    ) -> None:
        """max_recorded: tokens of the largest step that `record` records."""
        self.layout = model.layout
        self.device = model.device
        self.num_blocks = pools.num_blocks
        self.max_rows = max_rows
        self.max_len = max_len
        self.max_recorded = max_recorded
        self.pools = pools
        self._loaded = model
        self._model = LogitsModel(model.module, model.parallel)
        self.rows = RowState(self.layout, max_rows, max_len, model.device)
        self.sampler = Sampler(model.vocab_size, max_rows + 1, model.device)  # and the spare row
        self._deterministic = model.deterministic
        self._graphs: StepGraphs | None = None
        self._kv_listener = kv_listener
        self._written: Callable[[int, Tensor], None] | None = None
        self.on_scored: Callable[[Tensor], None] | None = None  # logits [P, V] of a step's scored positions

    def launch(self, plan: StepPlan) -> StepHandle:
        """One step on a replica of one rank: all of the following parts, in order. Raises RunnerBrokenError."""
        try:
            return self._launch(plan)
        except Exception as error:
            self.check_device(error)
            raise

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> StepHandle:
        handle = StepHandle(plan.step)
        batch = self.prepare(plan)
        logits = self.forward(batch) if batch is not None else None
        if batch is not None and logits is not None:
            handle.undrawn = batch, logits
            if not plan.guided:
                self._draw(handle, NO_MASKS)
        return handle

    def draw(self, handle: StepHandle, masks: Mapping[int, Mask] = NO_MASKS) -> None:
        """Finish a launched step: sample tokens and store them in the rows. Does not wait for the device either.

        Raises RunnerBrokenError.
        """
        try:
            self._draw(handle, masks)
        except Exception as error:
            self.check_device(error)
            raise

    @torch.inference_mode()
    def _draw(self, handle: StepHandle, masks: Mapping[int, Mask]) -> None:
        if handle.undrawn is None:
            return
        batch, logits = handle.undrawn
        handle.undrawn = None
        handle.samples = self.sample(batch, logits, masks)
        if not handle.samples.stored:
            self.apply_tokens(batch, handle.samples.tokens)

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for a launched step and copy its samples to the host. Raises RunnerBrokenError."""
        if handle.samples is None:
            return StepResult(handle.step, [], {}, {})
        try:
            return handle.samples.to_result(handle.step)
        except Exception as error:
            self.check_device(error)
            raise

    def check_device(self, error: Exception) -> None:
        """Raises RunnerBrokenError if the error of a step has ended the device for this process."""
        if loss := loss_sentence(self.device, error):
            raise RunnerBrokenError(loss) from error

    def clear(self, blocks: int, rows: int = 1) -> None:
        """Reset the first blocks and rows, so that a warm-up has no effect."""
        self.pools.clear(blocks)
        self.rows.tokens[:rows].zero_()

    @property
    def recorded_sizes(self) -> list[StepSize]:
        """The sizes of the steps that `record` records."""
        return step_sizes(self.max_rows, self.max_recorded)

    @torch.inference_mode()
    def new_graphs(self, recorder: GraphRecorder) -> StepGraphs:
        """Recordings of this rank's layers, of which none is made yet; `launch` does not use them.

        Raises what the recorder raises, or a failed allocation.
        """
        return StepGraphs(self._loaded, self.rows, self._compute, self.sampler.draw, recorder, self.recorded_sizes)

    def record(
        self, recorder: GraphRecorder, done: Callable[[float], None] = lambda fraction: None
    ) -> tuple[list[int], list[int]]:
        """Record this rank's layers for steps of all sizes; returns these: of decode steps, and of mixed ones.

        All tensor-parallel ranks of a stage call it together. Raises what the recorder or the model raises when it
        cannot be recorded; it then runs as before, and no recording is kept.
        """
        graphs = self.new_graphs(recorder)
        graphs.record(self.recorded_sizes, done)
        graphs.choose_sizes()
        self._graphs = graphs
        return graphs.sizes

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> Batch | None:
        """Apply the plan's frees, inits and tables, and lay out its work; None when there is none.

        Every rank prepares every plan, in their order.
        """
        if self._kv_listener is not None and plan.orders:
            self._written = self._kv_listener.begin_step(plan.orders, computes=bool(plan.work))
        try:
            return self._apply_and_gather(plan)
        except BaseException:
            self._release_written()  # this step writes no layer: release the waits for it
            raise

    def _apply_and_gather(self, plan: StepPlan) -> Batch | None:
        for row in plan.frees:
            self.rows.free(row)
            self.sampler.free(row)
        for init in plan.inits:
            self.rows.initialise(init)
            self.sampler.init(init)
        for update in plan.tables:
            self.rows.update_table(update)
        if not plan.work:
            return None
        host = flatten_work(plan.work, self.rows, self.layout.block_size, plan.scores)
        recorded = None
        if self._graphs is not None and not plan.scores:
            recorded = self._graphs.prepare(host, self._written is not None)
        return recorded or upload(host, self.rows)

    def hidden_buffer(self, batch: Batch) -> Tensor:
        """Where the hidden states [1, T, N] of a batch from the stage before are to be put, for `forward`."""
        if batch.recorded is not None:
            hidden: Tensor = batch.recorded.tensors.hidden_in
            return hidden
        return hidden_states(self._loaded, batch.token_rows.shape[0])

    @torch.inference_mode()
    def forward(self, batch: Batch, hidden_in: Tensor | None = None) -> Tensor | None:
        """Run this rank's layers. All tensor-parallel ranks of a stage call it together.

        `hidden_in` is the batch's `hidden_buffer`, filled by the stage before (None on the first stage). The last stage
        returns logits [R + P, V] of the sampled rows and the scored positions, None when there are none; other
        stages return hidden states [1, T, N]. Of a recorded batch the output is valid until the next `forward`.
        """
        try:
            if batch.recorded is not None and self._graphs is not None:
                assert hidden_in is batch.recorded.tensors.hidden_in
                return self._graphs.run(batch)
            return self._compute(batch, hidden_in, self._written)
        finally:
            self._release_written()

    def _release_written(self) -> None:
        if self._written is not None and self._kv_listener is not None:
            self._written = None
            self._kv_listener.end_step()

    def _compute(
        self, batch: Batch, hidden_in: Tensor | None = None, written: Callable[[int, Tensor], None] | None = None
    ) -> Tensor | None:
        """`written` is called with each layer's keys and values; in a replay it is not called."""
        ids = self.rows.gather_tokens(batch.token_rows, batch.positions)
        metas = [replace(meta) for meta in batch.metas]  # a step's plans of attention are made within it
        if self.device.torch_device.type == "cpu":
            metas = [meta.gathered(self.layout.block_size) for meta in metas]
        context = StepContext(
            self.pools.layers,
            metas,
            deterministic=self._deterministic,
            hidden_in=hidden_in,
            written=written,
            states=self.pools.states,
            state_meta=batch.states,
        )
        with step_context(context):
            return self._model(ids, batch.positions, batch.sample_index)

    @torch.inference_mode()
    def sample(self, batch: Batch, logits: Tensor, masks: Mapping[int, Mask] = NO_MASKS) -> SampleOutput:
        """Sample a token for each of the R rows, and score P known ones: on one rank of the last stage.

        Overwrites `logits` [R + P, V]. A recorded step may have drawn the tokens already.
        """
        recorded = self._graphs if batch.recorded is not None and not masks else None
        if recorded is not None and self.sampler.is_plain(batch.sample_rows):
            return SampleOutput(self.device, *recorded.drawn(batch), stored=True)
        drawn, scores = len(batch.sample_rows), None
        if batch.scored_rows:
            if self.on_scored is not None:
                self.on_scored(logits[drawn:])
            scores = self.sampler.score(logits[drawn:], batch.scored_rows, self.rows.gather_tokens(*batch.scored))
        samples = SampleBatch(
            self.device, logits[:drawn], batch.sample_rows, batch.sample_positions,
            batch.drawn_rows, batch.drawn_positions, self.rows.tokens,
        )  # fmt: skip
        return self.sampler.sample(samples, masks, scores)

    @torch.inference_mode()
    def apply_tokens(self, batch: Batch, tokens: Tensor) -> None:
        """Write a batch's sampled tokens [R] int64 into the rows: on the ranks of the first and last stages at least.

        Must be called before the `forward` of a later batch that computes these tokens, and before a row is reassigned.
        """
        self.rows.store_tokens(batch.drawn_rows, batch.drawn_positions, tokens)
