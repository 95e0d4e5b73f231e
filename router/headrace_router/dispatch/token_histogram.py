"""A histogram that is observed for each token, where prometheus_client's would take a twentieth of the token's time."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenSeries:
    """Of one set of labels. One thread observes; another one may read."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one: above all bounds
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class TokenHistogram(Collector):
    """As prometheus_client's Histogram: `labels` returns what is observed."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        """bounds: of the buckets, ascending, in the unit of the observations."""
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = bounds
        self._series: dict[tuple[str, ...], TokenSeries] = {}

    def labels(self, *values: str) -> TokenSeries:
        series = self._series.get(values)
        if series is None:
            series = self._series.setdefault(values, TokenSeries(self._bounds))  # another thread may have made it
        return series

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for values, series in list(self._series.items()):
            counts = [float(count) for count in accumulate(list(series.counts))]
            family.add_metric(values, list(zip(bounds, counts, strict=True)), series.total)
        yield family
