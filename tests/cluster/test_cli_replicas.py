"""Commands that change replicas, as processes against a scripted controller."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_cluster.cli import admin_client
from headrace_cluster.cli.admin_client import AdminClient
from headrace_cluster.cli.servers import ServerChoice
from headrace_cluster.errors import NotRunningError, ServerError
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


def _entry(name: str, state: str = "ready", generation: int = 1, **given: Any) -> dict[str, Any]:
    load = {"running": 0, "waiting": 0}
    known = {"id": name, "model": "m", "role": "decode", "state": state, "generation": generation, "load": load}
    known |= {"note": "", "connected": True, "beside": [], "roll_failed": "", "unable": "", "wanted": True}
    return known | {"outdated": generation == 1} | given


def _polls(*polls: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return [(200, {"replicas": replicas, "routers": []}) for replicas in polls]


def _status(state: str, generation: int = 1, running: int = 0, **given: Any) -> tuple[int, dict[str, Any]]:
    load = {"running": running, "waiting": 0}
    return _polls([_entry("m-0"), _entry("m-1", state, generation, load=load, **given)])[0]


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


def test_status_waits_until_every_replica_is_ready_as_it_is_wanted(
    scripted: Callable[[Responses], ScriptedAdmin],
) -> None:
    ready = _entry("m-0", generation=2)
    states = [[ready, _entry("m-1", "pending", 2)], [ready, _entry("m-1")], [ready, _entry("m-1", generation=2)]]
    admin = scripted({"/status": _polls(*states)})
    done = _run(admin, "status", "--wait", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["replicas"] == states[-1]
    assert done.stderr.splitlines()[-1] == "headrace: 2 of 2 ready"
    failed = scripted({"/status": _polls([ready, _entry("m-1", "dead", roll_failed="no such file")])})
    assert _run(failed, "status", "--wait").returncode == 1
    code, document = _polls([ready])[0]
    refused = document | {"spec_refused": True, "problems": ["the spec file is not used"]}
    done = _run(scripted({"/status": [(code, refused)]}), "status", "--wait", "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["spec_refused"]
    drained = scripted({"/status": _polls([ready, _entry("m-1", "drained", 2)])})
    assert _run(drained, "status", "--wait", "--json").stderr.splitlines()[-1] == "headrace: 1 of 1 ready; drained: m-1"


def test_drain_shows_its_progress(scripted: Callable[[Responses], ScriptedAdmin]) -> None:
    begun = (200, {"id": "m-1", "generation": 1, "seconds": 3.5})
    states = [_status("ready", running=2), _status("draining", running=2), _status("draining", running=1)]
    admin = scripted({"/drain": [begun], "/status": [*states, _status("drained")]})
    done = _run(admin, "drain", "m-1", "--seconds", "3.5")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [
        "headrace: m-1: draining, 2 running, 0 waiting",
        "headrace: m-1: draining, 1 running, 0 waiting",
        "headrace: m-1 is drained",
        "headrace: bring it back with: ./headrace undrain m-1",
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


def test_a_drain_waits_while_routers_connect(scripted: Callable[[Responses], ScriptedAdmin]) -> None:
    """As after the loss of a controller: the operator would pass --force."""
    begun = (200, {"id": "m-1", "generation": 1, "seconds": 1, "recorded": False})
    states = [_status("ready", connected=False), _status("ready"), _status("drained")]
    admin = scripted({"/drain": [_rejection("not every router is connected"), begun], "/status": states})
    done = _run(admin, "drain", "m-1")
    assert done.returncode == 0 and [path for path, _ in admin.requests].count("/drain") == 2
    assert "this command has to be repeated" in done.stderr


@pytest.mark.parametrize("command", [("rollout", "m-1"), ("drain", "m-1")])
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
        ("undrain", [_status("drained")], "m-1: drained"),
    ],
)
def test_failures_during_the_wait(
    scripted: Callable[[Responses], ScriptedAdmin], command: str, states: list[Any], words: str
) -> None:
    begun = (200, {"id": "m-1", "generation": 1, "seconds": 1})
    done = _run(scripted({f"/{command}": [begun], "/status": states}), command, "m-1")
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr.splitlines()[-1]


def _begun(*names: str, drained: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
    return 200, {"replicas": dict.fromkeys(names, 1), "drained": list(drained), "seconds": 1}


def test_a_rollout_shows_what_the_server_does(scripted: Callable[[Responses], ScriptedAdmin]) -> None:
    """Also when the controller is lost meanwhile."""
    a, b, rolled = _entry("a"), _entry("b", note="it is built again in turn"), _entry("a", generation=2)
    next_build, old_build = (
        {"generation": generation, "state": state, "note": note}
        for generation, state, note in ((2, "starting", "loading weights"), (1, "draining", ""))
    )
    polls = _polls([a, b], [_entry("a", beside=[next_build]), b], [_entry("a", generation=2, beside=[old_build]), b])
    polls += [LOST, *_polls([_entry("a", generation=2, connected=False), b], [rolled, _entry("b", "draining")])]
    polls += _polls([rolled, _entry("b", "starting", 2)], [rolled, _entry("b", generation=2)])
    admin = scripted({"/status": polls, "/rollout": [_begun("a", "b", drained=("c",))]})
    done = _run(admin, "rollout", "--seconds", "1")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert next(body for path, body in admin.requests if path == "/rollout") == {
        "replicas": [],
        "allow_gap": False,
        "seconds": 1,
    }
    assert done.stderr.splitlines() == [
        "headrace: c is drained: it is not rolled",
        "headrace: b: ready: it is built again in turn",
        "headrace: a: generation 1 ready, generation 2 starting: loading weights",
        "headrace: a: generation 2 ready, generation 1 draining",
        WAITING,
        "headrace: a: ready; not every router is connected to it yet",
        "headrace: a is rolled",
        "headrace: b: draining, 0 running, 0 waiting",
        "headrace: b: starting",
        "headrace: b is rolled",
        "headrace: 2 of 2 rolled",
    ]


def test_a_build_that_does_not_start_ends_the_rollout_of_its_model(
    scripted: Callable[[Responses], ScriptedAdmin],
) -> None:
    first, second, other = _entry("m-0"), _entry("m-1"), _entry("n-0", model="n")
    failed = _entry("m-0", roll_failed="its next build did not start: a bad file")
    polls = _polls(
        [first, second, other], [failed, second, other], [failed, second, _entry("n-0", "ready", 2, model="n")]
    )
    admin = scripted({"/status": polls, "/rollout": [_begun("m-0", "m-1", "n-0")]})
    done = _run(admin, "rollout", "--allow-gap")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "headrace: n-0 is rolled",
        "headrace: 1 of 3 rolled",
        "headrace:   m-0 was not: its next build did not start: a bad file",
        "headrace:   m-1 was not: another one before it was not",
    ]


def test_other_settings_are_sent_and_shown(scripted: Callable[[Responses], ScriptedAdmin]) -> None:
    begun = _begun("m-0")
    begun[1]["changes"] = ["m: max_num_seqs 8 → 16"]
    admin = scripted({"/status": _polls([_entry("m-0", generation=2)]), "/rollout": [begun]})
    done = _run(admin, "rollout", "--model", "m", "--set", "max_num_seqs=16", "--set", "dtype=bfloat16")
    assert done.stderr.splitlines()[0] == "headrace: m: max_num_seqs 8 → 16"
    body = next(body for path, body in admin.requests if path == "/rollout")
    assert (body["model"], body["settings"]) == ("m", {"max_num_seqs": 16, "dtype": "bfloat16"})
    failed = _begun("m-0")
    failed[1]["before"] = {"max_num_seqs": 8}
    failures = scripted({"/status": _polls([_entry("m-0", roll_failed="a bad file")]), "/rollout": [failed]})
    done = _run(failures, "rollout", "--set", "max_num_seqs=16")
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith("./headrace rollout --set max_num_seqs=8")
    wrong = _run(admin, "rollout", "--set", "max_num_seqs")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1) and "KEY=VALUE" in wrong.stderr


def test_scale_waits_for_what_comes_and_for_what_ends(scripted: Callable[[Responses], ScriptedAdmin]) -> None:
    ready, gone = _entry("m-0", generation=2), _entry("m-1", "draining", 2, wanted=False, outdated=True)
    begun = 200, {"changes": ["m: replicas 2 → 1"], "models": ["m"], "recorded": True}
    admin = scripted({"/status": _polls([ready, gone], [ready, gone], [ready]), "/scale": [begun]})
    done = _run(admin, "scale", "m", "1")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.splitlines() == [
        "headrace: m: replicas 2 → 1",
        "headrace: m-0 is ready",
        "headrace: m-1: draining, 0 running, 0 waiting",
        "headrace: 1 of 1 ready",
    ]
    assert ("/scale", {"pool": "m", "replicas": 1}) in admin.requests
    starting = _entry("m-1", "dead", 0, unable="there is no model at 'x'", outdated=False)
    admin = scripted({"/status": _polls([ready, starting]), "/scale": [begun]})
    done = _run(admin, "scale", "m", "2")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "headrace:   m-1 was not: there is no model at 'x'"


def test_models_that_stay_since_the_next_ones_do_not_start_are_not_waited_for(
    scripted: Callable[[Responses], ScriptedAdmin], tmp_path: Path
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("models: [{source: ./missing, name: n}]")
    begun = 200, {"changes": ["m: ends", "n: a new model"], "models": ["m", "n"], "recorded": True}
    old = _entry("m-0", wanted=False, outdated=True)
    polls = _polls([_entry("n-0", "starting", model="n"), old], [_entry("n-0", "dead", model="n", unable="none"), old])
    done = _run(scripted({"/apply": [begun], "/status": polls}), "apply", "-f", str(spec))
    assert done.returncode == 1 and "headrace:   n-0 was not: none" in done.stderr.splitlines()


def test_apply_shows_what_changes(scripted: Callable[[Responses], ScriptedAdmin], tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("models: [{source: smollm2, name: m, replicas: 3}]")
    begun = 200, {"changes": ["m: replicas 1 → 3"], "models": ["m"], "recorded": True}
    admin = scripted({"/apply": [begun], "/status": _polls([_entry("m-0", generation=2)])})
    done = _run(admin, "apply", "-f", str(spec), "--dry-run")
    assert (done.returncode, done.stderr) == (0, "headrace: m: replicas 1 → 3\n")
    body = admin.requests[0][1]
    assert body["dry_run"] is True and [(m["name"], m["replicas"]) for m in body["models"]] == [("m", 3)]
    done = _run(admin, "apply", "-f", str(spec))
    assert done.stderr.splitlines()[-1] == "headrace: 1 of 1 ready"


def test_a_controller_that_does_not_answer_ends_the_command(
    scripted: Callable[[Responses], ScriptedAdmin], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_client, "RESTART_SECONDS", 0.4)
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", "the-key")
    admin = scripted({"/status": [LOST]})
    with pytest.raises(ServerError, match=r"the controller has not answered for 0.4 s"):
        AdminClient(ServerChoice(admin_port=admin.port)).await_status()


def test_without_a_serve_process_the_wait_ends(
    scripted: Callable[[Responses], ScriptedAdmin], capsys: pytest.CaptureFixture[str]
) -> None:
    admin = scripted({"/status": [*_polls([_entry("m-0")], [_entry("m-0")]), LOST]})
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
