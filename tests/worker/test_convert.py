"""Sampling options and times of attempts between the contract and the engine: none is left out or mixed up."""

from headrace_proto import replica_pb2 as pb
from headrace_worker.core.plan import RowSampling
from headrace_worker.core.request import Output
from headrace_worker.core.request_times import AttemptTimes, RequestTimes, StepTotals
from headrace_worker.server.convert import fill_delta, merge_output, to_sampling

LIMITS = {"max_tokens", "ignore_eos"}  # of the request, not of its rows


def test_each_field_of_the_contract_is_an_option_of_rows() -> None:
    assert set(pb.Sampling.DESCRIPTOR.fields_by_name) == set(RowSampling.__struct_fields__) | LIMITS


def test_each_option_arrives() -> None:
    sent = {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 7,
        "min_p": 0.03,
        "repetition_penalty": 1.3,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "seed": 2**64 - 1,
        "choice_index": 2,
        "min_tokens": 3,
        "logprobs": 0,
    }
    words = [pb.TokenSequence(ids=[7]), pb.TokenSequence(ids=[8, 9])]
    options = pb.Sampling(**sent, logit_bias={9: -1.5, 4: 2.0}, allowed_token_ids=[3, 1], bad_words=words)  # type: ignore[arg-type]
    assert to_sampling(options, (5, 6), 100) == RowSampling(
        **sent,  # type: ignore[arg-type]
        stop_token_ids=(5, 6),
        logit_bias=((4, 2.0), (9, -1.5)),
        allowed_token_ids=(3, 1),
        bad_words=((7,), (8, 9)),
    )


def test_a_preemption_belongs_to_the_part_in_which_it_ends() -> None:
    times, totals = RequestTimes(), StepTotals()
    times.accepted(2, totals)
    times.started(8, totals)
    times.preempted_at = 1.0
    times.resumed(9.0)
    prompt = times.first_token(9.0, 0.0, totals)
    assert (prompt.compute, prompt.prompt_preempted, prompt.preempted, prompt.ahead) == (9.0, 8.0, 0.0, 2)
    times.preempted_at = 10.0
    times.resumed(13.0)
    answer = times.end(14.0, totals)
    assert (answer.decode, answer.prompt_preempted, answer.preempted) == (5.0, 0.0, 3.0)


def test_the_parts_stay_apart_in_one_delta() -> None:
    delta = pb.Delta()
    fill_delta(delta, Output(b"a", 0, [5], times=AttemptTimes(compute=9.0, prompt_preempted=8.0)))
    merge_output(delta, Output(b"a", 1, [6], times=AttemptTimes(decode=5.0, preempted=3.0)))
    times = delta.times
    assert (times.compute_us, times.prompt_preempted_us) == (9_000_000, 8_000_000)
    assert (times.decode_us, times.preempted_us) == (5_000_000, 3_000_000)
