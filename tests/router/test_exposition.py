"""The text of a scrape: as the Prometheus library renders it, without holding the event loop."""

import asyncio
import sys
import time

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headrace_router.dispatch.exposition import SAMPLES_PER_TURN, render
from headrace_router.dispatch.router_metrics import RouterMetrics

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


@pytest.mark.measure
def test_a_scrape_does_not_hold_the_event_loop() -> None:
    """A thousand replicas have 100,000 lines: for a second no token was sent."""
    metrics = RouterMetrics()
    for number in range(400):
        for latency in (metrics.first_token, metrics.inter_token, metrics.end_to_end):
            latency.labels("m", f"r{number}").observe(0.1)
    stalls: list[float] = []

    async def watch() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            stalls.append(now - last)
            last = now

    async def scenario() -> float:
        watcher = asyncio.create_task(watch())
        began = time.perf_counter()
        text = await metrics.text()
        seconds = time.perf_counter() - began
        watcher.cancel()
        assert text.count(b"\n") > 20_000
        return seconds

    seconds = asyncio.run(scenario())
    stalls.sort()
    assert len(stalls) > 100 and sum(stalls[-5:]) < seconds / 2, (seconds, stalls[-5:])
    assert stalls[-len(stalls) // 100] < 3 * sys.getswitchinterval()
