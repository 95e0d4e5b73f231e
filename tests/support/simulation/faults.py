"""The faults of a run and their times, from the seed."""

from collections.abc import Callable

from support.simulation.scheduled_cluster import ScheduledCluster
from support.simulation.sim_replica import SimReplica
from support.simulation.sim_request import ClientRequest
from support.simulation.transfer_stream import TransferStream

HORIZON = 1.5  # seconds in which faults start


class Faults:
    """Each fault chooses its target when it starts, preferably a busy one."""

    def __init__(self, cluster: ScheduledCluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._kinds: list[Callable[[], None]] = [
            self.kill,
            self.kill,
            self.stall,
            self.stall,
            self.hold_control,
            self.break_control,
            self.hold_data,
            self.fail_reads,
            self.partition,
            self.fail_step,
            self.fail_step,
            self.pressure,
            self.pressure,
            self.toggle_granting,
            self.drain,
            self.break_router_stream,
            self.hold_router_stream,
            self.router_message_faults,
        ]

    def plan(self) -> None:
        random = self._world.random
        for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4, 6))):
            self._world.at(random.random() * HORIZON, random.choice(self._kinds))

    def plan_moves(self) -> None:
        """Moves of streams at random times, and disconnects of some of their clients shortly after."""
        random = self._world.random
        for _ in range(random.randrange(1, 12)):
            self._world.at(random.random() * HORIZON, self._move)

    def _move(self) -> None:
        requests = list(self._cluster.router.requests)
        self._world.random.shuffle(requests)
        moved = next((request for request in requests if request.move()), None)
        if moved is None:
            return
        self._world.log(f"*** request {moved.spec.number} moves")
        if self._world.chance(0.3):
            self._world.at(4 * self._world.delay(), lambda: moved.disconnect())

    # -- replicas ----------------------------------------------------------------------------------------------

    def kill(self) -> None:
        replica = self._choose_replica()
        if replica is None:
            return
        others = [other for other in self._cluster.replicas if other is not replica and not other.stopped]
        final = self._world.chance(0.2) and any(self._cluster.decodes(other.name) for other in others)
        self._world.log(f"*** {replica.name} is killed{' permanently' if final else ''}")
        self._cluster.kill(replica, None if final else 0.2 + self._world.random.random())

    def stall(self) -> None:
        replica = self._choose_replica()
        if replica is None:
            return
        seconds = self._world.random.choice((0.3, 1.0, 2.5, 6.0))
        replica.frozen_until = max(replica.frozen_until, self._world.now + seconds)
        self._world.log(f"*** {replica.name} stalls for {seconds} s")

    def pressure(self) -> None:
        """Many long answers at once on a replica that computes prompts for others."""
        sources = [replica for replica in self._cluster.replicas if len(replica.engine.exchange.granter)]
        replica = self._world.random.choice(sources) if sources else self._choose_replica()
        if replica is None:
            return
        self._world.log(f"*** {replica.name} gets a burst of requests")
        now, random = self._world.now, self._world.random
        for _ in range(4):
            prompt = [random.randrange(10, 900) for _ in range(random.randrange(4, 20))]
            self._cluster.submit_now(
                ClientRequest(self._cluster.next_number(), now, prompt, 20, b"", -1, None, None, replica.name)
            )

    def fail_step(self) -> None:
        alone = [r for r in self._cluster.replicas if r.shape.tp * r.shape.pp == 1 and len(r.engine.exchange.granter)]
        replica = self._world.random.choice(alone) if alone else self._choose_replica()
        if replica is not None:
            replica.ranks.failing_steps += self._world.random.randrange(1, 3)
            self._world.log(f"*** a step of {replica.name} will fail")

    def toggle_granting(self) -> None:
        replica = self._choose_replica()
        if replica is not None:
            willing = not replica.engine.exchange.granter.computes_for_others
            self._world.log(f"*** {replica.name} is {'willing' if willing else 'not willing'} to compute for others")

            def flip(exchange: object) -> None:
                replica.engine.exchange.granter.computes_for_others = willing

            replica.command(flip)

    def drain(self) -> None:
        """It refuses new attempts, cancels the others after a delay, and restarts as a new build."""
        replica = self._choose_replica()
        if replica is None or replica.draining:
            return
        self._world.log(f"*** {replica.name} drains")
        replica.draining = True
        replica.command(lambda exchange: None)

        def cancel_all() -> None:
            if not replica.alive:
                return
            self._world.log(f"*** {replica.name} cancels its attempts")
            replica.stop()
            self._world.at(0.05, end)

        def end() -> None:
            if replica.alive:
                self._cluster.kill(replica, 0.2)

        self._world.at(self._world.random.choice((0.05, 0.3, 1.0)), cancel_all)

    # -- between replicas --------------------------------------------------------------------------------------

    def hold_control(self) -> None:
        stream = self._stream()
        if stream is not None:
            until = self._world.now + self._world.random.choice((0.2, 1.0, 3.0))
            self._world.log(f"*** control {stream.target.name} - {stream.address} is delayed until {until:.2f}")
            stream.hold(until)

    def break_control(self) -> None:
        stream = self._stream()
        if stream is not None:
            self._world.log(f"*** control {stream.target.name} - {stream.address} breaks")
            stream.disconnect()

    def partition(self) -> None:
        """Control breaks and cannot be opened again for a second; data connections continue."""
        stream = self._stream()
        if stream is not None:
            self._world.log(f"*** {stream.target.name} and {stream.address} are partitioned")
            self._cluster.network.cut_both(stream.target.address, stream.address, self._world.now + 1.0)
            stream.disconnect()

    def hold_data(self) -> None:
        self._cluster.data.held_until = self._world.now + self._world.random.choice((0.2, 1.0, 3.0))

    def fail_reads(self) -> None:
        self._cluster.data.to_fail += self._world.random.randrange(1, 4)

    # -- between router and replicas ---------------------------------------------------------------------------

    def break_router_stream(self) -> None:
        streams = self._cluster.router.streams
        if streams:
            stream = self._world.random.choice(streams)
            self._world.log(f"*** the router's stream to {stream.replica.name} breaks")
            stream.disconnect()

    def hold_router_stream(self) -> None:
        streams = self._cluster.router.streams
        if streams:
            stream = self._world.random.choice(streams)
            seconds = self._world.random.choice((0.3, 1.0, 2.5))
            self._world.log(f"*** the router's stream to {stream.replica.name} is delayed for {seconds} s")
            stream.hold(self._world.now + seconds)

    def router_message_faults(self) -> None:
        streams = self._cluster.router.streams
        if streams:
            self._world.random.choice(streams).message_faults += self._world.random.randrange(1, 3)

    # -- targets -----------------------------------------------------------------------------------------------

    def _choose_replica(self) -> SimReplica | None:
        running = [replica for replica in self._cluster.replicas if not replica.stopped]
        busy = [r for r in running if len(r.engine.exchange.fetcher) or len(r.engine.exchange.granter)]
        choice = busy if busy and self._world.chance(0.7) else running
        return self._world.random.choice(choice) if choice else None

    def _stream(self) -> TransferStream | None:
        streams = [stream for stream in self._cluster.streams if not stream.closed]
        return self._world.random.choice(streams) if streams else None
