"""Real engines: values that are not finite on one replica never reach a client, whose answer is the same."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import Tensor

from headrace_worker.runner.batch import Batch
from headrace_worker.runner.runner import Runner
from support.integration.in_process_cluster import InProcessCluster

PROMPTS = [[number + 7, *range(20, 60), number] for number in range(8)]


class Defects:
    """Makes the logits of some replicas not finite, from so many steps on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.runners: list[Runner] = []
        self.steps: dict[int, int] = {}  # by place of the replica: left until it is defective
        make, forward = Runner.__init__, Runner.forward

        def recorded(runner: Runner, *arguments: Any, **options: Any) -> None:
            make(runner, *arguments, **options)
            self.runners.append(runner)

        def broken(runner: Runner, batch: Batch, hidden_in: Tensor | None = None) -> Tensor | None:
            out = forward(runner, batch, hidden_in)
            place = self.runners.index(runner)
            if place in self.steps and out is not None:
                self.steps[place] -= 1
                if self.steps[place] < 0:
                    out[:, 1] = float("nan")
            return out

        patch.setattr(Runner, "__init__", recorded)
        patch.setattr(Runner, "forward", broken)


def _texts(cluster: InProcessCluster) -> list[Any]:
    def ask(number: int) -> Any:
        answer = cluster.complete(PROMPTS[number], max_tokens=30, temperature=0.8 * (number % 2), seed=number)
        return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else answer.text

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, range(len(PROMPTS))))


def _not_finite(cluster: InProcessCluster) -> list[bool]:
    """Whether attempts ended at each replica, as /metrics shows."""
    with cluster.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return [float(line.split()[-1]) > 0 for line in sorted(lines) if line.startswith("headrace_not_finite_total")]


def test_answers_are_the_same(cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    defects = Defects(monkeypatch)
    cluster.add_replica()
    cluster.add_replica()
    cluster.open(policy="round-robin")  # both get prompts, whatever their speeds
    expected = _texts(cluster)
    defects.steps[0] = 10
    assert _texts(cluster) == expected
    cluster.eventually(lambda: _not_finite(cluster) == [True, False])  # reports come after answers
    defects.steps.clear()
    assert _texts(cluster) == expected, "and nothing remains in its cache"


def test_what_no_replica_computes_is_an_error(cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    defects = Defects(monkeypatch)
    cluster.add_replica()
    cluster.add_replica()
    cluster.open()
    defects.steps.update({0: 0, 1: 0})
    answer = cluster.complete(PROMPTS[0])
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "generation_failed"
    assert "not finite" in answer.json()["error"]["message"]
