"""A controller that takes up a cluster keeps the commits that its replicas run, although a branch has moved."""

from typing import Any

import pytest

from headrace_cluster.core.revisions import moved_note, resolved_revisions
from headrace_cluster.ray import private
from headrace_cluster.ray.cluster_record import ClusterRecord
from headrace_cluster.ray.ray_controller import prepare
from headrace_cluster.spec.cluster_spec import ClusterSpec, parse_spec

FIRST, SECOND = "1" * 40, "2" * 40


def _spec(revision: str | None, **changed: Any) -> ClusterSpec:
    hub = {"source": "acme/model", "name": "hub", "revision": revision} | changed
    return parse_spec({"models": [hub, {"source": "smollm2"}]})


def _pinned(spec: ClusterSpec, commit: str) -> ClusterSpec:
    """As the checks before a start return it."""
    hub, local = spec.models
    return spec.model_copy(update={"models": (hub.model_copy(update={"revision": commit}), local)})


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Of Ray's GCS, which outlives controllers."""
    found: dict[str, bytes] = {}
    monkeypatch.setattr(private, "get_value", found.get)
    monkeypatch.setattr(private, "put_value", found.__setitem__)
    return found


def _attach(written: ClusterSpec, commit: str | None) -> tuple[str | None, list[str]]:
    """The commit that a new controller loads, and what the operator reads.

    commit: that of the Hub now; None = it does not answer.
    """
    spec = _pinned(written, commit) if commit is not None else written
    found = resolved_revisions(written, spec)
    leased, _, words = prepare(spec, found)
    ClusterRecord(spec.cluster).save_words(words)
    hub, local = leased.models
    assert local.revision is None
    notes = [note for name, now in found.items() if (note := moved_note(now, words.revisions[name]))]
    return hub.revision, notes


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_branch_that_has_moved_replaces_nothing_when_a_process_attaches(
    record: dict[str, bytes], revision: str | None
) -> None:
    assert _attach(_spec(revision), FIRST) == (FIRST, [])
    commit, (note,) = _attach(_spec(revision, max_num_seqs=3), SECOND)
    assert commit == FIRST, "another setting changes nothing about the commit"
    written = revision or "the default branch"
    assert note == (
        f"{written} of acme/model is now commit {SECOND}; the cluster keeps {FIRST}: "
        "to load another one, name it with --revision"
    )


def test_another_revision_or_source_is_resolved_again(record: dict[str, bytes]) -> None:
    assert _attach(_spec("main"), FIRST)[0] == FIRST
    assert _attach(_spec("v2"), SECOND) == (SECOND, [])
    assert _attach(_spec("main"), SECOND) == (SECOND, []), "it is not the revision of the last process"
    assert _attach(_spec("main", source="acme/other"), FIRST) == (FIRST, [])
    assert _attach(_spec(SECOND), SECOND) == (SECOND, []), "a commit"
    assert _attach(_spec("main"), FIRST) == (FIRST, []), "of a spec with a commit nothing is kept"


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_hub_that_does_not_answer_changes_no_commit(record: dict[str, bytes], revision: str | None) -> None:
    assert _attach(_spec(revision), None) == (revision, []), "of a new cluster: what each node has in its cache"
    assert _attach(_spec(revision), FIRST) == (FIRST, [])
    assert _attach(_spec(revision), None) == (FIRST, [])
    assert _attach(_spec("v2"), None) == ("v2", []), "another revision"
