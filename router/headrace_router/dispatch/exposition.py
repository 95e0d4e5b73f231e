"""The page of a scrape, rendered in a thread that leaves the interpreter to the event loop again and again."""

import gc
import gzip
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import gzip_accepted
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

SAMPLES_PER_TURN = 50  # lines without a pause: about half a millisecond
CREATED = "_created"
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OPENMETRICS_END = b"# EOF\n"
GZIP_LEVEL = 4

Encoder = Callable[[Collector], bytes]


def page(metrics: Iterable[Metric], accept: str, accept_encoding: str) -> tuple[bytes, dict[str, str]]:
    """What a client with these headers gets, OpenMetrics or text, compressed or not; and the headers of the answer."""
    kinds = {part.split(";")[0].strip().lower() for part in accept.split(",")}
    as_openmetrics = OPENMETRICS_TYPE.split(";")[0] in kinds
    content = render(metrics, as_openmetrics=as_openmetrics)
    headers = {"content-type": OPENMETRICS_TYPE if as_openmetrics else TEXT_TYPE, "vary": "Accept, Accept-Encoding"}
    if not gzip_accepted(accept_encoding):
        return content, headers
    return gzip.compress(content, GZIP_LEVEL), headers | {"content-encoding": "gzip"}


def render(metrics: Iterable[Metric], *, as_openmetrics: bool = False) -> bytes:
    """As `generate_latest` of the library: the text format, version 0.0.4, or OpenMetrics."""
    with _no_garbage_collection():
        if not as_openmetrics:
            return b"".join(_parts(metrics))
        parts = (_lines(metric.name, metric.documentation, metric.type, metric.samples, _encode) for metric in metrics)
        return b"".join(chain.from_iterable(parts)) + OPENMETRICS_END


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
        yield from _lines(metric.name, metric.documentation, metric.type, others, generate_latest)
        if created:
            yield from _lines(metric.name + CREATED, metric.documentation, "gauge", created, generate_latest)


def _encode(metric: Collector) -> bytes:
    # The library's escapes replace the colon in the names of samples, and not in those of their metrics.
    encoded: bytes = openmetrics.generate_latest(metric, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
    return encoded.removesuffix(OPENMETRICS_END)


def _lines(name: str, text: str, kind: str, samples: list[Sample], encode: Encoder) -> Iterator[bytes]:
    """The head and the lines of a metric."""
    for start in range(0, max(1, len(samples)), SAMPLES_PER_TURN):
        part = Metric(name, text, kind)
        part.samples = samples[start : start + SAMPLES_PER_TURN]
        lines = encode(_Single(part))
        yield lines if start == 0 else lines.split(b"\n", 2)[2]
        time.sleep(0)  # a thread that needs the interpreter gets it now, not after the switch interval of 5 ms


class _Single(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]
