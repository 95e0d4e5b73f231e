"""A linear layer that stores its weight in the fastest layout for its device."""

import torch
from torch import Tensor, nn
from torch.nn import functional

# From this many inputs on, oneDNN splits the sum of a single row, but not of more rows, over threads: torch 2.13.
_SPLIT_FROM = 1024


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` for inference: weight [out, in], bias [out] or None.

    On a CPU in float32 the weight is packed once in oneDNN's layout, and only that copy is kept: the caller drops its
    own reference. Elsewhere the weight stays unchanged.

    Packed, a row's result does not depend on the number of rows: a single row is computed twice if oneDNN would sum it
    in another order (5-10 % slower, and fp32 tokens are then the same alone and in any batch).
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = _pack(weight.detach())
        self.register_buffer("weight", weight.detach() if self._packed is None else None)
        self.register_buffer("bias", bias.detach() if bias is not None else None)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if self._packed is not None:
            if self.in_features >= _SPLIT_FROM and x.numel() == self.in_features:
                pair = x.reshape(1, -1).expand(2, -1)
                return self._multiply(pair)[:1].view(*x.shape[:-1], self.out_features)
            return self._multiply(x)
        assert self.weight is not None
        return functional.linear(x, self.weight, self.bias)

    def _multiply(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        form = "unpacked" if self._packed is None else "oneDNN"
        return f"in_features={self.in_features}, out_features={self.out_features}, weight={form}"


def _pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's blocked layout, for any number of rows; None if it does not apply."""
    if not weight.is_cpu or weight.dtype is not torch.float32 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed
