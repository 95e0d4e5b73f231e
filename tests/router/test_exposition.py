"""The text of a scrape: as the Prometheus library renders it."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from headrace_router.dispatch.replica_metrics import SAMPLES_PER_TURN, render

SERIES = 2 * SAMPLES_PER_TURN + 1


def test_it_is_the_text_of_the_library() -> None:
    registry = CollectorRegistry()
    Gauge("empty", "None yet", ("name",), registry=registry)
    gauge = Gauge("some:gauge", 'With "quotes", a \\ and\na new line', ("name",), registry=registry)
    counter = Counter("requests", "All", ("name",), registry=registry)
    histogram = Histogram("seconds", "Time", ("name",), registry=registry)
    for number in range(SERIES):
        gauge.labels(f'x"{number}\n').set(number / 3)
        counter.labels(str(number)).inc(number)
        histogram.labels(str(number)).observe(number)
    assert render(registry.collect()) == generate_latest(registry)
    expected = openmetrics.generate_latest(registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
    assert render(registry.collect(), as_openmetrics=True) == expected and b"\nsome:gauge{" in expected
