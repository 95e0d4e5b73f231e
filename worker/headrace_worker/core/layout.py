"""Shape of the paged KV cache: cache groups over one pool of equally large blocks.

A *cache group* is a set of layers with the same attention span and KV shape. One pool serves all groups, so that all
blocks have the same size, whichever group owns them. A block consists of *slots*, which have the size of the largest
layer's entry; layers of a group whose entries are smaller share one, as many as it has space for. Groups are split
until they have about equally many slots: block b of slot i is ``pool[i][b]``.
"""

from math import prod

from msgspec import Struct

LAYOUT_VERSION = 1


class CacheGroupSpec(Struct, frozen=True):
    """One group: model layer indices in order, and what each layer on this rank caches of a token.

    With multi-head latent attention a layer has one head, whose key contains the value.
    """

    index: int
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int  # entries of a head's key
    window: int = 0  # tokens a query attends to, itself included; 0 = all
    value_dim: int | None = None  # as keys; 0 = contained in the keys
    share: int = 1  # layers in one slot
    scale_bytes: int = 0  # with a cache of 8 bits: beside the keys of a head, and beside its values
    first_head: int = 0  # index, among the model's KV heads, of the first one on this rank

    @property
    def entries(self) -> tuple[int, int]:
        """Numbers of the keys and of the values of a token in a layer; with scales, bytes."""
        values = self.head_dim if self.value_dim is None else self.value_dim
        sizes = (size + self.scale_bytes if size else 0 for size in (self.head_dim, values))
        keys, values = (self.num_kv_heads * size for size in sizes)
        return keys, values

    @property
    def heads(self) -> tuple[int, int]:
        """The model's KV heads on this rank: the first one, and the one after the last."""
        return self.first_head, self.first_head + self.num_kv_heads

    @property
    def slots(self) -> int:
        return -(-len(self.layers) // self.share)


class StateSpec(Struct, frozen=True):
    """One kind of recurrent state of one layer on this rank, per sequence."""

    layer: int
    kind: str  # "conv": the last inputs of a convolution, in the model's dtype; "recurrent": in float32
    shape: tuple[int, ...]

    def size(self, element_bytes: int) -> int:
        """Bytes. element_bytes: of the model's dtype."""
        return prod(self.shape) * (element_bytes if self.kind == "conv" else 4)


class StatePart(Struct, frozen=True):
    """How one kind of state of a recurrent layer is divided among ranks: rows of sections, in the whole model.

    Of a section's units a rank has its share, or one that several ranks have alike.
    """

    kind: str
    rows: int
    sections: tuple[tuple[int, int], ...]  # units, and the entries of each

    def entry_bytes(self, element_bytes: int) -> int:
        """element_bytes: of the model's dtype."""
        return element_bytes if self.kind == "conv" else 4


class CacheLayout(Struct, frozen=True):
    """All groups of a model on one rank, and the states of its recurrent layers."""

    block_size: int
    groups: tuple[CacheGroupSpec, ...]
    element_bytes: int  # bytes of an element of the model's dtype
    states: tuple[StateSpec, ...] = ()
    state_parts: tuple[StatePart, ...] = ()  # parts of the state of each recurrent layer, in the whole model
    kv_format: str = ""  # format of keys and values of 8 bits: int8 or fp8

    @property
    def slots(self) -> int:
        """Slots of the pool. With several pipeline stages a group may have fewer slots on this rank."""
        return max(group.slots for group in self.groups)

    @property
    def slot_entries(self) -> tuple[int, int]:
        """Numbers of the keys and of the values of a token for which a slot has space."""
        sizes = [
            (group.share * keys, group.share * values) for group in self.groups for keys, values in [group.entries]
        ]
        return max(keys for keys, _ in sizes), max(values for _, values in sizes)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence."""
        return sum(state.size(self.element_bytes) for state in self.states)

    @property
    def entry_bytes(self) -> int:
        """Bytes of a number of keys and values."""
        return 1 if self.kv_format else self.element_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all slots, keys and values."""
        return self.slots * self.block_size * sum(self.slot_entries) * self.entry_bytes
