"""The block hash: its definition, computed here by hand, and the inputs that it must distinguish."""

from dataclasses import replace
from random import Random

import pytest
from blake3 import blake3

from headrace_proto.block_hash import HASH_BYTES, BlockHasher, CacheScope, derive_key

SCOPE = CacheScope(b"salt", "model", "rev", "", "float32", "float32", 1, 16, 0)
HASHER = BlockHasher(derive_key(b"secret"))


def test_the_chain_follows_the_definition() -> None:
    key = blake3(b"secret", derive_key_context="headrace 2026 block hash v1").digest()
    fields = [b"salt", b"model", b"rev", b"", b"float32", b"float32"]
    fields += [number.to_bytes(8, "little") for number in (1, 16, 0)]
    parent = blake3(b"".join(len(f).to_bytes(4, "little") + f for f in fields), key=key).digest()[:16]
    tokens = list(range(40))
    expected = []
    for start in (0, 16):
        packed = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + 16])
        parent = blake3(parent + packed, key=key).digest()[:16]
        expected.append(parent)
    assert HASHER.chain(HASHER.root(SCOPE), tokens, 16) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"tenant_salt": b"salu"},
        {"model": "modem"},
        {"revision": "rew"},
        {"adapter": "a"},
        {"dtype": "bfloat16"},
        {"kv_dtype": "int8"},
        {"layout_version": 2},
        {"block_size": 32},
        {"group": 1},
        {"tenant_salt": b"saltm", "model": "odel"},  # the same bytes, cut elsewhere
    ],
)
def test_every_part_of_the_scope_counts(change: dict[str, object]) -> None:
    assert HASHER.root(replace(SCOPE, **change)) != HASHER.root(SCOPE)  # type: ignore[arg-type]


def test_other_secrets_give_other_hashes() -> None:
    other = BlockHasher(derive_key(b"secreu"))
    assert other.root(SCOPE) != HASHER.root(SCOPE)
    assert other.block(b"p" * 16, [1] * 16) != HASHER.block(b"p" * 16, [1] * 16)


def test_equal_prefixes_share_hashes_and_nothing_else_does() -> None:
    random = Random(3)
    root = HASHER.root(SCOPE)
    first = [random.randrange(2**32) for _ in range(160)]
    second = [*first[:100], *(random.randrange(2**32) for _ in range(60))]
    a, b = HASHER.chain(root, first, 16), HASHER.chain(root, second, 16)
    assert a[:6] == b[:6]
    assert not set(a[6:]) & set(b[6:])
    assert all(len(digest) == HASH_BYTES for digest in a)
    assert HASHER.chain(root, first[:15], 16) == []
