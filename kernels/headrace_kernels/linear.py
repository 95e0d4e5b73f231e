"""A linear layer that keeps its weight in the form its device multiplies fastest."""

from torch import Tensor, nn
from torch.nn import functional


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` for inference: weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight.detach())
        self.register_buffer("bias", bias.detach() if bias is not None else None)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return functional.linear(x, self.weight, self.bias)
