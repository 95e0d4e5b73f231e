"""Which replicas are wanted, and how: the spec with the words of operators. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace_cluster.core.naming import replica_id
from headrace_cluster.core.words import Words
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_proto.role import Role

Digest = Callable[[str, ModelSpec, int], bytes]  # of a replica id, its model and the number of its last roll


@dataclass(frozen=True, slots=True)
class Wanted:
    """One replica that is to exist. The model's tp and pp are those of this replica."""

    replica_id: str
    model: ModelSpec
    role: Role
    spec_role: Role = Role.BOTH  # without a word of an operator
    digest: bytes = b""  # a build with another one is replaced
    drained: bool = False  # it has no build until an operator brings it back
    drain_seconds: float = 5.0  # for requests in flight, when one of its builds is to end
    allow_gap: bool = False  # its build may end before the next one is ready, if there is no room for both


def wanted_replicas(spec: ClusterSpec, words: Words, digest: Digest) -> dict[str, Wanted]:
    """By id. Ids are unique even if two model names end alike; they name no role: roles change."""
    found: dict[str, Wanted] = {}
    taken: dict[str, int] = {}
    for model in spec.models:
        prefix = replica_id(model.name, 0).removesuffix("-0")
        for pool in model.pools:
            first = taken.get(prefix, 0)
            taken[prefix] = first + pool.replicas
            shaped = model.shaped(pool)
            for index in range(first, first + pool.replicas):
                name = replica_id(model.name, index)
                word, roll = words.roles.get(name), words.rolls.get(name)
                seconds = words.drained.get(name, roll.seconds if roll else spec.health.drain_seconds)
                found[name] = Wanted(
                    name,
                    shaped,
                    Role(word.role) if word is not None and word.spec == pool.role else pool.role,
                    pool.role,
                    digest(name, shaped, roll.number if roll else 0),
                    name in words.drained,
                    seconds,
                    roll is not None and roll.allow_gap,
                )
    return found
