"""What a rank has loaded, as all ranks of its replica compare it before they serve."""

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from headrace_base.errors import HeadraceError
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.model.load import LoadedModel

_PACKAGES = ("headrace", "torch", "transformers", "llguidance")
_REMEDY = "give every node of the replica the same packages and the same model files, and start it again"


class RanksDifferError(HeadraceError):
    """The ranks of a replica have not loaded the same: together they would compute wrong tokens."""


def loaded_facts(config: ReplicaConfig, model: LoadedModel) -> dict[str, str]:
    """Facts that are equal on all ranks of a replica, by name; not what depends on a rank's part of the model."""
    packages = {f"version of {name}": version(name) for name in _PACKAGES}
    return packages | {
        "revision of the model": model.source.revision,
        "content of the model's files": model.source.digest,
        "format of weights": model.arithmetic,
        "format of keys and values": model.kv_dtype_name,
        "layout": f"tp {config.tp}, pp {config.pp}, {'whole' if config.ep else 'divided'} experts, "
        f"blocks of {model.layout.block_size}",
        "deterministic computation": str(config.deterministic),
    }


def describe_difference(facts: Sequence[Mapping[str, str]]) -> str:
    """A sentence that names the ranks that differ from most others, and in what; empty when none does.

    facts: of each rank, in rank order.
    """
    names = dict.fromkeys(name for rank in facts for name in rank)
    found: list[str] = []
    for name in names:
        values = [rank.get(name, "unknown") for rank in facts]
        usual = Counter(values).most_common(1)[0][0]  # a tie takes the value of the lowest rank
        found += [
            f"rank {rank} has another {name} ({value[:80]}, not {usual[:80]})"
            for rank, value in enumerate(values)
            if value != usual
        ]
    more = f", and {len(found) - 4} more" if len(found) > 4 else ""
    return f"The ranks of this replica differ: {'; '.join(found[:4])}{more}: {_REMEDY}." if found else ""
