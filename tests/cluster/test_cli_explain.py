"""What `headrace explain` prints of an account that a router sent."""

from typing import Any

import pytest

from headrace_cluster.cli import status as explain
from headrace_cluster.errors import ServerError

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
    "ahead": 0,
    "ahead_tokens": 0,
    "causes": [{"cause": "decode", "words": "decoding", "seconds": 1.5}],
    "decisions": [
        {
            "replica_id": "m-0",
            "candidates": 2,
            "tokens": 10,
            "prediction": None,
            "source_id": "",
            "source_computes": False,
            "considered": [],
        }
    ],
}


def _printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], document: Any) -> str:
    class Client:
        def __init__(self, choice: object) -> None: ...

        def call(self, *args: object, **options: object) -> Any:
            return document

    monkeypatch.setattr(explain, "AdminClient", Client)
    choice: Any = None
    explain.explain_request(choice, "id-1", as_json=False)
    return capsys.readouterr().out


def test_an_account_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _printed(monkeypatch, capsys, DOCUMENT).splitlines()
    assert lines[0].startswith("id-1: 2.000 s, complete; first token after 0.500 s")
    assert lines[1].split() == ["1.500", "s", "75.0%", "decoding"] and lines[2] == "placed on m-0, of 2 candidates"


def test_what_a_router_sends_does_not_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forged = DOCUMENT | {"causes": [{"cause": "x", "words": "\x1b]0;title\x07\x1b[2J\nready", "seconds": 1.0}]}
    printed = _printed(monkeypatch, capsys, forged)
    assert not [character for character in printed if not character.isprintable() and character != "\n"]
    assert "]0;title" in printed and len(printed.splitlines()) == 3


@pytest.mark.parametrize("change", [{"causes": None}, {"seconds": "x"}, {"seconds": 0.0}, {"decisions": [{}]}])
def test_an_account_of_another_form_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    with pytest.raises(ServerError, match="--json"):
        _printed(monkeypatch, capsys, DOCUMENT | change)
    assert not capsys.readouterr().out
