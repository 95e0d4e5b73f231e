"""Policies that choose only the replica that decodes: whether another one computes the prompt is predicted for it."""

from abc import abstractmethod

from headrace_router.core.policy.disaggregate import choose_source
from headrace_router.core.policy.interface import Plan, Policy, Work
from headrace_router.core.policy.view import View


class ChosenTarget(Policy):
    """Implements `plan` by `choose`."""

    @abstractmethod
    def choose(self, view: View, work: Work) -> int:
        """The index of the best of at least one candidate."""

    def plan(self, view: View, sources: View, work: Work) -> Plan:
        target = self.choose(view, work)
        return Plan(target, choose_source(view, target, sources, work))
