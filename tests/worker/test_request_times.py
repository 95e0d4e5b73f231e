"""Where the time of an attempt went: the part of the prompt and that of the answer are apart, as in the frames."""

from headrace_proto import replica_pb2 as pb
from headrace_worker.core.request import Output
from headrace_worker.core.request_times import AttemptTimes, RequestTimes, StepTotals
from headrace_worker.server.convert import fill_delta, merge_output


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
