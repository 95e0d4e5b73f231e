"""The text of a scrape, rendered in a thread that leaves the interpreter to the event loop again and again."""

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

SAMPLES_PER_TURN = 50  # lines without a pause: about half a millisecond
CREATED = "_created"


def render(metrics: Iterable[Metric]) -> bytes:
    """As `generate_latest`: the exposition format, version 0.0.4."""
    with _no_garbage_collection():
        return b"".join(_parts(metrics))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Samples outlive the young generations: a full collection would hold all threads for a tenth of a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _parts(metrics: Iterable[Metric]) -> Iterator[bytes]:
    for metric in metrics:
        created = [sample for sample in metric.samples if sample.name == metric.name + CREATED]
        others = [sample for sample in metric.samples if sample.name != metric.name + CREATED]
        yield from _lines(metric.name, metric.documentation, metric.type, others)
        if created:
            yield from _lines(metric.name + CREATED, metric.documentation, "gauge", created)


def _lines(name: str, text: str, kind: str, samples: list[Sample]) -> Iterator[bytes]:
    """The head and the lines of a metric."""
    for start in range(0, max(1, len(samples)), SAMPLES_PER_TURN):
        part = Metric(name, text, kind)
        part.samples = samples[start : start + SAMPLES_PER_TURN]
        lines = generate_latest(_Single(part))
        yield lines if start == 0 else lines.split(b"\n", 2)[2]
        time.sleep(0)  # a thread that needs the interpreter gets it now, not after the switch interval of 5 ms


class _Single(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]
