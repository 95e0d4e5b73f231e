"""The invariants of a replica: after every command and step, and when it is idle."""

from typing import TYPE_CHECKING

from headrace_worker.core.transfer.exchange import Outbound
from headrace_worker.core.transfer.granting import lease
from headrace_worker.core.transfer.messages import Commit, Offer
from support.simulation.world import InvariantViolation

if TYPE_CHECKING:
    from support.simulation.sim_replica import SimReplica


class Invariants:
    """Each check raises InvariantViolation; the engine's own checks raise RuntimeError."""

    def __init__(self, replica: "SimReplica") -> None:
        self._replica = replica

    def always(self) -> None:
        """After every command and every step. Raises."""
        exchange, pool, states = self._replica.engine.exchange, self._replica.kv.pool, self._replica.kv.states
        self._replica.scheduler.check(exchange.held(), exchange.held_slots())
        for worker in self._replica.ranks.transfer_workers:
            loads, windows = worker.states_in_loads(), len(worker.shadow.windows)
            blocks = {block for load in worker.loading for row in load.blocks[:windows] for block in row}
            if loads - set(exchange.offload.held_slots()) or blocks - set(exchange.offload.held()):
                raise InvariantViolation(f"loads may still write {loads | blocks}, but they are not all held")
        for exposure in self._replica.ranks.exposures.values():
            loose = exposure.blocks - set(exchange.fetcher.held()) - pool._quarantined
            if states is not None:
                loose |= exposure.slots - set(exchange.fetcher.held_slots()) - states.pool._quarantined
            if loose:
                raise InvariantViolation(f"blocks {loose} may still be written, but are neither held nor quarantined")

    def leases(self, now: float) -> None:
        """After a turn, which checks deadlines: no fetch is silent or runs for too long, no grant exceeds its lease."""
        fetcher, granter = self._replica.engine.exchange.fetcher, self._replica.engine.exchange.granter
        for fetch in fetcher._fetches.values():
            if now >= fetch.deadline or fetcher.peers.is_silent(fetch.peer, fetch.started, now):
                raise InvariantViolation(f"{self._replica.name} waits for fetch {fetch.number} beyond its time")
        for peer in {grant.peer for grant in granter._grants.values()}:
            if now - granter._peers[peer].last_received > lease(granter._peers[peer].told):
                raise InvariantViolation(f"{self._replica.name} holds grants of {peer} beyond their lease")

    def commits(self, outbound: Outbound) -> None:
        """A chunk is committed when its step is known to have succeeded, or was cached when it was offered."""
        cached = {
            (peer, message.fetch, message.chunk)
            for peer, message in outbound.to_targets
            if isinstance(message, Offer) and message.computed
        }
        for peer, message in outbound.to_targets:
            known = self._replica.engine.exchange.granter._peers.get(peer)
            if isinstance(message, Commit) and known and (peer, message.fetch, message.chunk) not in cached:
                step = self._replica.ranks.computed_in.get((known.number, message.fetch, message.chunk))
                if step not in self._replica.ranks.collected:
                    raise InvariantViolation(
                        f"{self._replica.name} commits {message} to {peer}, computed in step {step}, too early"
                    )

    def idle(self) -> None:
        """When no event is left. Raises."""
        exchange, pool = self._replica.engine.exchange, self._replica.kv.pool
        states = self._replica.kv.states
        left = {
            "used slots": states.pool.used if states is not None else 0,
            "quarantined slots": states.pool.quarantined if states is not None else 0,
            "used blocks": pool.used,
            "quarantined blocks": pool.quarantined,
            "fetches": len(exchange.fetcher),
            "grants": len(exchange.granter),
            "orders": len(exchange.fetcher.orders) + len(exchange.granter.orders),
            "requests": len(self._replica.engine._requests),
            "queued": len(self._replica.scheduler.waiting),
            "running": len(self._replica.scheduler.running),
            "exposed chunks": len(self._replica.ranks.exposures),
            "copies of evicted blocks": len(exchange.offload._copying),
            "pinned slots": len(exchange.offload.files._pins)
            + sum(len(tier.slots._pins) for tier in exchange.offload.tiers),
        }
        known = {peer.number for peer in exchange.fetcher.peers._peers.values()}
        known |= {peer.number for peer in exchange.granter._peers.values()}
        for worker in self._replica.ranks.transfer_workers:
            left["unknown peers"] = len(set(worker.peers) - known)
            left["reads of transfer workers"] = len(worker.reading) + len(worker._ending)
        found = {name: count for name, count in left.items() if count}
        if found:
            raise InvariantViolation(f"{self._replica.name} keeps {found}")
