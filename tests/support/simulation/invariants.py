"""The invariants of a replica: after every command and step, and when it is idle."""

from typing import TYPE_CHECKING

from headrace_worker.core.transfer.exchange import Outbound
from headrace_worker.core.transfer.messages import Commit
from headrace_worker.core.transfer.orders import ClosePair, Drop, Receive
from support.simulation.world import InvariantViolation

if TYPE_CHECKING:
    from support.simulation.sim_replica import SimReplica


class Invariants:
    """Each check raises InvariantViolation; the engine's own checks raise RuntimeError."""

    def __init__(self, replica: "SimReplica") -> None:
        self._replica = replica

    def always(self) -> None:
        """After every command and every step. Raises."""
        exchange, pool = self._replica.engine.exchange, self._replica.kv.pool
        self._replica.scheduler.check(exchange.held())
        for exposure in self._replica.ranks.exposures.values():
            order = exposure.order
            if isinstance(order, Receive):
                loose = exposure.blocks - set(exchange.fetcher.held()) - pool._quarantined
                if loose:
                    raise InvariantViolation(
                        f"blocks {loose} may still be received, but are neither held nor quarantined"
                    )
            else:
                self._check_send(order.pair, order.fetch, exposure.blocks)

    def _check_send(self, pair: int, fetch: int, blocks: set[int]) -> None:
        """Blocks that may still be read are held by their grant, or the next plan ends their transfer first."""
        granter = self._replica.engine.exchange.granter
        ending = ClosePair(pair) in granter.orders or Drop(pair, fetch) in granter.orders
        peers = [peer for peer, known in granter._peers.items() if known.pair == pair]
        grant = granter._grants.get((peers[0], fetch)) if peers else None
        if ending:
            return
        if grant is None:
            raise InvariantViolation(f"blocks {blocks} of fetch {fetch} may still be sent, but nothing holds them")
        request = grant.request
        if request is not None and (request.finish is not None or request.table is not grant.table):
            return  # cancelled: the next plan drops it
        table = grant.table
        if table is None or not blocks <= set(table.held()):
            raise InvariantViolation(
                f"blocks {blocks} of fetch {fetch} may still be sent, but its grant does not hold them"
            )

    def leases(self, now: float) -> None:
        """After a turn, which checks deadlines: no fetch is silent or runs for too long, no grant exceeds its lease."""
        fetcher, granter = self._replica.engine.exchange.fetcher, self._replica.engine.exchange.granter
        for fetch in fetcher._fetches.values():
            if now >= fetch.deadline or now - fetch.last_received > fetcher.limits.silence:
                raise InvariantViolation(f"{self._replica.name} waits for fetch {fetch.number} beyond its time")
        for peer in {grant.peer for grant in granter._grants.values()}:
            if now - granter._peers[peer].last_received > granter.limits.lease:
                raise InvariantViolation(f"{self._replica.name} holds grants of {peer} beyond their lease")

    def commits(self, outbound: Outbound) -> None:
        """A chunk is committed only when its step is known to have succeeded."""
        for peer, message in outbound.to_targets:
            known = self._replica.engine.exchange.granter._peers.get(peer)
            if isinstance(message, Commit) and known is not None:
                step = self._replica.ranks.computed_in.get((known.pair, message.fetch, message.chunk))
                if step not in self._replica.ranks.collected:
                    raise InvariantViolation(
                        f"{self._replica.name} commits {message} to {peer}, computed in step {step}, too early"
                    )

    def idle(self) -> None:
        """When no event is left. Raises."""
        exchange, pool = self._replica.engine.exchange, self._replica.kv.pool
        left = {
            "used blocks": pool.used,
            "quarantined blocks": pool.quarantined,
            "fetches": len(exchange.fetcher),
            "grants": len(exchange.granter),
            "orders": len(exchange.fetcher.orders) + len(exchange.granter.orders),
            "requests": len(self._replica.engine._requests),
            "queued": len(self._replica.scheduler.waiting),
            "running": len(self._replica.scheduler.running),
            "exposed chunks": len(self._replica.ranks.exposures),
        }
        known = {peer.pair for peer in exchange.fetcher.peers._peers.values()}
        known |= {peer.pair for peer in exchange.granter._peers.values()}
        for worker in self._replica.ranks.transfer_workers:
            left["unknown pairs"] = len(set(worker.connections) - known)
            left["live fetches of transfer workers"] = sum(
                len(connection.live) for connection in worker.connections.values()
            )
        found = {name: count for name, count in left.items() if count}
        if found:
            raise InvariantViolation(f"{self._replica.name} keeps {found}")
