"""Changes to a model from outside: fewer, larger operations with the same results.

    load ──▶ norms ──▶ attention (q/k/v in one), DeltaNet (all in one) ──▶ MLP (gate/up in one) ──▶ experts
         ──▶ layers (residual + norm) ──▶ linears ──▶ runs of layers, once ranks are connected

Each piece is optional, recognises modules by structure, and a replacement is kept only if it computes the original's
numbers on a small random input. Modules that are not recognised stay unchanged.
"""

from headrace_worker.model.surgery.joined import join_layers
from headrace_worker.model.surgery.plan import SurgeryPlan, apply
from headrace_worker.model.surgery.scaled import rounded_linears

__all__ = ["SurgeryPlan", "apply", "join_layers", "rounded_linears"]
