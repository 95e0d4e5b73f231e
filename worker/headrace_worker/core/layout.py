"""Shape of the paged KV cache: cache groups over one pool of equally large blocks.

A *cache group* is a set of layers with the same attention span and KV shape. Every group has the same number of
layers (groups are split until this holds), so one block, whichever group owns it, has the same size, and one pool
serves all groups: block b of layer slot i is ``pool[i][:, b]``, used by layer ``group.layers[i]`` of b's owner.
"""

from math import prod

from msgspec import Struct

LAYOUT_VERSION = 1


class CacheGroupSpec(Struct, frozen=True):
    """One group: model layer indices in order, KV heads and head size per layer on this rank, span in tokens."""

    index: int
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int = 0  # tokens a query attends to, itself included; 0 = all


class StateSpec(Struct, frozen=True):
    """One kind of recurrent state of one layer on this rank, per sequence."""

    layer: int
    kind: str  # "conv": the last inputs of a convolution, in the model's dtype; "recurrent": in float32
    shape: tuple[int, ...]

    def size(self, element_bytes: int) -> int:
        """Bytes. element_bytes: of the model's dtype."""
        return prod(self.shape) * (element_bytes if self.kind == "conv" else 4)


class CacheLayout(Struct, frozen=True):
    """All groups of a model on one rank, and the states of its recurrent layers.

    Per layer slot the pool is a tensor [2, blocks, kv_heads, block_size, head_dim]: keys, then values.
    """

    block_size: int
    groups: tuple[CacheGroupSpec, ...]
    element_bytes: int
    states: tuple[StateSpec, ...] = ()

    @property
    def layers_per_group(self) -> int:
        """Layer slots of the pool: with several pipeline stages a group may have fewer layers on this rank."""
        return max(len(group.layers) for group in self.groups)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence."""
        return sum(state.size(self.element_bytes) for state in self.states)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layer slots, keys and values."""
        group = self.groups[0]
        return 2 * self.layers_per_group * group.num_kv_heads * self.block_size * group.head_dim * self.element_bytes
