"""Changes to a model from outside: fewer, larger operations with the same results.

    load ──▶ norms ──▶ attention (q/k/v in one) ──▶ MLP (gate/up in one) ──▶ layers (residual + norm) ──▶ linears

Each piece is optional, recognises what it replaces by structure, and is kept only if it gives the original's numbers
on a small random input. What is not recognised stays as it is.
"""

from headrace_worker.model.surgery.plan import SurgeryPlan, apply

__all__ = ["SurgeryPlan", "apply"]
