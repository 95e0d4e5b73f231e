"""A linear layer in which a row's result depends on that row alone, bit for bit.

Libraries choose an algorithm, and with it an order of addition, by the shape of a product: a row alone and the same row
in a batch then differ in their last bits, which in 16-bit formats is enough to change a token. Here every product has
the same shape, whatever the batch.
"""

from torch import Tensor, nn
from torch.nn import functional

TILE_ROWS = 64
"""Rows of every product. More are wasted on a single row, fewer read the weight more often for a long prompt."""


class InvariantLinear(nn.Module):
    """``x @ weight.T + bias`` by tiles of a fixed number of rows: weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None, tile_rows: int = TILE_ROWS) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._tile_rows = tile_rows
        self.register_buffer("weight", weight.detach())
        self.register_buffer("bias", bias.detach() if bias is not None else None)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        rows = x.reshape(-1, self.in_features)
        count, tile = rows.shape[0], self._tile_rows
        out = rows.new_empty((count, self.out_features))
        whole = count - count % tile
        for start in range(0, whole, tile):
            out[start : start + tile] = functional.linear(rows[start : start + tile], self.weight, self.bias)
        if whole < count:
            last = rows.new_zeros((tile, self.in_features))
            last[: count - whole] = rows[whole:]
            out[whole:] = functional.linear(last, self.weight, self.bias)[: count - whole]
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, tile_rows={self._tile_rows}"
