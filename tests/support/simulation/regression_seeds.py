"""Seeds of regression tests: each finds a former bug, verified by reintroducing it. They always run.

A change of the simulation's random draws changes their schedules: find new seeds then.
"""

REGRESSION_SEEDS: dict[int, str] = {
    19: "the suspect mark of another replica's prompt was not cleared, and the next step ended the loop",
    611: "a request that was cancelled between the end of its fetch and its queueing was queued, and never removed",
    644: "as 611: the request was queued twice, and the count became negative",
    647: "a grant was held although its target had ended the fetch with the previous stream",
    1095: "a token that was sampled after a failed step was emitted",
    1112: "as 611",
}

CONTROL_REGRESSION_SEEDS: dict[int, str] = {
    919075: "a controller without reports that was cut off judged one replica lost after the other one was built again",
}
