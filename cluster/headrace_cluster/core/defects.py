"""Replicas whose device seems to be defective, from the outputs that routers found not to be finite. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.record import Record

LEAST_PROMPTS = 3  # of one replica, until it counts as defective
LEAST_SHARE = 0.75  # of all such prompts of the model


@dataclass(frozen=True, slots=True)
class NotFinite:
    """Prompts whose output was not finite on a build, but was in a later attempt, in the last ten minutes."""

    build: ReplicaName
    source: ReplicaName | None  # that sent KV blocks of the prompts
    prompts: int


def find_defects(up: Sequence[Record], found: Mapping[str, Sequence[NotFinite]]) -> dict[ReplicaName, str]:
    """Why builds count as defective: at most one per model, which took part in most of such outputs.

    A fault of the model, or a prompt at the limit of a number format, is found on all replicas alike. found: by router.
    No build counts with more than it reports of itself, and one that sent blocks only if two routers found it, since it
    reports nothing then; with a single router, that one: of several, one alone cannot have a replica replaced.
    """
    models: dict[str, list[Record]] = {}
    for record in up:
        models.setdefault(record.model.name, []).append(record)
    defects = (_find_defect(records, found) for records in models.values())
    return {name: why for name, why in defects if why}


def _find_defect(records: Sequence[Record], found: Mapping[str, Sequence[NotFinite]]) -> tuple[ReplicaName, str]:
    sources = Counter(source for entries in found.values() for source in {entry.source for entry in entries})
    witnesses = min(2, len(found))
    by_name = {record.name: record for record in records}
    left = {name: record.not_finite for name, record in by_name.items()}  # as each reports of itself
    total, parts = 0, Counter[ReplicaName]()
    for entry in (entry for entries in found.values() for entry in entries):
        if entry.build not in by_name or (entry.source is not None and entry.source not in by_name):
            continue  # one of the two was replaced since: it may have been the cause
        prompts = min(entry.prompts, left[entry.build])
        left[entry.build] -= prompts
        total += prompts
        if entry.source is None:
            parts[entry.build] += prompts
        elif sources[entry.source] >= witnesses:  # else either may be the cause
            parts.update({name: prompts for name in {entry.build, entry.source}})
    # Of two that always took part together the older build is replaced first.
    worst = max(by_name.values(), key=lambda record: (parts[record.name], -record.since))
    count = parts[worst.name]
    if count < LEAST_PROMPTS or count < LEAST_SHARE * total:
        return worst.name, ""
    return worst.name, (
        f"the output of {worst.replica_id} was not finite for {count} prompts for which a later attempt's was: its "
        "device may be defective"
    )
