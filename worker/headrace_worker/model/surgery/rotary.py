"""The angles of rotary embeddings in one operation."""

from torch import Tensor, nn

import headrace_kernels.ops as ops
from headrace_worker.model.surgery.verify import TOKENS, agrees, random_input

_STEP = 9973  # between the positions that are compared
_CHANGING = ("dynamic", "longrope")  # frequencies follow the longest position of a call


class FusedRotary(nn.Module):
    """cos and sin of positions times fixed frequencies."""

    def __init__(self, frequencies: Tensor, factor: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.inv_freq: Tensor
        self.factor = factor

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids [1, T] -> two of [1, T, R] in x's format."""
        cos, sin = ops.rope_angles(position_ids[0], self.inv_freq, self.factor, x.dtype)
        return cos[None], sin[None]


def fuse_rotary(module: nn.Module) -> FusedRotary | None:
    """The replacement of a rotary embedding with one set of frequencies that do not change, and one position of each
    token, or None.
    """
    frequencies, factor = getattr(module, "inv_freq", None), getattr(module, "attention_scaling", None)
    if not isinstance(frequencies, Tensor) or frequencies.dim() != 1 or not isinstance(factor, (int, float)):
        return None
    changing = any(word in str(getattr(module, "rope_type", "")) for word in _CHANGING)
    if changing or hasattr(module, "mrope_section"):  # which has a position for each of three axes
        return None
    fused = FusedRotary(frequencies, float(factor))
    x = random_input(frequencies, 1, TOKENS, 1)
    positions = (frequencies.new_zeros(TOKENS).long() + 1).cumsum(0)[None] * _STEP
    for place in (0, 1):
        if not agrees(lambda place=place: module(x, positions)[place], lambda place=place: fused(x, positions)[place]):  # type: ignore[misc]
            return None
    return fused
