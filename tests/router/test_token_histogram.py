"""The histogram of every token has the lines of prometheus_client's own."""

from prometheus_client import CollectorRegistry, Histogram

from headrace_router.dispatch.replica_metrics import render
from headrace_router.dispatch.router_metrics import TokenHistogram

BOUNDS = (0.01, 0.1, 1, 2.5)
VALUES = (0.0, 0.01, 0.010001, 0.5, 1.0, 2.5, 99.0)


def test_it_equals_the_histogram_of_the_library() -> None:
    registry = CollectorRegistry()
    theirs = Histogram("seconds", "Between tokens", ("model", "replica"), buckets=BOUNDS, registry=registry)
    ours = TokenHistogram("seconds", "Between tokens", ("model", "replica"), BOUNDS)
    for replica in ("a", 'b"\n'):
        for value in VALUES:
            theirs.labels("m", replica).observe(value)
            ours.labels("m", replica).observe(value)
    assert ours.labels("m", "a") is ours.labels("m", "a")
    expected = [line for line in render(registry.collect()).decode().splitlines() if "_created" not in line]
    lines = render(ours.collect()).decode().splitlines()
    assert sorted(lines) == sorted(expected)
