"""The interface between scheduler and runner: one `StepPlan` per step, and its `StepResult`.

The scheduler uses integers; the runner owns tensors. A plan is plain data (msgpack-encodable: rank 0 broadcasts it to
the other ranks), and the scheduler may build the next plan before this step's tokens are known: a work item only states
which positions of a row are computed, and the runner keeps the row's tokens, sampled ones included.
"""

from typing import Annotated

from msgspec import Meta, Struct

from headrace_worker.core.transfer.orders import Order


class RowSampling(Struct, frozen=True):
    """Sampling options of one row, named as in the contract's `Sampling`; a disabled option has its neutral value.

    `examples`: values for which warm-up runs the option, so that a GPU compiles its kernels.
    """

    temperature: float = 1.0  # 0 = greedy
    top_p: Annotated[float, Meta(examples=[0.9])] = 1.0
    top_k: Annotated[int, Meta(examples=[20])] = 0
    min_p: Annotated[float, Meta(examples=[0.05])] = 0.0
    repetition_penalty: Annotated[float, Meta(examples=[1.1])] = 1.0
    presence_penalty: Annotated[float, Meta(examples=[0.5])] = 0.0
    frequency_penalty: Annotated[float, Meta(examples=[0.5])] = 0.0
    seed: int = 0  # u64
    choice_index: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids included (unless ignored): excluded before min_tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # None = none; n = the chosen token's and the n best
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, before the first output
    bad_words: Annotated[tuple[tuple[int, ...], ...], Meta(examples=[((0,), (0, 1))])] = ()  # not in the output
    allowed_token_ids: Annotated[tuple[int, ...], Meta(examples=[(0,)])] = ()  # empty = all


class RowInit(Struct, frozen=True):
    """A row is assigned to a request: all state of the row is reset to this."""

    row: int
    row_use: int  # number of this use of the row
    token_ids: list[int]  # all tokens known so far: prompt, then outputs of earlier attempts or before preemption
    prompt_len: int
    sampling: RowSampling


class TableUpdate(Struct, frozen=True):
    """Block ids written into a row's block table of one cache group, from entry `first` on."""

    group: int
    row: int
    first: int
    block_ids: list[int]


class Work(Struct, frozen=True, gc=False):
    """Compute positions [start, start + count) of a row; with `sample`, sample the token at position start + count.

    The sampled token is stored in the row at that position on the device at once, before the host reads it. The
    known tokens at positions start + 1 to start + scored get log-probabilities. Recurrent layers compute the positions
    in pieces, one after another: the first one reads slot state_read, each one writes a slot.
    """

    row: int
    start: int
    count: int
    sample: bool
    scored: int = 0
    state_read: int = 0
    state_writes: tuple[tuple[int, int], ...] = ()  # end position and written slot of each piece


class StepPlan(Struct, frozen=True):
    """One step. Applied in this order: orders to transfer workers, frees, inits, tables, work."""

    step: int
    frees: list[int]
    inits: list[RowInit]
    tables: list[TableUpdate]
    work: list[Work]  # at most one item per row
    orders: list[Order] = []
    guided: bool = False  # some sampled rows are constrained: sampling waits for their masks
    scores: bool = False  # some work has `scored`


class SampledLogprobs(Struct, frozen=True):
    """Natural-log probabilities of the raw model output, before penalties, temperature and filters."""

    logprob: float
    top_ids: list[int]  # best first
    top_logprobs: list[float]


class StepResult(Struct, frozen=True):
    """Samples of a step, in the order of the plan's work items that had `sample` set."""

    step: int
    tokens: list[int]
    logprobs: dict[int, SampledLogprobs]  # by index into tokens, for rows that request them
    failed: dict[int, str]  # by index into tokens: why sampling failed for the row; its token is meaningless
    not_finite: list[int] = []  # indexes of the failed rows whose raw logits were not finite
    prompt_logprobs: list[SampledLogprobs] = []  # one entry per scored position of the work, in order
