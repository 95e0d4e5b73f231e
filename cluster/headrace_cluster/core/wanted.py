"""Which replicas are wanted, and how: the spec with the words of operators. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
from pydantic import ValidationError

from headrace_cluster.core.naming import replica_id
from headrace_cluster.core.words import Words
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_cluster.spec.section import reason
from headrace_proto.role import Role

Digest = Callable[[str, ModelSpec, int], bytes]  # takes a replica id, its model and the number of its last roll


@dataclass(frozen=True, slots=True)
class Wanted:
    """One replica that is to exist. The model's tp and pp are those of this replica."""

    replica_id: str
    model: ModelSpec
    role: Role
    spec_role: Role = Role.BOTH  # without a word of an operator
    digest: bytes = b""  # a build with another one is replaced
    plain: bytes = b""  # the digest without rolls
    drained: bool = False  # it has no build until an operator brings it back
    drain_seconds: float = 5.0  # for requests in flight, when one of its builds is to end
    allow_gap: bool = False  # its build may end before the next one is ready, if there is no room for both


def effective_spec(spec: ClusterSpec, words: Words) -> ClusterSpec:
    """The spec as operators have changed it: a word counts until the spec's own value changes.

    Raises pydantic's ValidationError for a value that does not fit beside the others.
    """
    return spec.model_copy(update={"models": tuple(_changed(model, words) for model in base_models(spec, words))})


def usable_spec(spec: ClusterSpec, words: Words) -> tuple[ClusterSpec, list[str]]:
    """The same without words that do not fit to the spec any more, and a sentence about each of these."""
    problems: list[str] = []

    def refuse(what: str, error: ValidationError) -> None:
        why = reason(error.errors(include_url=False)[0])
        problems.append(f"{what} is not used, since it does not fit to the spec any more: {why}")

    try:
        models = base_models(spec, words)
    except ValidationError as error:
        refuse("what was applied over the spec file", error)
        models = spec.models
    changed: list[ModelSpec] = []
    for model in models:
        try:
            changed.append(_changed(model, words))
        except ValidationError as error:
            refuse(f"what operators set for {model.name}", error)
            changed.append(model)
    return spec.model_copy(update={"models": tuple(changed)}), problems


def base_models(spec: ClusterSpec, words: Words) -> Sequence[ModelSpec]:
    """The models of the spec, or of `headrace apply`, before single values are changed."""
    if words.models is None or words.models.spec != models_digest(spec.models):
        return spec.models
    return [ModelSpec.model_validate(data) for data in words.models.value]


def models_digest(models: Sequence[ModelSpec]) -> str:
    """Equal for equal models."""
    data = [model.model_dump(mode="json", exclude_defaults=True) for model in models]  # a new key changes nothing
    return blake2b(repr(data).encode(), digest_size=16).hexdigest()


def differences(before: Sequence[ModelSpec], after: Sequence[ModelSpec]) -> list[str]:
    """What changes from one list of models to another, a line each."""
    old = {model.name: model.model_dump(mode="json") for model in before}
    new = {model.name: model.model_dump(mode="json") for model in after}
    found = [f"{name}: ends" for name in old if name not in new]
    found += [f"{name}: a new model" for name in new if name not in old]
    for name in new.keys() & old.keys():
        changed = [key for key in new[name] if new[name][key] != old[name][key]]
        found += [f"{name}: {key} {_text(old[name][key])} → {_text(new[name][key])}" for key in changed]
    return sorted(found)


def lost_to(spec: ClusterSpec, words: Words, digest: Digest) -> list[str]:
    """What replicas of the spec in the record would end or be built again with `spec`, a line each; empty: none."""
    if words.spec is None:
        return []
    try:
        models = tuple(ModelSpec.model_validate(data) for data in words.spec.models)
    except ValidationError:
        return ["its models are those of another version of Headrace"]
    before, after = (usable_spec(each, words)[0] for each in (spec.model_copy(update={"models": models}), spec))
    kept = {name: each.digest for name, each in wanted_replicas(after, words, digest).items()}
    replicas = wanted_replicas(before, words, digest).items()
    lost = sorted({each.model.name for name, each in replicas if kept.get(name) != each.digest})
    named = ([model for model in each.models if model.name in lost] for each in (before, after))
    return differences(*named) or [f"{name}: its replicas are built again" for name in lost]


def _text(value: object) -> str:
    return "none" if value is None else msgspec.json.encode(value).decode()


def pool_key(model: ModelSpec, role: Role) -> str:
    """How `headrace scale` names a pool: 'smollm2', or 'smollm2.prefill'."""
    return model.name if model.prefill is None else f"{model.name}.{role}"


def _changed(model: ModelSpec, words: Words) -> ModelSpec:
    data = model.model_dump(mode="json")
    before = repr(data)
    for key, word in words.settings.get(model.name, {}).items():
        if data.get(key) == word.spec:
            data[key] = word.value
    for pool in model.pools:
        scale = words.scales.get(pool_key(model, pool.role))
        if scale is not None and scale.spec == pool.replicas:
            (data if model.prefill is None else data[str(pool.role)])["replicas"] = scale.value
    return model if repr(data) == before else ModelSpec.model_validate(data)


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
                plain = digest(name, shaped, 0)
                given = roll if roll is not None and roll.of == plain else None
                seconds = words.drained.get(name, given.seconds if given else spec.health.drain_seconds)
                found[name] = Wanted(
                    name,
                    shaped,
                    Role(word.role) if word is not None and word.spec == pool.role else pool.role,
                    pool.role,
                    digest(name, shaped, roll.number) if roll else plain,
                    plain,
                    name in words.drained,
                    seconds,
                    given is not None and given.allow_gap,
                )
    return found
