"""`headrace role`, `drain`, `undrain` as processes against a scripted controller."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_admin import ScriptedAdmin

Answers = dict[str, list[tuple[int, dict[str, Any]]]]


@pytest.fixture
def scripted() -> Iterator[Callable[[Answers], ScriptedAdmin]]:
    made: list[ScriptedAdmin] = []

    def make(answers: Answers) -> ScriptedAdmin:
        made.append(ScriptedAdmin(answers))
        return made[-1]

    yield make
    for admin in made:
        admin.close()


def _run(admin: ScriptedAdmin, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "headrace_cluster", *arguments, "--admin-port", str(admin.port)]
    environ = os.environ | {"HEADRACE_ADMIN_KEY": "the-key"}
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env=environ, check=False)


def _status(state: str, generation: int = 1, running: int = 0, note: str = "") -> tuple[int, dict[str, Any]]:
    load = {"running": running, "waiting": 0, "kv_usage": 0.0}
    entry = {"id": "m-1", "state": state, "generation": generation, "load": load, "note": note}
    return 200, {"replicas": [{"id": "m-0", "state": "ready"}, entry], "routers": []}


def _refusal(sentence: str) -> tuple[int, dict[str, Any]]:
    return 409, {"error": {"message": sentence}}


def test_role(scripted: Callable[[Answers], ScriptedAdmin]) -> None:
    document = {"id": "m-1", "generation": 1, "role": "decode", "before": "both", "seconds": 0.0123}
    admin = scripted({"/role": [(200, document)]})
    done = _run(admin, "role", "m-1", "decode")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "headrace: m-1: decode, it was both (12 ms)\n"
    assert admin.asked == [("/role", {"replica": "m-1", "role": "decode"})]
    assert json.loads(_run(admin, "role", "m-1", "decode", "--json").stdout) == document


def test_drain_tells_how_far_it_is(scripted: Callable[[Answers], ScriptedAdmin]) -> None:
    order = (200, {"id": "m-1", "generation": 1, "seconds": 3.5})
    states = [_status("ready", running=2), _status("draining", running=2), _status("draining", running=1)]
    admin = scripted({"/drain": [order], "/status": [*states, _status("drained")]})
    done = _run(admin, "drain", "m-1", "--seconds", "3.5")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [
        "headrace: m-1: ready, 2 running, 0 waiting",
        "headrace: m-1: draining, 2 running, 0 waiting",
        "headrace: m-1: draining, 1 running, 0 waiting",
        "headrace: m-1 is drained; bring it back with: headrace undrain m-1",
    ]
    assert admin.asked[0] == ("/drain", {"replica": "m-1", "seconds": 3.5, "force": False})
    again = _run(admin, "drain", "m-1", "--force", "--json")
    assert json.loads(again.stdout)["state"] == "drained"
    assert admin.asked[-2] == ("/drain", {"replica": "m-1", "force": True})


def test_undrain_waits_until_it_is_ready(scripted: Callable[[Answers], ScriptedAdmin]) -> None:
    order = (200, {"id": "m-1", "generation": 1})
    states = [_status("draining"), _status("starting", 2, note="loading weights"), _status("ready", 2)]
    admin = scripted({"/undrain": [order], "/status": states})
    done = _run(admin, "undrain", "m-1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[1:] == ["headrace: m-1: starting: loading weights", "headrace: m-1 is ready"]


@pytest.mark.parametrize("command", [("role", "m-1", "both"), ("drain", "m-1"), ("undrain", "m-1")])
def test_a_refusal_is_its_sentence(scripted: Callable[[Answers], ScriptedAdmin], command: tuple[str, ...]) -> None:
    admin = scripted({f"/{command[0]}": [_refusal("that cannot be")]})
    done = _run(admin, *command)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "headrace: that cannot be\n")


@pytest.mark.parametrize(
    ("command", "states", "words"),
    [
        ("drain", [_status("draining"), _status("starting", 2)], "was brought back"),
        ("drain", [(200, {"replicas": [], "routers": []})], "is stopping"),
        ("undrain", [_status("starting", 2), _status("dead", 2, note="too little memory")], "too little memory"),
        ("undrain", [_status("drained", note="drained")], "m-1 is drained"),
    ],
)
def test_what_goes_wrong_meanwhile(
    scripted: Callable[[Answers], ScriptedAdmin], command: str, states: list[Any], words: str
) -> None:
    order = (200, {"id": "m-1", "generation": 1, "seconds": 1})
    done = _run(scripted({f"/{command}": [order], "/status": states}), command, "m-1")
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr.splitlines()[-1]


def test_a_rollout_takes_one_after_the_other(scripted: Callable[[Answers], ScriptedAdmin]) -> None:
    """Prompt computers first; those that an operator has drained stay so."""
    states = {"a": ("ready", 1, "decode"), "b": ("ready", 1, "prefill"), "c": ("drained", 3, "decode")}

    def status(**changes: tuple[str, int]) -> tuple[int, dict[str, Any]]:
        load = {"running": 0, "waiting": 0}
        shown = [(name, *(changes.get(name) or known[:2]), known[2]) for name, known in states.items()]
        entries = [
            {"id": name, "state": state, "generation": generation, "role": role, "load": load, "note": ""}
            for name, state, generation, role in shown
        ]
        return 200, {"replicas": entries, "routers": []}

    looks = [status(), status(b=("drained", 1)), status(b=("ready", 2))]
    looks += [status(b=("ready", 2), a=("drained", 1)), status(b=("ready", 2), a=("ready", 2))]
    order = (200, {"generation": 1, "seconds": 1})
    admin = scripted({"/status": looks, "/drain": [order], "/undrain": [order]})
    done = _run(admin, "rollout", "--seconds", "1")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert [(path, body["replica"]) for path, body in admin.asked if path != "/status"] == [
        ("/drain", "b"),
        ("/undrain", "b"),
        ("/drain", "a"),
        ("/undrain", "a"),
    ]
    assert done.stderr.splitlines()[-1] == "headrace: 2 replicas were built again"


def test_a_rollout_stops_at_a_refusal(scripted: Callable[[Answers], ScriptedAdmin]) -> None:
    admin = scripted({"/status": [_status("ready")], "/drain": [_refusal("m-1 is the only one; use --force")]})
    done = _run(admin, "rollout", "m-1")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "headrace: m-1 is the only one; use --force")
    unknown = _run(admin, "rollout", "m-7")
    assert (unknown.returncode, unknown.stderr) == (1, "headrace: there is no replica 'm-7'; there are: m-0, m-1\n")
