"""Sampling options on their way from the contract to the sampler: none is left out."""

from headrace_proto import replica_pb2 as pb
from headrace_worker.core.plan import RowSampling
from headrace_worker.server.convert import to_sampling

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
    options = pb.Sampling(**sent, logit_bias={9: -1.5, 4: 2.0})  # type: ignore[arg-type]
    assert to_sampling(options, (5, 6), 100) == RowSampling(
        **sent,  # type: ignore[arg-type]
        stop_token_ids=(5, 6),
        logit_bias=((4, 2.0), (9, -1.5)),
    )
