"""What must hold at a replica after every command and step, and when nothing is left to do (RELIABILITY I9, I10)."""

from typing import TYPE_CHECKING

from world import BrokenPromise

from headrace_worker.transfer.exchange import Outbound
from headrace_worker.transfer.messages import Commit
from headrace_worker.transfer.orders import ClosePair, Drop, Receive

if TYPE_CHECKING:
    from sim_replica import SimReplica


class Promises:
    """Each check raises BrokenPromise, or RuntimeError where the engine's own checks do."""

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
                    raise BrokenPromise(f"blocks {loose} may still be received, but are neither held nor quarantined")
            else:
                self._check_send(order.pair, order.fetch, exposure.blocks)

    def _check_send(self, pair: int, fetch: int, blocks: set[int]) -> None:
        """What may still be read is held by its grant, or its couriers are told to leave it before anything else."""
        granter = self._replica.engine.exchange.granter
        told = ClosePair(pair) in granter.orders or Drop(pair, fetch) in granter.orders
        peers = [peer for peer, known in granter._peers.items() if known.pair == pair]
        grant = granter._grants.get((peers[0], fetch)) if peers else None
        if told:
            return
        if grant is None:
            raise BrokenPromise(f"blocks {blocks} of fetch {fetch} may still be sent, but nothing holds them")
        request = grant.request
        if request is not None and (request.finish is not None or request.table is not grant.table):
            return  # given up: the next plan says so
        table = grant.table
        if table is None or not blocks <= set(table.held()):
            raise BrokenPromise(f"blocks {blocks} of fetch {fetch} may still be sent, but its grant does not hold them")

    def leases(self, now: float) -> None:
        """A turn has looked at the clock: whoever was silent for too long, or took too long, is given up."""
        fetcher, granter = self._replica.engine.exchange.fetcher, self._replica.engine.exchange.granter
        for fetch in fetcher._fetches.values():
            if now >= fetch.until or now - fetch.heard > fetcher.limits.silence:
                raise BrokenPromise(f"{self._replica.name} waits for fetch {fetch.number} beyond its time")
        for peer in {grant.peer for grant in granter._grants.values()}:
            if now - granter._peers[peer].heard > granter.limits.lease:
                raise BrokenPromise(f"{self._replica.name} holds grants of {peer} beyond their lease")

    def commits(self, outbound: Outbound) -> None:
        """A chunk is committed only when its step is known to have worked."""
        for peer, message in outbound.to_targets:
            known = self._replica.engine.exchange.granter._peers.get(peer)
            if isinstance(message, Commit) and known is not None:
                step = self._replica.ranks.computed_in.get((known.pair, message.fetch, message.chunk))
                if step not in self._replica.ranks.collected:
                    raise BrokenPromise(
                        f"{self._replica.name} commits {message} to {peer}, computed in step {step}, too early"
                    )

    def idle(self) -> None:
        """When nothing is left to do. Raises."""
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
        known = {peer.pair for peer in exchange.fetcher._peers.values()}
        known |= {peer.pair for peer in exchange.granter._peers.values()}
        for courier in self._replica.ranks.couriers:
            left["pairs of nobody"] = len(set(courier.carriers) - known)
            left["live fetches of couriers"] = sum(len(carrier.live) for carrier in courier.carriers.values())
        found = {name: count for name, count in left.items() if count}
        if found:
            raise BrokenPromise(f"{self._replica.name} keeps {found}")
