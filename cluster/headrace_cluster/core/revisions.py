"""Which commits of the Hub a cluster loads: those that its revisions named first, until the spec changes. Pure.

A branch or tag may move. A process that attaches to a cluster resolves it again for its checks, before it is connected
to Ray; replicas that run are not built again for that.
"""

from collections.abc import Mapping

import msgspec

from headrace_cluster.spec.cluster_spec import ClusterSpec


class ResolvedRevision(msgspec.Struct, frozen=True, kw_only=True):
    """The commit that the revision of a model in the spec named."""

    source: str
    revision: str | None  # as the spec has it; none: the default branch
    commit: str


Revisions = Mapping[str, ResolvedRevision]  # by the name of the model


def resolved_revisions(spec: ClusterSpec, pinned: ClusterSpec) -> dict[str, ResolvedRevision]:
    """Revisions of the models that do not name a commit themselves. spec: as it was written; pinned: with commits."""
    return {
        written.name: ResolvedRevision(source=written.source, revision=written.revision, commit=model.revision)
        for written, model in zip(spec.models, pinned.models, strict=True)
        if model.revision is not None and model.revision != written.revision
    }


def kept_revisions(spec: ClusterSpec, found: Revisions, earlier: Revisions) -> dict[str, ResolvedRevision]:
    """`found`, with the earlier commit of each model whose source and revision are the same.

    spec: with the commits of `found`. Its other models have none: they are no models of the Hub, or it did not answer.
    """
    kept = dict(found)
    for model in spec.models:
        before, now = earlier.get(model.name), found.get(model.name)
        written = now.revision if now is not None else model.revision
        if before is not None and (before.source, before.revision) == (model.source, written):
            kept[model.name] = before
    return kept


def with_commits(spec: ClusterSpec, revisions: Revisions) -> ClusterSpec:
    """The spec with these commits."""
    models = (
        model.model_copy(update={"revision": revisions[model.name].commit}) if model.name in revisions else model
        for model in spec.models
    )
    return spec.model_copy(update={"models": tuple(models)})


def moved_note(found: ResolvedRevision, kept: ResolvedRevision) -> str:
    """A sentence for the operator; empty if both are the same commit."""
    if found.commit == kept.commit:
        return ""
    written = found.revision or "the default branch"
    return (
        f"{written} of {found.source} is now commit {found.commit}; the cluster keeps {kept.commit}: "
        "to load another one, name it with --revision"
    )
