"""What goes wrong in a run, and when: drawn from the seed."""

from collections.abc import Callable

from sim_cluster import Cluster
from sim_replica import SimReplica
from sim_router import Wish
from transfer_stream import TransferStream
from wires import PairWire

HORIZON = 1.5  # seconds in which faults begin


class Moves:
    """No fault, but as sudden: the router has streams go on elsewhere, and some of their clients leave just then."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world

    def plan(self) -> None:
        random = self._world.random
        for _ in range(random.randrange(1, 12)):
            self._world.at(random.random() * HORIZON, self.move)

    def move(self) -> None:
        requests = list(self._cluster.router.requests)
        self._world.random.shuffle(requests)
        moved = next((request for request in requests if request.move()), None)
        if moved is None:
            return
        if self._world.tracing:
            self._world.log(f"*** request {moved.wish.number} moves")
        if self._world.chance(0.3):
            self._world.at(4 * self._world.delay(), lambda: moved.leave("left"))


class Faults:
    """Each fault picks its victim when it strikes, among those who are busy if it can."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._kinds: list[Callable[[], None]] = [
            self.kill,
            self.kill,
            self.stall,
            self.stall,
            self.hold_control,
            self.break_control,
            self.hold_bytes,
            self.break_bytes,
            self.partition,
            self.mischief,
            self.corrupt,
            self.truncate,
            self.explode,
            self.explode,
            self.pressure,
            self.pressure,
            self.flip_role,
            self.drain,
            self.break_router_stream,
            self.hold_router_stream,
            self.router_mischief,
        ]

    def plan(self) -> None:
        random = self._world.random
        for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4, 6))):
            self._world.at(random.random() * HORIZON, random.choice(self._kinds))

    # -- replicas ----------------------------------------------------------------------------------------------

    def kill(self) -> None:
        replica = self._victim()
        if replica is None:
            return
        others = [other for other in self._cluster.replicas if other is not replica and not other.stopped]
        final = self._world.chance(0.2) and any(self._cluster.decodes(other.name) for other in others)
        self._log(f"{replica.name} is killed{' for good' if final else ''}")
        self._cluster.kill(replica, None if final else 0.2 + self._world.random.random())

    def stall(self) -> None:
        replica = self._victim()
        if replica is None:
            return
        seconds = self._world.random.choice((0.3, 1.0, 2.5, 6.0))
        replica.frozen_until = max(replica.frozen_until, self._world.now + seconds)
        self._log(f"{replica.name} stalls for {seconds} s")
        if seconds > 2.0:
            self._world.at(2.0, lambda: self._give_up(replica))

    def _give_up(self, replica: SimReplica) -> None:
        """A router does not wait longer for a heartbeat."""
        stream = self._cluster.router.streams.get(replica.name)
        if replica.frozen_until > self._world.now and stream is not None and stream.replica is replica:
            stream.break_down()

    def pressure(self) -> None:
        """Long answers, all at once, where prompts are computed for others."""
        sources = [replica for replica in self._cluster.replicas if len(replica.engine.exchange.granter)]
        replica = self._world.random.choice(sources) if sources else self._victim()
        if replica is None:
            return
        self._log(f"{replica.name} gets much to do")
        now, random = self._world.now, self._world.random
        for _ in range(4):
            prompt = [random.randrange(10, 900) for _ in range(random.randrange(4, 20))]
            self._cluster.hurry(Wish(self._cluster.next_number(), now, prompt, 20, b"", -1, None, None, replica.name))

    def explode(self) -> None:
        alone = [r for r in self._cluster.replicas if r.shape.tp * r.shape.pp == 1 and len(r.engine.exchange.granter)]
        replica = self._world.random.choice(alone) if alone else self._victim()
        if replica is not None:
            replica.ranks.explode += self._world.random.randrange(1, 3)
            self._log(f"a step of {replica.name} will fail")

    def flip_role(self) -> None:
        replica = self._victim()
        if replica is not None:
            willing = not replica.engine.exchange.granter.willing
            self._log(f"{replica.name} is {'willing' if willing else 'not willing'} to compute for others")

            def flip(exchange: object) -> None:
                replica.engine.exchange.granter.willing = willing

            replica.command(flip)

    def drain(self) -> None:
        """Refuses new, gives up after a while, and comes back as new."""
        replica = self._victim()
        if replica is None or replica.draining:
            return
        self._log(f"{replica.name} drains")
        replica.draining = True
        replica.command(lambda exchange: None)

        def give_up() -> None:
            if not replica.alive:
                return
            self._log(f"{replica.name} gives up what is left")
            replica.stop()
            self._world.at(0.05, end)

        def end() -> None:
            if replica.alive:
                self._cluster.kill(replica, 0.2)

        self._world.at(self._world.random.choice((0.05, 0.3, 1.0)), give_up)

    # -- between replicas --------------------------------------------------------------------------------------

    def hold_control(self) -> None:
        stream = self._stream()
        if stream is not None:
            until = self._world.now + self._world.random.choice((0.2, 1.0, 3.0))
            self._log(f"control {stream.target.name} - {stream.address} stands still until {until:.2f}")
            stream.hold(until)

    def break_control(self) -> None:
        stream = self._stream()
        if stream is not None:
            self._log(f"control {stream.target.name} - {stream.address} breaks")
            stream.break_down()

    def partition(self) -> None:
        """Control breaks and cannot be opened again for a while; bytes flow."""
        stream = self._stream()
        if stream is not None:
            self._log(f"{stream.target.name} and {stream.address} are parted")
            self._cluster.cut(stream.target.name, stream.address, self._world.now + 1.0)
            stream.break_down()

    def mischief(self) -> None:
        stream = self._stream()
        if stream is not None:
            stream.mischief += self._world.random.randrange(1, 4)

    def hold_bytes(self) -> None:
        until = self._world.now + self._world.random.choice((0.2, 1.0, 3.0))
        for wire in self._wires():
            wire.hold(until)

    def break_bytes(self) -> None:
        wires = self._wires()
        if wires:
            self._log("the bytes of a pair break")
            self._world.random.choice(wires).break_down()

    def corrupt(self) -> None:
        self._cluster.damage.corrupt += self._world.random.randrange(1, 4)

    def truncate(self) -> None:
        self._cluster.damage.truncate += 1

    # -- between router and replicas ---------------------------------------------------------------------------

    def break_router_stream(self) -> None:
        streams = self._cluster.router_streams
        if streams:
            stream = self._world.random.choice(streams)
            self._log(f"the router's stream to {stream.replica.name} breaks")
            stream.break_down()

    def hold_router_stream(self) -> None:
        streams = self._cluster.router_streams
        if streams:
            stream = self._world.random.choice(streams)
            seconds = self._world.random.choice((0.3, 1.0, 2.5))
            self._log(f"the router's stream to {stream.replica.name} stands still for {seconds} s")
            stream.hold(self._world.now + seconds)
            if seconds > 2.0:
                self._world.at(2.0, stream.break_down)

    def router_mischief(self) -> None:
        streams = self._cluster.router_streams
        if streams:
            self._world.random.choice(streams).mischief += self._world.random.randrange(1, 3)

    # -- whom --------------------------------------------------------------------------------------------------

    def _victim(self) -> SimReplica | None:
        there = [replica for replica in self._cluster.replicas if not replica.stopped]
        busy = [r for r in there if len(r.engine.exchange.fetcher) or len(r.engine.exchange.granter)]
        choice = busy if busy and self._world.chance(0.7) else there
        return self._world.random.choice(choice) if choice else None

    def _stream(self) -> TransferStream | None:
        streams = [stream for stream in self._cluster.streams if not stream.over]
        return self._world.random.choice(streams) if streams else None

    def _wires(self) -> list[PairWire]:
        return [wire for wire in self._cluster.wires.values() if not wire.broken]

    def _log(self, sentence: str) -> None:
        if self._world.tracing:
            self._world.log(f"*** {sentence}")
