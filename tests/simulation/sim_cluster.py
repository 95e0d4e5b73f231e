"""Replicas, routers and what is between them."""

from model import Model
from router_stream import RouterStream
from sim_replica import Shape, SimReplica
from sim_router import Phase, SimRequest, SimRouter, Wish
from transfer_stream import TransferStream
from wires import Damage, PairWire
from world import BrokenPromise, World

from headrace_worker.transfer.orders import OpenPair

ORPHAN_SECONDS = 1.5
REST_SECONDS = 30.0  # after the last answer, and the last fault, until all is free


class Cluster:
    """One seed's cluster."""

    def __init__(
        self, world: World, model: Model, shapes: list[Shape], decoders: set[str], source_share: float
    ) -> None:
        self.world = world
        self.damage = Damage()
        self.streams: list[TransferStream] = []
        self.wires: dict[bytes, PairWire] = {}
        self.wishes_to_come = 0
        self.healed_at = 0.0
        self._model = model
        self._shapes = {shape.name: shape for shape in shapes}
        self._decoders = decoders
        self._lives: dict[str, int] = {}
        self._replicas: dict[str, SimReplica] = {}
        self._cuts: dict[frozenset[str], float] = {}
        self._numbers = 0
        self._gone: set[str] = set()
        for shape in shapes:
            self.start(shape.name)
        self.router = SimRouter(self, source_share)
        for shape in shapes:
            self.router.connect(shape.name)

    # -- who is there ------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return list(self._shapes)

    @property
    def replicas(self) -> list[SimReplica]:
        return [replica for replica in self._replicas.values() if replica.alive]

    def at(self, name: str) -> SimReplica | None:
        replica = self._replicas.get(name)
        return replica if replica is not None and replica.alive else None

    def keeps(self, name: str) -> bool:
        """Whether there will be one again."""
        return name not in self._gone

    def decodes(self, name: str) -> bool:
        return name in self._decoders

    def start(self, name: str) -> None:
        self._lives[name] = self._lives.get(name, 0) + 1
        self._replicas[name] = SimReplica(self, self._shapes[name], self._model, self._lives[name])

    def kill(self, replica: SimReplica, back_after: float | None) -> None:
        """At once; everybody who is connected to it notices."""
        replica.alive = False
        for stream in self.streams_of(replica):
            stream.break_down()
        for courier in replica.ranks.couriers:
            for carrier in courier.carriers.values():
                carrier.close()
        stream = self.router.streams.get(replica.name)
        if stream is not None:
            stream.break_down()
        if back_after is None:
            self._gone.add(replica.name)
        else:
            self.world.at(back_after, lambda: self.start(replica.name))

    # -- what is between them ----------------------------------------------------------------------------------

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def wire(self, order: OpenPair) -> PairWire:
        return self.wires.setdefault(order.meeting.token, PairWire(self.world, order.size, self.damage))

    def streams_of(self, replica: SimReplica) -> list[TransferStream]:
        self.streams = [stream for stream in self.streams if not stream.over]
        return [stream for stream in self.streams if replica in (stream.target, stream.source)]

    def cut(self, one: str, other: str, until: float) -> None:
        """No new connection between the two until then."""
        self._cuts[frozenset((one, other))] = until

    def unreachable(self, one: SimReplica, other: SimReplica) -> bool:
        return self._cuts.get(frozenset((one.name, other.name)), 0.0) > self.world.now

    @property
    def router_streams(self) -> list[RouterStream]:
        return list(self.router.streams.values())

    # -- clients -----------------------------------------------------------------------------------------------

    def expect(self, wishes: list[Wish]) -> None:
        self.wishes_to_come = len(wishes)

        def arrive(wish: Wish) -> None:
            self.wishes_to_come -= 1
            self.router.arrive(wish)

        for wish in wishes:
            self.world.at(wish.arrival, lambda wish=wish: arrive(wish))

    def hurry(self, wish: Wish) -> None:
        """One more, now."""
        self.router.arrive(wish)

    def watch(self, replica: SimReplica) -> None:
        """After a replica's turn: clients who leave in a phase that only the replica sees; grants of nobody."""
        self._check_grants(replica)
        for request in self.router.requests:
            if request.at == replica.name and not request.outcome and request.wish.leaves is not None:
                self._watch(replica, request, request.wish.leaves)

    def _check_grants(self, source: SimReplica) -> None:
        """A grant that its target knows nothing of ends soon, long before its lease."""
        orphans: dict[tuple[str, int], float] = {}
        for peer, fetch in source.engine.exchange.granter._grants:
            stream = source.targets.get(peer)
            if stream is None or stream.disturbed or stream.target.troubled or source.troubled:
                continue
            if fetch not in stream.target.engine.exchange.fetcher._fetches:
                since = orphans[peer, fetch] = source.orphans.get((peer, fetch), self.world.now)
                if self.world.now - since > ORPHAN_SECONDS:
                    raise BrokenPromise(f"{source.name} holds a grant for fetch {fetch} of {peer}, which is over")
        source.orphans = orphans

    def _watch(self, replica: SimReplica, request: SimRequest, phase: Phase) -> None:
        attempt = request.attempt
        inside = replica.engine._requests.get(attempt.id) if attempt is not None else None
        if inside is None:
            return
        fetch = next((f for f in replica.engine.exchange.fetcher._fetches.values() if f.request is inside), None)
        there = {
            Phase.QUEUED: fetch is None and inside.row < 0,
            Phase.ASKED: fetch is not None and fetch.reserved is None,
            Phase.GRANTED: fetch is not None and fetch.reserved is not None and not fetch.chunks,
            Phase.MOVING: fetch is not None and bool(fetch.chunks),
            Phase.COMMITTED: fetch is not None and any(chunk.committed for chunk in fetch.chunks),
            Phase.PREFILL: inside.row >= 0 and inside.started is not None and not request.tokens,
        }
        if there.get(phase):
            self.world.at(self.world.delay(), lambda: request.leave("left"))

    # -- the end -----------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """When nothing is left to happen. Raises BrokenPromise."""
        for request in self.router.requests:
            if not request.outcome:
                raise BrokenPromise(f"request {request.wish.number} has no outcome")
        if self.wishes_to_come:
            raise BrokenPromise("a client was never served")
        for replica in self.replicas:
            if not replica.stopped:
                replica.check_idle()
