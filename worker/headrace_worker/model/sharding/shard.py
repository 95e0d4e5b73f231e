"""Reduces a model on meta to one rank's part, and later connects it with the other ranks.

    build ──▶ shard: other stages out, modules shrunk ──▶ weights by slice ──▶ surgery ──▶ connect ──▶ runner

Between shard and connect there is no communication: surgery gets plain modules of the rank's size, and compares parts.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace_base.errors import ModelUnsupportedError
from headrace_worker.comm.parallel_context import ParallelContext
from headrace_worker.core.transfer.shards import Span
from headrace_worker.model.packable import is_experts
from headrace_worker.model.sharding import strings
from headrace_worker.model.sharding.cuts import (
    Cut,
    Cuts,
    ceiling,
    cut_shape,
    even,
    in_units,
    kv_heads,
    query_heads,
    scaled,
)
from headrace_worker.model.sharding.modules import Reduced, ShardedExperts, SharedNorm, VocabEmbedding, VocabHead
from headrace_worker.model.sharding.places import kv_shapes
from headrace_worker.model.sharding.recurrent import is_recurrent, recurrent_rule, section_spans
from headrace_worker.model.sharding.stages import replace_other_stages

_LAYER = re.compile(r"\.(\d+)\.")  # the index of a layer in the name of a module


@dataclass(slots=True)
class Sharding:
    """The sharding of a model: how each tensor is cut, and the modules to connect."""

    shapes: dict[str, tuple[int, ...]]  # shapes of the whole model's parameters and persistent buffers
    cuts: dict[str, Cuts] = field(default_factory=dict)  # by the same names; other tensors are whole
    zeros: set[str] = field(default_factory=set)  # biases that another rank adds
    _links: list[tuple[str, Callable[[nn.Module], nn.Module]]] = field(default_factory=list)

    def link(self, name: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self._links.append((name, wrap))

    def connect(self, model: nn.Module) -> None:
        """Wrap sharded modules in the communicating ones. Once, after surgery."""
        for name, wrap in self._links:
            model.set_submodule(name, wrap(model.get_submodule(name)))
        self._links.clear()


def shard(model: PreTrainedModel, parallel: ParallelContext, device: torch.device, unit: int = 1) -> Sharding:
    """Shard a model on meta in place. Raises ModelUnsupportedError with the reason when it cannot be sharded so.

    unit: of the inner dimensions of MLPs and experts, inputs that have one scale in the checkpoint.
    """
    sharding = Sharding({name: tuple(entry.shape) for name, entry in model.state_dict().items()})
    replace_other_stages(model, parallel, device)
    has_experts = any(is_experts(module) for module in model.modules())
    if parallel.ep and not has_experts:
        raise ModelUnsupportedError(f"{model.config.model_type} has no routed experts: serve it without --ep.")
    if parallel.tp.size > 1:
        _Cutter(model, parallel, sharding, unit).run()
    return sharding


class _Cutter:
    """One pass over the modules of a model."""

    def __init__(self, model: PreTrainedModel, parallel: ParallelContext, sharding: Sharding, unit: int) -> None:
        self._model, self._sharding, self._unit = model, sharding, unit
        self._parallel, self._tp = parallel, parallel.tp
        self._rank, self._ranks = parallel.tp.rank, parallel.tp.size
        config: Any = model.config
        self._strings = strings.ShardStrings(config)
        self._shapes = kv_shapes(config)

    def _counts(self, name: str) -> tuple[int, int]:
        """Query and KV heads of the layer that a module belongs to; latents are for all query heads."""
        found = _LAYER.search(f".{name}.")
        shape = self._shapes[int(found[1]) if found else 0]
        return shape.queries, shape.heads if shape.value else shape.queries

    def _heads(self, name: str) -> Span:
        """Query heads of this rank, in the layer of a module."""
        return query_heads(*self._counts(name), self._rank, self._ranks)

    def _kv(self, name: str) -> Span:
        return kv_heads(*self._counts(name), self._rank, self._ranks)

    def run(self) -> None:
        base = next(name for name, module in self._model.named_modules() if module is self._model.base_model)
        prefix = f"{base}." if base else ""
        recurrent: list[str] = []  # prefixes of names: transformers' plans compute these layers whole on every rank
        for name, module in list(self._model.named_modules()):
            if name.startswith(tuple(recurrent)):
                continue
            relative = name.removeprefix(prefix)
            kind = self._strings.kind(relative)
            if is_recurrent(module):
                self._cut_recurrent(name, module)
                recurrent.append(f"{name}.")
                continue
            if is_experts(module):
                self._cut_experts(name, module, kind)
            elif _is_batched(module):
                self._cut_batched(name, module)
                continue
            elif isinstance(module, nn.Linear):
                self._cut_linear(name, module, kind)
                continue
            for leaf in module._parameters:
                if self._strings.kind(f"{relative}.{leaf}") == strings.PER_HEAD:
                    self._cut(name, module, leaf, Cut(0, (self._heads(name),)))
        for name, module in self._model.named_modules():
            if _is_attention(name, module):
                self._localise_attention(name, module)
        self._cut_vocabulary()

    def _cut(self, name: str, module: nn.Module, leaf: str, *cuts: Cut) -> None:
        parameter = module._parameters[leaf]
        assert parameter is not None
        small = torch.empty(cut_shape(parameter.shape, cuts), dtype=parameter.dtype, device="meta")
        module._parameters[leaf] = nn.Parameter(small, requires_grad=False)
        self._sharding.cuts[f"{name}.{leaf}"] = cuts

    def _cut_linear(self, name: str, linear: nn.Linear, kind: str) -> None:
        if kind == strings.ROWWISE:
            self._cut_inputs(name, linear, (self._inputs(name, linear),))
        elif kind != strings.WHOLE:
            self._cut_outputs(name, linear, self._outputs(name, linear, kind))

    def _cut_inputs(self, name: str, linear: nn.Linear, spans: tuple[Span, ...]) -> None:
        cut = Cut(1, spans)
        self._cut(name, linear, "weight", cut)
        linear.in_features = cut.size
        if self._rank:  # the bias is added once
            linear.register_parameter("bias", None)
        self._sharding.link(name, lambda inner: Reduced(inner, self._tp))

    def _cut_outputs(self, name: str, module: nn.Linear | nn.Conv1d, spans: tuple[Span, ...]) -> None:
        cut = Cut(0, spans)
        self._cut(name, module, "weight", cut)
        if module.bias is not None:
            self._cut(name, module, "bias", cut)
        if isinstance(module, nn.Linear):
            module.out_features = cut.size
        else:  # depthwise
            module.in_channels = module.out_channels = module.groups = cut.size

    def _cut_recurrent(self, name: str, layer: nn.Module) -> None:
        rule = recurrent_rule(layer, self._model.config.model_type)
        even(rule.units, self._rank, self._ranks, rule.unit)
        for leaf, sections in (rule.parts | rule.inputs).items():
            part, spans = getattr(layer, leaf, None), section_spans(sections, self._rank, self._ranks)
            if isinstance(part, nn.Linear) and leaf in rule.inputs:
                self._cut_inputs(f"{name}.{leaf}", part, spans)
            elif isinstance(part, nn.Linear | nn.Conv1d):
                self._cut_outputs(f"{name}.{leaf}", part, spans)
            elif isinstance(part, nn.Module):
                self._cut_group_norm(f"{name}.{leaf}", part, spans)
            elif isinstance(part, nn.Parameter):
                self._cut(name, layer, leaf, Cut(0, spans))
            elif part is not None:
                setattr(layer, leaf, Cut(0, spans).size)

    def _cut_group_norm(self, name: str, norm: Any, spans: tuple[Span, ...]) -> None:
        cut, group = Cut(0, spans), int(norm.group_size)
        self._cut(name, norm, "weight", cut)
        if cut.size < group:
            norm.group_size, eps = cut.size, float(norm.variance_epsilon)
            self._sharding.link(name, lambda inner: SharedNorm(inner, self._tp, group, eps))

    def _outputs(self, name: str, linear: nn.Linear, kind: str) -> tuple[Span, ...]:
        heads, kv = self._counts(name)
        leaf, size = name.rpartition(".")[2], linear.out_features
        if kind == strings.PACKED_QKV:
            head, keys = size // (heads + 2 * kv), self._kv(name)
            sections = ((self._heads(name), 0), (keys, heads * head), (keys, (heads + kv) * head))
            return tuple(scaled(span, head, offset) for span, offset in sections)
        if kind == strings.PACKED_PAIR:
            half = size // 2
            span = self._share(half, "inner dimensions of an MLP")
            return span, scaled(span, 1, half)
        if leaf in ("k_proj", "v_proj"):
            return (scaled(self._kv(name), size // kv),)
        if leaf == "q_proj" or kind == strings.PER_HEAD:
            return (scaled(self._heads(name), size // heads),)
        if self._is_in_attention(name):
            return (even(size, self._rank, self._ranks, f"outputs of {leaf}"),)
        return (self._share(size, f"outputs of {leaf}"),)

    def _inputs(self, name: str, linear: nn.Linear) -> Span:
        leaf, size = name.rpartition(".")[2], linear.in_features
        if self._is_in_attention(name):
            return scaled(self._heads(name), size // self._counts(name)[0])
        return self._share(size, f"inputs of {leaf}")

    def _is_in_attention(self, name: str) -> bool:
        parent = name.rpartition(".")[0]
        return _is_attention(parent, self._model.get_submodule(parent))

    def _share(self, size: int, what: str) -> Span:
        """This rank's span of an inner dimension, over which the ranks' results are summed."""
        return in_units(size, self._rank, self._ranks, self._unit, what)

    def _cut_experts(self, name: str, module: Any, kind: str) -> None:
        """Experts [E, ...]: some of them whole, or a part of the inner dimension of each."""
        if self._parallel.ep:
            span = even(int(module.num_experts), self._rank, self._ranks, "experts")
            for leaf in list(module._parameters):
                self._cut(name, module, leaf, Cut(0, (span,)))
            module.num_experts = span[1] - span[0]
            module._is_expert_parallel = True
            self._sharding.link(name, lambda inner: ShardedExperts(inner, self._tp, span))
            return
        if kind != strings.EXPERTS:
            raise ModelUnsupportedError(
                f"The experts of {self._model.config.model_type} have no tensor-parallel plan: serve it with --ep, or "
                "with --tp 1."
            )
        outer, inner = (2, 1) if module.is_transposed else (1, 2)  # dimensions of up's outputs and down's inputs
        size = int(module.down_proj.shape[inner])
        share = self._share(size, "inner dimensions of an expert")
        up = "gate_up_proj" if module.has_gate else "up_proj"
        spans: tuple[Span, ...] = (share,)
        if module.has_gate:
            spans = (share, scaled(share, 1, size)) if module.is_concatenated else (scaled(share, 2),)
        self._cut(name, module, up, Cut(outer, spans))
        self._cut(name, module, "down_proj", Cut(inner, (share,)))
        if module.has_bias:
            self._cut(name, module, f"{up}_bias", Cut(1, spans))
            if self._rank:
                self._sharding.zeros.add(f"{name}.down_proj_bias")
        for attribute in ("intermediate_dim", "intermediate_size"):
            if hasattr(module, attribute):
                setattr(module, attribute, share[1] - share[0])
        self._sharding.link(name, lambda inner: ShardedExperts(inner, self._tp, None))

    def _cut_batched(self, name: str, module: Any) -> None:
        """Experts as batches of matrices [E, N, 2 * I] and [E, I, N]: a part of the inner dimension of each."""
        size = int(module.expert_dim)
        share = self._share(size, "inner dimensions of an expert")
        self._cut(name, module, "gate_up_proj", Cut(2, (share, scaled(share, 1, size))))
        self._cut(name, module, "down_proj", Cut(1, (share,)))
        module.expert_dim = share[1] - share[0]
        self._sharding.link(name, lambda inner: Reduced(inner, self._tp))

    def _localise_attention(self, name: str, module: nn.Module) -> None:
        """Set this rank's head counts in an attention module."""
        keys = "k_proj" if hasattr(module, "k_proj") else "q_proj"  # keys may be those of an earlier layer
        leaves = (keys, "qkv_proj", "query_key_value", "kv_b_proj")
        if not any(f"{name}.{leaf}.weight" in self._sharding.cuts for leaf in leaves):
            raise ModelUnsupportedError(
                f"The tensor-parallel plan of {self._model.config.model_type} does not split its attention: serve it "
                "with --tp 1."
            )
        head_dim = getattr(module, "head_dim", None)
        for norm in ("q_norm", "k_norm"):
            weight = getattr(getattr(module, norm, None), "weight", None)
            if weight is not None and tuple(weight.shape) != (head_dim,):
                raise ModelUnsupportedError(
                    f"{norm} of {self._model.config.model_type} spans all heads, which cannot be split: use --tp 1."
                )
        heads, kv = (stop - start for start, stop in (self._heads(name), self._kv(name)))
        config: Any = self._model.config
        if getattr(config, "is_heterogeneous", False):
            config = config.per_layer_config[int(getattr(module, "layer_idx"))]  # noqa: B009
        config = copy.copy(config)
        config.num_attention_heads, config.num_key_value_heads = heads, kv
        local = {
            "num_heads": heads,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "num_key_value_groups": heads // kv,
            "config": config,
        }
        for attribute, value in local.items():
            if hasattr(module, attribute):
                setattr(module, attribute, value)

    def _cut_vocabulary(self) -> None:
        for module, is_head in (
            (self._model.get_input_embeddings(), False),
            (self._model.get_output_embeddings(), True),
        ):
            if not isinstance(module, (nn.Embedding, nn.Linear)):
                continue  # the module is on another stage
            name = next(entry for entry, found in self._model.named_modules() if found is module)
            size = int(module.weight.shape[0])
            span = ceiling(size, self._rank, self._ranks)
            if span[0] == span[1]:
                raise ModelUnsupportedError(f"tp {self._ranks} is too many for a vocabulary of {size}: use less.")
            for leaf, parameter in list(module._parameters.items()):
                if parameter is not None:
                    self._cut(name, module, leaf, Cut(0, (span,)))
            if isinstance(module, nn.Linear):
                module.out_features = span[1] - span[0]
            else:
                module.num_embeddings = span[1] - span[0]
                module.padding_idx = None
            if is_head:
                self._sharding.link(name, lambda inner, size=size: VocabHead(inner, self._tp, size))  # type: ignore[misc]
            else:
                self._sharding.link(name, lambda inner, span=span: VocabEmbedding(inner, self._tp, span))  # type: ignore[misc]


def _is_attention(name: str, module: nn.Module) -> bool:
    named = name.rpartition(".")[2] in ("self_attn", "attn", "attention") or hasattr(module, "k_proj")
    return named and hasattr(module, "layer_idx") and not is_recurrent(module)


def _is_batched(module: Any) -> bool:
    """Whether a module has the weights of all experts in two tensors, and computes them itself (Llama 4)."""
    return isinstance(getattr(module, "gate_up_proj", None), nn.Parameter) and hasattr(module, "expert_dim")
