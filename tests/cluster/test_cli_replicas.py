"""`headrace role`, `drain`, `undrain` as processes against a scripted controller."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace_cluster.cli import admin_client
from headrace_cluster.cli import rollout as rollout_module
from headrace_cluster.cli.admin_client import AdminClient
from headrace_cluster.cli.rollout import roll_out
from headrace_cluster.cli.servers import ServerChoice
from headrace_cluster.cli.stop import stop_server
from headrace_cluster.errors import NotRunningError
from headrace_cluster.local import state
from headrace_cluster.local.processes import ProcessId
from headrace_cluster.local.state import ServeState
from support.cluster.scripted_admin import ScriptedAdmin

Responses = dict[str, list[tuple[int, dict[str, Any]]]]

LOST: tuple[int, dict[str, Any]] = (0, {})
WAITING = "headrace: the controller does not answer; waiting for it, or for the next one"


@pytest.fixture
def scripted() -> Iterator[Callable[[Responses], ScriptedAdmin]]:
    made: list[ScriptedAdmin] = []

    def make(answers: Responses) -> ScriptedAdmin:
        made.append(ScriptedAdmin(answers))
        return made[-1]

    yield make
    for admin in made:
        admin.close()


def _run(admin: ScriptedAdmin, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "headrace_cluster", *arguments, "--admin-port", str(admin.port)]
    environ = os.environ | {"HEADRACE_ADMIN_KEY": "the-key"}
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env=environ, check=False)


def _status(
    state: str, generation: int = 1, running: int = 0, note: str = "", *, connected: bool = True
) -> tuple[int, dict[str, Any]]:
    load = {"running": running, "waiting": 0, "kv_usage": 0.0}
    entry = {"id": "m-1", "state": state, "generation": generation, "load": load, "note": note, "connected": connected}
    return 200, {"replicas": [{"id": "m-0", "state": "ready", "connected": True}, entry], "routers": []}


def _rejection(sentence: str) -> tuple[int, dict[str, Any]]:
    return 409, {"error": {"message": sentence}}


def test_role(scripted: Callable[[Responses], ScriptedAdmin]) -> None:
    document = {"id": "m-1", "generation": 1, "role": "decode", "before": "both", "seconds": 0.0123}
    admin = scripted({"/role": [(200, document)]})
    done = _run(admin, "role", "m-1", "decode")
    assert (done.returncode, done.stdout) == (0, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("headrace: m-1: decode") and "both" in line, "the new role, then the one before"
    assert admin.requests == [("/role", {"replica": "m-1", "role": "decode"})]
    assert json.loads(_run(admin, "role", "m-1", "decode", "--json").stdout) == document


def test_drain_shows_its_progress(scripted: Callable[[Responses], ScriptedAdmin]) -> None:
    begun = (200, {"id": "m-1", "generation": 1, "seconds": 3.5})
    states = [_status("ready", running=2), _status("draining", running=2), _status("draining", running=1)]
    admin = scripted({"/drain": [begun], "/status": [*states, _status("drained")]})
    done = _run(admin, "drain", "m-1", "--seconds", "3.5")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [
        "headrace: m-1: ready, 2 running, 0 waiting",
        "headrace: m-1: draining, 2 running, 0 waiting",
        "headrace: m-1: draining, 1 running, 0 waiting",
        f"headrace: m-1 is drained; bring it back with: ./headrace undrain m-1 --admin-port {admin.port}",
    ]
    assert admin.requests[0] == ("/drain", {"replica": "m-1", "seconds": 3.5, "force": False})
    again = _run(admin, "drain", "m-1", "--force", "--json")
    assert json.loads(again.stdout)["state"] == "drained"
    assert admin.requests[-2] == ("/drain", {"replica": "m-1", "force": True})


def test_undrain_waits_until_it_is_ready(scripted: Callable[[Responses], ScriptedAdmin]) -> None:
    begun = (200, {"id": "m-1", "generation": 1})
    states = [_status("draining"), _status("starting", 2, note="loading weights")]
    states += [_status("ready", 2, connected=False), _status("ready", 2)]
    admin = scripted({"/undrain": [begun], "/status": states})
    done = _run(admin, "undrain", "m-1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[1:] == [
        "headrace: m-1: starting: loading weights",
        "headrace: m-1: ready; not every router is connected to it yet",
        "headrace: m-1 is ready",
    ]


def test_an_operation_that_may_be_forgotten(scripted: Callable[[Responses], ScriptedAdmin]) -> None:
    begun = (200, {"id": "m-1", "generation": 1, "seconds": 1, "recorded": False})
    done = _run(scripted({"/drain": [begun], "/status": [_status("drained")]}), "drain", "m-1")
    assert done.returncode == 0 and "this command has to be repeated" in done.stderr


def test_a_drain_waits_while_routers_connect(scripted: Callable[[Responses], ScriptedAdmin]) -> None:
    """As after the loss of a controller: the operator would pass --force."""
    begun = (200, {"id": "m-1", "generation": 1, "seconds": 1})
    states = [_status("ready", connected=False), _status("ready"), _status("drained")]
    admin = scripted({"/drain": [_rejection("not every router is connected"), begun], "/status": states})
    done = _run(admin, "drain", "m-1")
    assert done.returncode == 0 and [path for path, _ in admin.requests].count("/drain") == 2
    refused = scripted({"/drain": [_rejection("that cannot be")], "/status": [_status("ready")]})
    assert _run(refused, "drain", "m-1").stderr == "headrace: that cannot be\n"


@pytest.mark.parametrize("command", [("role", "m-1", "both"), ("drain", "m-1"), ("undrain", "m-1")])
def test_a_rejection_is_printed(scripted: Callable[[Responses], ScriptedAdmin], command: tuple[str, ...]) -> None:
    admin = scripted({f"/{command[0]}": [_rejection("that cannot be")], "/status": [_status("ready")]})
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
def test_failures_during_the_wait(
    scripted: Callable[[Responses], ScriptedAdmin], command: str, states: list[Any], words: str
) -> None:
    begun = (200, {"id": "m-1", "generation": 1, "seconds": 1})
    done = _run(scripted({f"/{command}": [begun], "/status": states}), command, "m-1")
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr.splitlines()[-1]


def _entry(name: str, state: str = "ready", generation: int = 1, **given: Any) -> dict[str, Any]:
    load = {"running": 0, "waiting": 0}
    known = {"id": name, "model": "m", "role": "decode", "state": state, "generation": generation, "load": load}
    return known | {"note": "", "connected": True, "beside": [], "roll_failed": ""} | given


def _polls(*polls: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return [(200, {"replicas": replicas, "routers": []}) for replicas in polls]


def _begun(*, beside: bool = False) -> tuple[int, dict[str, Any]]:
    return 200, {"generation": 1, "seconds": 1, "beside": beside}


def test_a_rollout_rolls_one_after_the_other(scripted: Callable[[Responses], ScriptedAdmin]) -> None:
    """Prefill replicas first; replicas that an operator drained stay drained."""
    a, b, c = _entry("a"), _entry("b", role="prefill"), _entry("c", "drained", 3)
    rolled = _entry("b", generation=2, role="prefill")
    polls = _polls(
        [a, b, c], [a, _entry("b", "draining", role="prefill"), c], [a, rolled, c], [_entry("a", "starting", 2), rolled]
    )
    polls += _polls([_entry("a", generation=2, connected=False), rolled], [_entry("a", generation=2), rolled])
    admin = scripted({"/status": polls, "/rollout": [_begun()]})
    done = _run(admin, "rollout", "--seconds", "1")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "headrace: a: ready; not every router is connected to it yet" in done.stderr.splitlines()
    bodies = [body for path, body in admin.requests if path == "/rollout"]
    assert bodies == [{"replica": name, "seconds": 1, "allow_gap": False} for name in ("b", "a")]
    assert "headrace: b: its next build starts after it has ended" in done.stderr
    assert done.stderr.splitlines()[-1] == "headrace: m: 2 of 2 rolled"


def test_each_model_is_rolled_on_its_own(scripted: Callable[[Responses], ScriptedAdmin]) -> None:
    """A failure of one model does not stop the next; the summary and the exit status report it."""
    both = [_entry("a-0", model="a"), _entry("b-0", model="b")]
    beside = {"generation": 2, "state": "starting", "note": "loading weights"}
    polls = _polls(
        both,
        [_entry("a-0", model="a", beside=[beside]), both[1]],
        [_entry("a-0", model="a", roll_failed="no memory; pass --allow-gap"), both[1]],
        [both[0], _entry("b-0", model="b", beside=[beside])],
        [both[0], _entry("b-0", generation=2, model="b", beside=[{"generation": 1, "state": "draining", "note": ""}])],
        [both[0], _entry("b-0", generation=2, model="b")],
    )
    admin = scripted({"/status": polls, "/rollout": [_begun(beside=True)]})
    done = _run(admin, "rollout", "--allow-gap")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert [body["allow_gap"] for path, body in admin.requests if path == "/rollout"] == [True, True]
    assert done.stderr.splitlines() == [
        "headrace: a-0: its next build starts beside it",
        "headrace: a-0: generation 1 ready, generation 2 starting: loading weights",
        "headrace: b-0: its next build starts beside it",
        "headrace: b-0: generation 1 ready, generation 2 starting: loading weights",
        "headrace: b-0: generation 2 ready, generation 1 draining",
        "headrace: b-0 is rolled",
        "headrace: a: 0 of 1 rolled",
        "headrace:   a-0 was not rolled: no memory; pass --allow-gap",
        "headrace: b: 1 of 1 rolled",
    ]


def test_a_build_that_does_not_start_ends_the_rollout_of_its_model(
    scripted: Callable[[Responses], ScriptedAdmin],
) -> None:
    first, second = _entry("m-0"), _entry("m-1")
    polls = _polls([first, second], [_entry("m-0", "dead", 2, note="too little memory"), second])
    admin = scripted({"/status": polls, "/rollout": [_begun()]})
    done = _run(admin, "rollout")
    assert (done.returncode, done.stdout) == (1, "")
    assert len([path for path, _ in admin.requests if path == "/rollout"]) == 1, "the other one still serves"
    assert done.stderr.splitlines()[-3:] == [
        "headrace: m: 0 of 2 rolled",
        "headrace:   m-0 was not rolled: it is dead: too little memory",
        "headrace:   m-1 was not rolled: another one before it was not",
    ]


def test_a_rejected_rollout_prints_its_sentence(scripted: Callable[[Responses], ScriptedAdmin]) -> None:
    admin = scripted({"/status": _polls([_entry("m-0"), _entry("m-1")]), "/rollout": [_rejection("m-1 is starting")]})
    done = _run(admin, "rollout", "m-1")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "headrace:   m-1 was not rolled: m-1 is starting")
    unknown = _run(admin, "rollout", "m-7")
    assert (unknown.returncode, unknown.stderr) == (1, "headrace: there is no replica 'm-7'; there are: m-0, m-1\n")


def test_a_rollout_waits_for_a_replica_that_is_built_again(scripted: Callable[[Responses], ScriptedAdmin]) -> None:
    """It died after the status was read: the server refuses until it is ready."""
    down = [_entry("m-0", "dead", note="crash loop; next try in 2 s"), _entry("m-0", "dead", note="crash loop")]
    up = [_entry("m-0", "starting", 2), _entry("m-0", "ready", 2), _entry("m-0", "ready", 3)]
    rejection = _rejection("m-0 is dead: run rollout again when it is ready")
    begun = (200, {"generation": 2, "seconds": 1, "beside": False})
    polls = _polls(*([entry] for entry in (_entry("m-0"), down[0], *down, *up)))
    admin = scripted({"/status": polls, "/rollout": [rejection, begun]})
    done = _run(admin, "rollout")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[:4] == [
        "headrace: m-0 is dead; waiting until it is ready",
        "headrace: m-0: dead: crash loop",
        "headrace: m-0: starting",
        "headrace: m-0: its next build starts after it has ended",
    ]
    drained = _polls([_entry("m-0")], [_entry("m-0", "starting")], [_entry("m-0", "drained")])
    done = _run(scripted({"/status": drained, "/rollout": [rejection]}), "rollout")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "headrace:   m-0 was not rolled: it is drained")


def test_a_replica_that_is_down_is_awaited_before_any_other_is_rolled(
    scripted: Callable[[Responses], ScriptedAdmin],
) -> None:
    """What was built again meanwhile is not built once more."""
    polls = _polls(
        [_entry("m-0"), _entry("m-1", "dead")],
        [_entry("m-0"), _entry("m-1", "starting", 2)],
        [_entry("m-0"), _entry("m-1", generation=2)],
        [_entry("m-0", generation=2), _entry("m-1", generation=2)],
    )
    admin = scripted({"/status": polls, "/rollout": [_begun()]})
    done = _run(admin, "rollout")
    assert done.returncode == 0, done.stderr
    assert [body["replica"] for path, body in admin.requests if path == "/rollout"] == ["m-0"]
    assert "m-1 is rolled: it was built again meanwhile" in done.stderr


def test_a_rollout_waits_for_replicas_that_another_one_replaces(
    scripted: Callable[[Responses], ScriptedAdmin],
) -> None:
    """The controller's own, or that of another operator. What this one has built again is not built once more."""
    polls = _polls(
        [_entry("m-0"), _entry("m-1")],
        [_entry("m-0"), _entry("m-1", "draining", note="draining: it is built again next")],
        [_entry("m-0"), _entry("m-1", "starting", 2)],
        [_entry("m-0"), _entry("m-1", generation=2)],
        [_entry("m-0", generation=2), _entry("m-1", generation=2)],
        [_entry("m-0", generation=2), _entry("m-1", "draining", 2)],
        [_entry("m-0", generation=2), _entry("m-1", generation=3)],
    )
    refusal = "m-1 is draining; try again when it is ready, or pass --allow-gap"
    admin = scripted({"/status": polls, "/rollout": [_rejection(refusal), _begun(), _rejection("m-1 is draining")]})
    done = _run(admin, "rollout")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        f"headrace: m-0 waits: {refusal}",
        "headrace: m-1: starting",
        "headrace: m-0: its next build starts after it has ended",
        "headrace: m-0 is rolled",
        "headrace: m-1 is draining; waiting until it is ready",
        "headrace: m-1 is rolled: it was built again meanwhile",
        "headrace: m: 2 of 2 rolled",
    ]
    assert [body["replica"] for path, body in admin.requests if path == "/rollout"] == ["m-0", "m-0", "m-1"]


def test_a_rollout_of_all_names_the_replicas_that_are_drained(scripted: Callable[[Responses], ScriptedAdmin]) -> None:
    polls = _polls([_entry("m-0"), _entry("m-1", "drained")], [_entry("m-0", generation=2), _entry("m-1", "drained")])
    done = _run(scripted({"/status": polls, "/rollout": [_begun()]}), "rollout")
    assert done.returncode == 0 and "m-1 is drained: it is not rolled" in done.stderr


def test_ctrl_c_says_what_becomes_of_a_rollout(
    scripted: Callable[[Responses], ScriptedAdmin], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rollout_module, "watch_replica", interrupt)
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", "the-key")
    admin = scripted({"/status": _polls([_entry("m-0")]), "/rollout": [_begun()]})
    with pytest.raises(KeyboardInterrupt):
        roll_out(ServerChoice(admin_port=admin.port), [], None)
    assert "is completed by the server" in capsys.readouterr().err


def test_a_rollout_continues_with_the_next_controller(scripted: Callable[[Responses], ScriptedAdmin]) -> None:
    """Two losses: one while a replica is rolled, one at the request for the next."""
    first, second = _entry("m-0"), _entry("m-1")
    rolled = _entry("m-0", generation=2)
    polls = [*_polls([first, second], [_entry("m-0", "draining"), second]), LOST, LOST, *_polls([rolled, second])]
    polls += [LOST, *_polls([rolled, second], [rolled, _entry("m-1", generation=2)])]
    admin = scripted({"/status": polls, "/rollout": [_begun(), LOST, _begun()]})
    done = _run(admin, "rollout")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.splitlines().count(WAITING) == 2 and done.stderr.endswith("headrace: m: 2 of 2 rolled\n")
    assert [body["replica"] for path, body in admin.requests if path == "/rollout"] == ["m-0", "m-1", "m-1"]


def _of_two_models(**first: Any) -> list[tuple[int, dict[str, Any]]]:
    """The status during a rollout in which the first replica stays in this state."""
    other = _entry("b-0", model="b")
    return _polls([_entry("a-0", model="a"), other], [_entry("a-0", model="a", **first), other])


def test_a_controller_that_does_not_answer_ends_the_rollout_of_one_model(
    scripted: Callable[[Responses], ScriptedAdmin], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(admin_client, "RESTART_SECONDS", 0.4)
    monkeypatch.setattr(admin_client, "RETRY_SECONDS", 0.25)
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", "the-key")
    monkeypatch.setenv("HEADRACE_COMMAND", "headrace")
    polls = [*_of_two_models(state="draining"), LOST, LOST, LOST]  # at 0, 0.25 and 0.5 s
    polls += _polls([_entry("a-0", model="a"), _entry("b-0", generation=2, model="b")])
    admin = scripted({"/status": polls, "/rollout": [_begun()]})
    assert not roll_out(ServerChoice(admin_port=admin.port), [], None)
    assert capsys.readouterr().err.splitlines()[-3:] == [
        "headrace: a: 0 of 1 rolled",
        "headrace:   a-0 was not rolled: the controller has not answered for 0.4 s; see `headrace logs controller`",
        "headrace: b: 1 of 1 rolled",
    ]


def test_a_lost_request_ends_the_wait(
    scripted: Callable[[Responses], ScriptedAdmin], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rollout_module, "NO_RECORD_SECONDS", 0.5)
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", "the-key")
    admin = scripted({"/status": [*_of_two_models(), LOST, *_of_two_models()], "/rollout": [_begun()]})
    assert not roll_out(ServerChoice(admin_port=admin.port), ["a-0"], None)
    assert "has no record of this rollout" in capsys.readouterr().err.splitlines()[-1]


def test_without_a_serve_process_the_wait_ends(
    scripted: Callable[[Responses], ScriptedAdmin], capsys: pytest.CaptureFixture[str]
) -> None:
    admin = scripted({"/status": [*_of_two_models(), LOST], "/rollout": [_begun()]})
    with subprocess.Popen(["sleep", "60"]) as serve:
        process = ProcessId.of(serve.pid)
        assert process is not None
        url = f"http://127.0.0.1:{admin.port}"
        state.save(ServeState(process.pid, process.started, "headrace", url, "the-key", admin.port))
        client = AdminClient(ServerChoice())
        assert client.await_status()["replicas"]
        serve.kill()
    client.await_status()
    with pytest.raises(NotRunningError):
        client.await_status()
    assert WAITING not in capsys.readouterr().err


def test_a_stop_counts_requests_of_builds_that_drain_beside_the_next_one(
    scripted: Callable[[Responses], ScriptedAdmin], capsys: pytest.CaptureFixture[str]
) -> None:
    old = {"generation": 1, "state": "draining", "note": "", "load": {"running": 2, "waiting": 1}}
    admin = scripted({"/status": _polls([_entry("m-0", generation=2, beside=[old])])})
    slow = "import signal, time; signal.signal(15, lambda *_: (time.sleep(1), exit())); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", slow], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as serve:
        assert serve.stdout is not None and serve.stdout.readline()
        process = ProcessId.of(serve.pid)
        assert process is not None
        url = f"http://127.0.0.1:{admin.port}"
        state.save(ServeState(process.pid, process.started, "headrace", url, "the-key", admin.port))
        stop_server(ServerChoice(), 10.0)
    assert "headrace: 3 requests in flight: up to 5 s to finish" in capsys.readouterr().err.splitlines()
