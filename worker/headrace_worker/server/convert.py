"""Conversion between protobuf messages and the engine's objects."""

from collections.abc import Callable, Sequence

from headrace_base.errors import counted
from headrace_proto import replica_pb2 as pb
from headrace_worker.core.engine import LoadSnapshot
from headrace_worker.core.guide import GUIDE_FAILED, NOTHING_ALLOWED, TokenGuide
from headrace_worker.core.kv.manager import PrefixChain
from headrace_worker.core.latency import StepCost
from headrace_worker.core.load_reports import Arrivals
from headrace_worker.core.plan import RowSampling, SampledLogprobs
from headrace_worker.core.request import Finish, Output, Request
from headrace_worker.core.request_times import AttemptTimes
from headrace_worker.core.transfer.fetching import SourceSpeed

_FINISH = {
    Finish.STOP: pb.FINISH_STOP,
    Finish.COMPLETE: pb.FINISH_COMPLETE,
    Finish.LENGTH: pb.FINISH_LENGTH,
    Finish.CANCELLED: pb.FINISH_CANCELLED,
    Finish.DEADLINE: pb.FINISH_DEADLINE,
    Finish.ERROR: pb.FINISH_ERROR,
    Finish.NOT_FINITE: pb.FINISH_ERROR,
    Finish.REFUSED: pb.FINISH_REFUSED,
}


_MAX_UINT32 = 2**32 - 1
_LARGEST = 1e9  # largest number in an option: far beyond any range; its product with a logit is finite in float32
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_CONVERTED = {
    "top_p",
    "top_k",
    "repetition_penalty",
    "stop_token_ids",
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
    "bad_words",
    "allowed_token_ids",
}
_COPIED = tuple(name for name in RowSampling.__struct_fields__ if name not in _CONVERTED)


class InvalidSubmitError(Exception):
    """A Submit that this replica cannot accept; the sentence is for the client."""


def to_request(
    submit: pb.Submit,
    *,
    now: float,
    max_model_len: int,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    start_chain: Callable[[bytes, str], PrefixChain],
    guide: TokenGuide | None = None,
) -> Request:
    """Checks a Submit and converts it to the engine's request. Raises InvalidSubmitError.

    The router has validated it already; a replica still trusts no lengths or ids, because they index memory here.
    """
    count, options = len(submit.prompt_token_ids) + len(submit.output_token_ids), submit.sampling
    if len(submit.attempt_id) != 16:
        raise InvalidSubmitError("an attempt id has 16 bytes")
    if not submit.prompt_token_ids:
        raise InvalidSubmitError("the prompt is empty")
    if count >= max_model_len:
        raise InvalidSubmitError(
            f"the prompt has {counted(count, 'token')}, but the context is {max_model_len}, with at least one to "
            "generate"
        )
    prompt = list(submit.prompt_token_ids)
    tokens = prompt + list(submit.output_token_ids)
    stop_ids = set(options.stop_token_ids) | (set() if options.ignore_eos else set(eos_token_ids))
    lists = (tokens, stop_ids, options.logit_bias, options.allowed_token_ids, *(one.ids for one in options.bad_words))
    largest = max(max(ids, default=0) for ids in lists)
    if largest >= vocab_size:
        raise InvalidSubmitError(f"token id {largest} is outside the vocabulary of {vocab_size}")
    _check_numbers(options)
    max_tokens = options.max_tokens or max_model_len
    if max_tokens <= len(submit.output_token_ids):
        raise InvalidSubmitError("max_tokens leaves nothing to generate")
    return Request(
        attempt_id=submit.attempt_id,
        tokens=tokens,
        prompt_len=len(prompt),
        max_len=min(len(prompt) + max_tokens, max_model_len),
        sampling=to_sampling(options, tuple(sorted(stop_ids)), vocab_size),
        stop_ids=frozenset(stop_ids),
        chain=start_chain(submit.tenant_salt, submit.adapter),
        arrival=now,
        priority=submit.priority,
        deadline=now + submit.deadline_ms / 1000 if submit.deadline_ms else None,
        label=submit.request_label,
        tenant_salt=submit.tenant_salt,
        adapter=submit.adapter,
        expected_cached=min(submit.expected_cached_tokens, len(prompt)),
        source=submit.source.address,
        cached_only=submit.source.cached_only,
        guide=guide,
    )


def _check_numbers(options: pb.Sampling) -> None:
    """Raises InvalidSubmitError."""
    numbers = [getattr(options, name) for name in _NUMBERS] + list(options.logit_bias.values())
    if not all(abs(number) <= _LARGEST for number in numbers):  # nor is NaN
        raise InvalidSubmitError("an option of sampling is no finite number")
    if min(options.temperature, options.min_p, options.repetition_penalty) < 0:
        raise InvalidSubmitError("temperature, min_p and repetition_penalty are not negative")


def to_sampling(options: pb.Sampling, stop_ids: tuple[int, ...], vocab_size: int) -> RowSampling:
    """Sampling options for the sampler; a filter that has no effect becomes its neutral value."""
    return RowSampling(
        **{name: getattr(options, name) for name in _COPIED},
        top_p=options.top_p if 0 < options.top_p < 1 else 1.0,
        top_k=options.top_k if options.top_k < vocab_size else 0,
        repetition_penalty=options.repetition_penalty or 1.0,
        stop_token_ids=stop_ids,
        logit_bias=tuple(sorted(options.logit_bias.items())),
        logprobs=options.logprobs if options.HasField("logprobs") else None,
        prompt_logprobs=options.prompt_logprobs if options.HasField("prompt_logprobs") else None,
        bad_words=tuple(tuple(word.ids) for word in options.bad_words if word.ids),
        allowed_token_ids=tuple(options.allowed_token_ids),
    )


def fill_delta(delta: pb.Delta, output: Output) -> None:
    """Fills an empty delta with one engine output; `merge_output` adds later ones of the same attempt."""
    delta.attempt_id = output.attempt_id
    delta.first_index = output.first_index
    delta.token_ids.extend(output.token_ids)
    # Fields that most outputs lack must cost nothing: there is one output per token.
    if output.logprobs:
        delta.logprobs.extend(to_logprobs(entry) for entry in output.logprobs)
    if output.finish is not None:
        _fill_end(delta, output.finish, output.error)
    if output.preemptions:
        delta.preemptions = output.preemptions
    if output.cached_tokens is not None:
        delta.cached_tokens = output.cached_tokens
    if output.prompt_logprobs:
        delta.prompt_logprobs.extend(to_logprobs(entry) for entry in output.prompt_logprobs)
    if output.queue_seconds is not None:
        delta.queue_us = min(max(0, int(output.queue_seconds * 1e6)), _MAX_UINT32)
    if output.times is not None:
        _add_times(delta, output.times)


def merge_output(delta: pb.Delta, output: Output) -> None:
    """Adds an attempt's next output to a delta that was not sent yet."""
    delta.token_ids.extend(output.token_ids)
    delta.logprobs.extend(to_logprobs(entry) for entry in output.logprobs)
    delta.preemptions = output.preemptions
    if output.finish is not None:
        _fill_end(delta, output.finish, output.error)
    if output.times is not None:
        _add_times(delta, output.times)


def _add_times(delta: pb.Delta, times: AttemptTimes) -> None:
    """The times until the first token and those until the end are in different fields; a delta may have both."""
    delta.times.MergeFrom(
        pb.AttemptTimes(
            fetch_us=_us(times.fetch),
            compute_us=_us(times.compute),
            own_tokens=times.own_tokens,
            beside_tokens=times.beside_tokens,
            ahead=times.ahead,
            ahead_tokens=times.ahead_tokens,
            snapshot_tokens=times.snapshot_tokens,
            covered_tokens=times.covered_tokens,
            prompt_preempted_us=_us(times.prompt_preempted),
            decode_us=_us(times.decode),
            prompts_us=_us(times.prompts),
            sequences_us=_us(times.sequences),
            preempted_us=_us(times.preempted),
        )
    )


def _us(seconds: float) -> int:
    return max(0, int(seconds * 1e6))


def _fill_end(delta: pb.Delta, finish: Finish, error: str) -> None:
    failed = finish is Finish.ERROR and error in (GUIDE_FAILED, NOTHING_ALLOWED)
    delta.finish = pb.FINISH_INVALID if failed else _FINISH[finish]
    delta.error = error
    delta.not_finite = finish is Finish.NOT_FINITE


def to_logprobs(entry: SampledLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(logprob=entry.logprob, top_ids=entry.top_ids, top_logprobs=entry.top_logprobs)


def tokens_to_compute(submit: pb.Submit) -> int:
    """By the router's estimate of what the cache has: of a prompt that comes from another replica, none."""
    if submit.HasField("source"):
        return 0
    tokens = len(submit.prompt_token_ids) + len(submit.output_token_ids)
    return max(0, tokens - submit.expected_cached_tokens)


def to_step_model(cost: StepCost) -> pb.StepModel:
    return pb.StepModel(
        base_ms=cost.base * 1e3,
        per_prefill_token_ms=cost.per_prefill_token * 1e3,
        per_decode_sequence_ms=cost.per_decode_sequence * 1e3,
        per_kv_token_ms=cost.per_kv_token * 1e3,
        error_ms=cost.error * 1e3,
    )


def to_source_speeds(speeds: Sequence[SourceSpeed], block_size: int) -> list[pb.SourceSpeed]:
    return [
        pb.SourceSpeed(
            address=speed.address,
            per_token_ms=speed.block_seconds / block_size * 1e3,
            bytes_per_second=speed.bytes_per_second,
        )
        for speed in speeds
    ]


def to_load(
    load: LoadSnapshot, step: int, draining: bool, idle_steps: int = 0, arrivals: Arrivals | None = None
) -> pb.Load:
    """The load part of a frame. arrivals: since the step."""
    counters = load.counters
    count, tokens = (len(arrivals), arrivals.tokens) if arrivals is not None else (0, 0)
    return pb.Load(
        running=load.running,
        waiting=load.waiting + count,
        kv_usage=load.kv_usage,
        free_blocks=load.available_blocks,
        waiting_tokens=load.missing_tokens + tokens,
        predicted_step_ms=load.predicted_step * 1e3,
        step_model=to_step_model(load.cost),
        draining=draining,
        counters=pb.Counters(
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_cache_queries=counters.prefix_queries,
            prefix_cache_hits=counters.prefix_hits,
            preemptions=counters.preemptions,
            not_finite=counters.not_finite,
            steps=step,
            fetches=load.fetches.started,
            fetches_failed=load.fetches.failed,
            fetched_bytes=load.fetches.num_bytes,
            fetch_seconds=load.fetches.seconds,
            blocks_stored=load.offload.stored,
            blocks_loaded=load.offload.loaded,
            load_seconds=load.offload.load_seconds,
            blocks_saved=load.offload.saved,
            blocks_filled=load.offload.filled,
            grants=load.grants,
            idle_steps=idle_steps,
        ),
        load_token_ms=load.load_token * 1e3,
        sources=to_source_speeds(load.source_speeds, load.block_size),
    )
