"""The description of a replica and its model for routers."""

from collections.abc import Iterator
from dataclasses import dataclass

from headrace_proto import replica_pb2 as pb

CHUNK_BYTES = 1 << 20


@dataclass(slots=True)
class Description:
    """The replica's facts as messages, and its tokenizer as the bytes of a tokenizer.json.

    Messages are replaced, never changed: other threads may be sending them.
    """

    facts: pb.ModelFacts
    tokenizer_json: bytes

    @property
    def identity(self) -> pb.ReplicaIdentity:
        return self.facts.identity

    def set_role(self, role: pb.Role) -> None:
        """Changes the role. From any thread."""
        facts = pb.ModelFacts()
        facts.CopyFrom(self.facts)
        facts.identity.role = role
        self.facts = facts

    def chunks(self, known_digest: bytes, *, facts_only: bool = False) -> Iterator[pb.DescribeChunk]:
        """The answer to Describe: facts, then the tokenizer unless the caller has it."""
        facts = self.facts
        yield pb.DescribeChunk(facts=facts)
        if facts_only or known_digest == facts.tokenizer_digest:
            return
        for start in range(0, len(self.tokenizer_json), CHUNK_BYTES):
            yield pb.DescribeChunk(tokenizer_json=self.tokenizer_json[start : start + CHUNK_BYTES])
