"""One rank's step execution: `launch` a plan, `collect` its samples.

    plan ──▶ rows (tokens, tables) ──gather──▶ batch ──▶ model + paged cache ──▶ logits ──▶ sampler ──▶ rows
                                                                                    ▲         └──▶ collect
                                                                       masks ───────┘

`launch` never waits for the device: sampled tokens go back into the rows there, and the next plan may be launched
before this one is collected. Of a guided plan it ends at the logits, and `draw` goes on when the masks are there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_worker.guide import Mask
from headrace_worker.layout import CacheLayout
from headrace_worker.model.attention import LayerCache, StepContext, step_context
from headrace_worker.model.forward import LogitsModel
from headrace_worker.model.load import LoadedModel
from headrace_worker.plan import StepPlan, StepResult
from headrace_worker.runner.batch import Batch, gather
from headrace_worker.runner.graphs import Recorder, StepGraphs, decode_sizes, mixed_sizes
from headrace_worker.runner.pools import bind_layers, make_pools
from headrace_worker.runner.rows import RowState
from headrace_worker.sampler import NO_MASKS, SampleOutput, Sampler
from headrace_worker.transfer.courier import Courier


@dataclass(slots=True)
class StepHandle:
    """A launched step, whose samples may still be on their way."""

    step: int
    samples: SampleOutput | None = None  # None: the plan drew nothing, or not yet
    undrawn: tuple[Batch, Tensor] | None = None  # its logits [R, V] wait for masks


class Runner:
    """Runs steps of one model, or of one rank's part of it. Owns the KV pools, the rows and the sampler's state.

    A replica of several ranks calls the parts of `launch` itself, with what goes between the ranks in between.

    Block 0 of the pools is the null block. Pools are zeroed once; after that every slot that a query can see has
    been written by the row that sees it, or belongs to an equal prefix.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        max_rows: int,
        max_len: int,
        layout: CacheLayout | None = None,
    ) -> None:
        self.layout = layout or model.layout
        self.device = model.device
        self.num_blocks = num_blocks
        self.max_rows = max_rows
        self.max_len = max_len
        self.pools = make_pools(self.layout, num_blocks, model.dtype, model.device)
        self._caches = bind_layers(self.layout, self.pools)
        self._model = LogitsModel(model.module, model.parallel)
        self.rows = RowState(self.layout, max_rows, max_len, model.device)
        self.sampler = Sampler(model.vocab_size, max_rows, model.device)
        self._vocab_size = model.vocab_size
        self._deterministic = model.deterministic
        self._graphs: StepGraphs | None = None
        self.courier: Courier | None = None
        self._written: Callable[[int, Tensor], None] | None = None

    @property
    def caches(self) -> dict[int, LayerCache]:
        """Where each layer of this rank has its keys and values, by index in the model."""
        return self._caches

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """One step on a replica of one rank: all of what follows, in order."""
        handle = StepHandle(plan.step)
        batch = self.prepare(plan)
        logits = self.forward(batch) if batch is not None else None
        if batch is not None and logits is not None:
            handle.undrawn = batch, logits
            if not plan.guided:
                self.draw(handle)
        return handle

    @torch.inference_mode()
    def draw(self, handle: StepHandle, masks: Mapping[int, Mask] = NO_MASKS) -> None:
        """The rest of a launched step: tokens, and what they leave in the rows. Does not wait for the device either."""
        if handle.undrawn is None:
            return
        batch, logits = handle.undrawn
        handle.undrawn = None
        handle.samples = self.sample(batch, logits, masks)
        self.apply_tokens(batch, handle.samples.tokens)

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for a launched step and bring its samples to the host."""
        if handle.samples is None:
            return StepResult(handle.step, [], {}, {})
        return handle.samples.to_result(handle.step)

    def clear(self, blocks: int, rows: int = 1) -> None:
        """Make the first blocks and rows as new: a warm-up leaves nothing behind."""
        for pool in self.pools:
            pool[:, :blocks].zero_()
        self.rows.tokens[:rows].zero_()

    @torch.inference_mode()
    def record(
        self, recorder: Recorder, max_tokens: int, done: Callable[[float], None] = lambda fraction: None
    ) -> tuple[list[int], list[int]]:
        """Record steps up to so many tokens, for layers that are all on this rank or its stage; the sizes recorded.

        All tensor-parallel ranks of a stage call it together. Raises what the recorder or the model raises when it
        cannot be recorded; it then runs as before, and nothing that was recorded is kept.
        """
        graphs = StepGraphs(self.layout, self.rows, self._compute, self._vocab_size, recorder)
        graphs.record(decode_sizes(self.max_rows), mixed_sizes(max_tokens), done)
        self._graphs = graphs
        return graphs.sizes

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> Batch | None:
        """Apply the plan's frees, inits and tables, and lay out its work; None when there is none.

        Every rank prepares every plan, in their order.
        """
        if self.courier is not None and plan.orders:
            self._written = self.courier.take(plan.orders, works=bool(plan.work))
        try:
            return self._lay_out(plan)
        except BaseException:
            self._release_written()  # this step writes no layer: nobody may wait for one
            raise

    def _lay_out(self, plan: StepPlan) -> Batch | None:
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
        recorded = self._graphs.prepare(plan.work) if self._graphs is not None else None
        return recorded or gather(plan.work, self.rows, self.layout.block_size)

    @torch.inference_mode()
    def forward(self, batch: Batch, hidden_in: Tensor | None = None) -> Tensor | None:
        """Run this rank's layers. All tensor-parallel ranks of a stage call it together.

        `hidden_in` [1, T, N] comes from the stage before (None on the first stage). The last stage gives the drawing
        rows' logits [R, V] float32, None when there are none; other stages give hidden states [1, T, N].
        """
        try:
            if batch.recorded is not None and self._graphs is not None:
                return self._graphs.run(batch)
            return self._compute(batch, hidden_in, self._written)
        finally:
            self._release_written()

    def _release_written(self) -> None:
        if self._written is not None and self.courier is not None:
            self._written = None
            self.courier.end_step(self.pools)

    def _compute(
        self, batch: Batch, hidden_in: Tensor | None = None, written: Callable[[int, Tensor], None] | None = None
    ) -> Tensor | None:
        """`written` hears of each layer's keys and values; of a replay nobody does before its end."""
        ids = self.rows.gather_tokens(batch.token_rows, batch.positions)
        context = StepContext(self._caches, batch.metas, self._deterministic, hidden_in, written=written)
        with step_context(context):
            return self._model(ids, batch.positions, batch.sample_index)

    @torch.inference_mode()
    def sample(self, batch: Batch, logits: Tensor, masks: Mapping[int, Mask] = NO_MASKS) -> SampleOutput:
        """Draw a token for each drawing row: on one rank of the last stage. Overwrites `logits`."""
        return self.sampler.sample(logits, batch.sample_rows, batch.sample_positions, self.rows.tokens, masks)

    @torch.inference_mode()
    def apply_tokens(self, batch: Batch, tokens: Tensor) -> None:
        """Write a batch's drawn tokens [R] int64 into the rows: on the ranks of the first and last stages at least.

        Must come before the `forward` of a later batch that computes these tokens, and before its row is handed over.
        """
        self.rows.store_tokens(batch.drawn_rows, batch.drawn_positions, tokens)
