"""What `headrace explain` prints of the account of a request."""

from typing import Any

import pytest
from typer.testing import CliRunner

from headrace_cluster.cli import status

DOCUMENT: dict[str, Any] = {
    "request": "id-1",
    "seconds": 2.0,
    "first_token": 0.5,
    "running": False,
    "disconnected": False,
    "failed": False,
    "prompt_tokens": 10,
    "cached_tokens": 0,
    "output_tokens": 5,
    "preemptions": 0,
    "ahead": 1,
    "ahead_tokens": 7,
    "snapshot_tokens": 4,
    "covered_tokens": 8,
    "cache_miss": {"reason": "evicted", "words": "evicted 4 s ago", "tokens": 2},
    "causes": [
        {"cause": "queue", "words": "waiting", "seconds": 1.5},
        {"cause": "rest", "words": "rest", "seconds": 0.0001},
    ],
    "decisions": [
        {
            "replica_id": "m-0",
            "candidates": 2,
            "tokens": 10,
            "prediction": {"first_token": 0.4, "answer": 1.0, "delay": 0.1},
            "source_id": "m-1",
            "source_computes": False,
            "considered": [{"replica_id": "m-0", "cost": 1.5, "cached_tokens": 8}],
        }
    ],
}


def test_an_account_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def __init__(self, choice: object) -> None: ...

        def call(self, *args: object) -> Any:
            return DOCUMENT

    monkeypatch.setattr(status, "AdminClient", Client)
    lines = CliRunner().invoke(status.app, ["explain", "id-1"]).stdout.splitlines()
    assert lines[0].startswith("id-1: 2.000 s, complete; first token after 0.500 s")
    assert lines.pop(1) == (
        "started from a snapshot of recurrent state after 4 tokens; keys and values of 8 were cached"
    )
    assert lines.pop(1) == "not cached further: evicted 4 s ago (2 tokens)"
    assert lines[1] == "    1.500 s  75.0%  waiting (behind 1 request, 7 tokens of their prompts)"
    assert lines[2:] == [
        "placed on m-0, of 2 candidates: predicted 0.400 s until the first token, 1.000 s of answer, others delayed by "
        "0.100 s",
        "  m-1 sends cached blocks of its prompt",
        "  m-0: 1.500 s, 8 of 10 tokens cached",
    ]
