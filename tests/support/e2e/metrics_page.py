"""Reads /metrics with the Prometheus parser."""

from collections.abc import Iterator

import httpx
from prometheus_client.parser import text_string_to_metric_families


class Metrics:
    """One scrape; values are summed over labels that are not given."""

    def __init__(self, url: str) -> None:
        answer = httpx.get(f"{url}/metrics", trust_env=False, timeout=20)
        answer.raise_for_status()
        self.text = answer.text
        self._families = list(text_string_to_metric_families(answer.text))

    def __getitem__(self, name: str) -> float:
        return self.value(name)

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples with that name and those labels; fails if there is none."""
        found = [value for given, value in self._samples(name) if labels.items() <= given.items()]
        assert found, f"no sample {name} {labels}"
        return sum(found)

    def count(self, name: str) -> float:
        """The sum of a counter with labels: 0 before the first event; fails if there is no such counter."""
        assert any(family.name == name.removesuffix("_total") for family in self._families), f"no counter {name}"
        return sum(value for _, value in self._samples(name))

    def names(self) -> set[str]:
        return {sample.name for family in self._families for sample in family.samples}

    def labels(self, name: str) -> set[str]:
        """Names of the labels of its samples."""
        return {label for given, _ in self._samples(name) for label in given}

    @property
    def busy(self) -> dict[str, float]:
        """The values that are not zero although they must be zero without requests."""
        idle = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "headrace_requests_in_flight",
            "headrace_requests_queued",
            "headrace_attempts_in_flight",
            "headrace_waiting_tokens",
        )
        found = {name: self[name] for name in idle if self[name]}
        missing = self["headrace_kv_blocks"] - self["headrace_kv_blocks_free"]
        return found | ({"blocks missing": missing} if missing else {})

    def _samples(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        for family in self._families:
            for sample in family.samples:
                if sample.name == name:
                    yield sample.labels, sample.value
