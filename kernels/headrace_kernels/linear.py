"""A linear layer that keeps its weight in the form its device multiplies fastest."""

import torch
from torch import Tensor, nn
from torch.nn import functional

# From this many inputs on, oneDNN splits the sum of a single row over threads, and of no larger batch: measured, 2.13.
_SPLIT_FROM = 1024


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` for inference: weight [out, in], bias [out] or None.

    On a CPU in float32 the weight is laid out once as oneDNN wants it, and only that copy is kept: the caller drops its
    own reference. Elsewhere the weight stays as it is.

    Packed, a row's bits do not depend on how many rows come with it: a single row is computed twice where oneDNN would
    sum it in another order (5-10 % slower there, and fp32 tokens are then the same alone and in any batch).
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
        """What ``print(model)`` shows."""
        form = "as it is" if self._packed is None else "oneDNN"
        return f"in_features={self.in_features}, out_features={self.out_features}, weight={form}"


def _pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's blocked layout, for any number of rows; None where it does not apply."""
    if not weight.is_cpu or weight.dtype is not torch.float32 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed
