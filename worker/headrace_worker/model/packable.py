"""Modules whose weights are packed for the CPU's kernels, in the bits of the checkpoint: codes, bfloat16 or float32.

They take the place of transformers' own while a model is changed. Until it is packed, a `PackableLinear` computes with
all of its values, which are made for each call: it is only called to compare a replacement with it.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import headrace_kernels.ops as ops
from headrace_kernels.packed import Codes, Form, PackedWeight, concatenate, pack_codes, pack_dense
from headrace_worker.model.latent import is_latent

_EXPANDED = 1 << 24  # values that are made of codes at once


class PackableMatrix:
    """A weight [out, in], which is packed once, for all modules that share it.

    order: [in], of the inputs that the columns of its codes belong to; None if they are in order. dtype: of the module
    that computes with it. on_gpu: its codes are multiplied there. rounding: the linears that it is of, if their inputs
    are rounded to 8 bits for its product. Codes of 4 bits are kept two in a byte.
    """

    def __init__(
        self,
        values: Codes | Tensor,
        form: Form,
        order: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        on_gpu: bool = False,
        rounding: tuple[str, ...] = (),
    ) -> None:
        self.shape = values.shape
        self.form, self.order = form, order
        self.dtype, self.on_gpu, self.rounding = dtype, on_gpu, rounding
        self._pairs = isinstance(values, Codes) and form.bits == 4 and self.shape[1] % 2 == 0
        if self._pairs and isinstance(values, Codes):
            values = replace(values, codes=values.codes[:, ::2] | values.codes[:, 1::2] << 4)
        self._values: Codes | Tensor | None = values
        self._packed: PackedWeight | None = None

    def to(
        self, device: torch.device, dtype: torch.dtype, *, on_gpu: bool = False, rounding: tuple[str, ...] = ()
    ) -> "PackableMatrix":
        """The same, not packed yet, on a device."""
        assert self._values is not None
        moved = copy(self)
        moved._values = self._values.to(device)
        moved.order = None if self.order is None else self.order.to(device)
        moved.dtype, moved.on_gpu, moved.rounding = dtype, on_gpu, rounding
        return moved

    def take(self, outputs: Tensor) -> "PackableMatrix":
        """The matrix of these outputs, in this order."""
        values = self.values.rows(outputs) if isinstance(self.values, Codes) else self.values[outputs]
        return PackableMatrix(
            values, self.form, self.order, dtype=self.dtype, on_gpu=self.on_gpu, rounding=self.rounding
        )

    @property
    def nbytes(self) -> int:
        """When it is packed; until then without the padding of its outputs."""
        if self._packed is not None:
            return self._packed.data.nbytes
        values = self._values
        assert values is not None
        if isinstance(values, Tensor):
            return values.nbytes
        scales = values.scale.nbytes * (1 if values.minimum is None else 2)
        return self.shape.numel() * self.form.bits // 8 + scales

    @property
    def values(self) -> Codes | Tensor:
        """Only until it is packed."""
        return self._rows(slice(None))

    def _rows(self, part: slice) -> Codes | Tensor:
        """The values of some outputs."""
        values = self._values
        assert values is not None
        if isinstance(values, Tensor):
            return values[part]
        values = values.rows(part)
        if self._pairs:
            codes = torch.stack([values.codes & 15, values.codes >> 4], -1).flatten(1)
            return replace(values, codes=codes)
        return values

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All values, made in parts."""
        columns = slice(None) if self.order is None else self.order.argsort()
        if self._packed is not None:
            return ops.packed_rows(self._packed, torch.arange(self.shape[0]))[:, columns].to(dtype)
        found = torch.empty(self.shape, dtype=dtype, device=self.device)
        rows = max(1, _EXPANDED // self.shape[1])
        for first in range(0, self.shape[0], rows):
            values = self._rows(slice(first, first + rows))
            found[first : first + rows] = (values if isinstance(values, Tensor) else values.dense())[:, columns]
        return found

    @property
    def device(self) -> torch.device:
        """The device of the matrix' values, and of what computes with them."""
        values = self._values
        if values is None:
            return torch.device("cpu")
        return (values if isinstance(values, Tensor) else values.scale).device

    def packed(self) -> PackedWeight:
        """Packs it, if that was not done."""
        if self._packed is None:
            values = self.values
            self._packed = pack_dense(values) if isinstance(values, Tensor) else pack_codes(values, self.form)
            self._values = None
        return self._packed


class PackableExperts:
    """The matrices [out, in] of a parameter of routed experts: [X, out, in], or [X, in, out] if transposed.

    Put into a module on a CPU they are packed at once, since none is merged with another.
    """

    def __init__(self, matrices: list[PackableMatrix], *, transposed: bool = False) -> None:
        self.matrices, self.transposed = matrices, transposed
        outputs, inputs = matrices[0].shape
        self.shape = (len(matrices), *((inputs, outputs) if transposed else (outputs, inputs)))

    @property
    def nbytes(self) -> int:
        """When they are packed."""
        return sum(matrix.nbytes for matrix in self.matrices)


class PackableLinear(nn.Linear):
    """A linear whose `weight` has the right shape and no values."""

    def __init__(self, matrix: PackableMatrix, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = matrix.shape
        self.matrix = matrix
        self.weight = _no_values(matrix)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return functional.linear(x, self.matrix.dense(x.dtype), self.bias)


class PackedLinear(nn.Module):
    """A linear with a packed weight. bf16: inputs are rounded to bfloat16, where the kernels can."""

    def __init__(self, linear: PackableLinear, bf16: bool = False) -> None:
        super().__init__()
        self.packed = linear.matrix.packed()
        self.bf16 = bf16 and self.packed.form is not Form.FLOAT32 and self.packed.inputs % 8 == 0
        self.weight: Tensor | None = None
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())
        self.order = linear.matrix.order

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if self.order is not None:
            x = x.index_select(-1, self.order)
        return ops.packed_matmul(x, self.packed, self.packed_bias(), self.bf16)

    def packed_bias(self) -> Tensor | None:
        """[out]"""
        bias = self.bias
        assert bias is None or isinstance(bias, Tensor)
        return bias

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        packed = self.packed
        return f"in_features={packed.inputs}, out_features={packed.outputs}, weight={packed.form.name}"


class LeftFactor(nn.Module):
    """A linear with a packed weight of which a family's forward computes weight @ x, for x [..., in, T]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = pack_dense(linear.weight.detach())
        self.bias = linear.bias

    @property
    def weight(self) -> "LeftFactor":
        """What the forward multiplies."""
        return self

    def __matmul__(self, x: Tensor) -> Tensor:
        return ops.packed_matmul(x.transpose(-1, -2), self.packed).transpose(-1, -2)


class PackedEmbedding(nn.Embedding):
    """An embedding that unpacks the rows of its tokens; as a base class also one that a family's own forward calls."""

    matrix: PackableMatrix

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [...] -> [..., N]."""
        return ops.packed_rows(self.matrix.packed(), input_ids)


def merge_packable(parts: Sequence[PackableMatrix]) -> PackableMatrix:
    """A matrix whose outputs are those of `parts`, concatenated.

    Codes beside other values become float32, and so do codes of several kinds, or with columns in several orders.
    """
    values = [part.values for part in parts]
    codes = [value for value in values if isinstance(value, Codes)]
    form = max((part.form for part in parts), key=lambda form: form.bits)
    order = parts[0].order
    merged: Codes | Tensor
    if not codes:
        merged = torch.cat([value for value in values if isinstance(value, Tensor)])
    elif (
        len(codes) == len(values)
        and len({code.kind for code in codes}) == 1
        and all(_equal(part.order, order) for part in parts)
    ):
        merged = concatenate(codes)
    else:
        merged, form, order = torch.cat([part.dense() for part in parts]), Form.FLOAT32, None
    named = all(part.rounding for part in parts)
    return PackableMatrix(
        merged,
        form,
        order,
        dtype=parts[0].dtype,
        on_gpu=all(part.on_gpu for part in parts),
        rounding=tuple(name for part in parts for name in part.rounding if named),
    )


def _equal(order: Tensor | None, other: Tensor | None) -> bool:
    return order is other or (order is not None and other is not None and torch.equal(order, other))


def can_be_packed(model: nn.Module, name: str) -> bool:
    """Whether this is the weight of a linear as transformers has it, of an embedding, or of routed experts behind
    transformers' interface, and only they read it.
    """
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if is_experts(owner):
        return leaf in ("gate_up_proj", "up_proj", "down_proj")
    # A family's own embedding scales the rows that torch's own finds.
    known = type(owner) in (nn.Linear, nn.Embedding) or (
        isinstance(owner, nn.Embedding) and "super().forward(" in _source(type(owner).forward)
    )
    if leaf != "weight" or not known:
        return False
    parent_name, _, child = owner_name.rpartition(".")
    return not reads_weight(model.get_submodule(parent_name), child)


def is_experts(module: nn.Module) -> bool:
    """Whether a module goes through transformers' experts interface."""
    return hasattr(module, "is_concatenated") and hasattr(module, "num_experts")


def put_packable(model: nn.Module, name: str, matrix: PackableMatrix | PackableExperts) -> None:
    """Puts a module with this matrix in the place of the one with this weight; its bias comes later, or was there. Of
    experts, `packable_experts` has the matrices of their parameters by name.
    """
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if isinstance(matrix, PackableExperts):
        for one in matrix.matrices:
            if not one.on_gpu:
                one.packed()
        owner._parameters[leaf] = _no_values(matrix)
        owner.__dict__.setdefault("packable_experts", {})[leaf] = matrix.matrices
        return
    if isinstance(owner, nn.Embedding):
        kind = type(owner)
        owner.__class__ = (
            PackedEmbedding if kind is nn.Embedding else type(f"Packed{kind.__name__}", (kind, PackedEmbedding), {})
        )
        assert isinstance(owner, PackedEmbedding)
        owner.weight, owner.matrix = _no_values(matrix), matrix
        return
    assert isinstance(owner, nn.Linear)
    packable = PackableLinear(matrix, None)
    packable.bias = owner.bias
    model.set_submodule(owner_name, packable.train(owner.training))


def _no_values(matrix: PackableMatrix | PackableExperts) -> nn.Parameter:
    """A parameter of the right shape, all NaN, so that nothing can use it by mistake."""
    first = matrix.matrices[0] if isinstance(matrix, PackableExperts) else matrix
    one = torch.full((1,) * len(matrix.shape), torch.nan, dtype=first.dtype, device=first.device)
    return nn.Parameter(one.expand(matrix.shape), requires_grad=False)


def reads_weight(parent: nn.Module, child: str) -> bool:
    """Whether a module's forward, or attention to its latents, reads the weight of one of its modules."""
    return (child == "kv_b_proj" and is_latent(parent)) or f"self.{child}.weight" in _source(type(parent).forward)


def multiplies_by_weight(parent: nn.Module, child: str) -> bool:
    """Whether a module's forward reads the weight of one of its modules as the left factor of a product alone."""
    source = _source(type(parent).forward)
    return 0 < source.count(f"self.{child}.weight") == source.count(f"self.{child}.weight @ ")


@cache
def _source(forward: Callable[..., Any]) -> str:
    """Without what runs in training alone."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):  # not from a file
        return ""
    return ast.unparse(_WithoutTraining().visit(tree))


class _WithoutTraining(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        tests = node.test.values if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And) else []
        training = any(ast.unparse(test) == "self.training" for test in (node.test, *tests))
        return node.orelse if training else node
