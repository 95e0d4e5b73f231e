"""Which processes reach each other: each direction between two of them can be cut on its own."""

from headrace_proto.channel_options import PING_SECONDS
from support.simulation.world import World


class Network:
    """Processes are named. A cut direction delivers later what was sent meanwhile, as TCP does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cuts: dict[tuple[str, str], float] = {}

    def cut(self, sender: str, receiver: str, until: float) -> None:
        """Nothing that the sender sends arrives before then."""
        self._cuts[sender, receiver] = max(until, self.open_at(sender, receiver))

    def cut_both(self, one: str, other: str, until: float) -> None:
        self.cut(one, other, until)
        self.cut(other, one, until)

    def open_at(self, sender: str, receiver: str) -> float:
        """Time from which on messages arrive; in the past: they do."""
        return self._cuts.get((sender, receiver), 0.0)

    def connected(self, one: str, other: str) -> bool:
        """Whether a new connection can be opened: both directions work."""
        return max(self.open_at(one, other), self.open_at(other, one)) <= self._world.now


class Keepalive:
    """Of one end of a connection: whether the other end has not answered for too long."""

    def __init__(self, network: Network, world: World, server: str, client: str, reply_seconds: int) -> None:
        self._network = network
        self._world = world
        self._ends = server, client
        self._seconds = PING_SECONDS + reply_seconds
        self._cut_since: float | None = None

    def expired(self) -> bool:
        """To be called repeatedly."""
        if self._network.connected(*self._ends):
            self._cut_since = None
            return False
        self._cut_since = self._world.now if self._cut_since is None else self._cut_since
        return self._world.now - self._cut_since > self._seconds
