"""Which connection is aborted when another one needs its place."""

import random
from collections import Counter

from headrace_router.api.http.connection_counter import ConnectionCounter, Place
from headrace_router.api.http.keyless_connections import KeylessConnections

PER_ADDRESS, ALL = 4, 10


class Clients:
    """Opens connections at a counter, and lists which were aborted."""

    def __init__(self) -> None:
        self.counter = ConnectionCounter(ALL, PER_ADDRESS)
        self.places: dict[str, Place] = {}
        self.aborted: list[str] = []

    def open(self, address: str, name: str) -> bool:
        place = self.counter.add(address, lambda: self.aborted.append(name))
        if place is not None:
            self.places[name] = place
        return place is not None


def test_a_client_beyond_its_bound_replaces_its_own_oldest() -> None:
    clients = Clients()
    for index in range(PER_ADDRESS):
        assert clients.open("192.0.2.1", f"a{index}")
    assert clients.open("192.0.2.2", "b0")
    clients.places["a0"].keep()
    assert clients.open("192.0.2.1", "a4") and clients.aborted == ["a1"]
    for name in ("a2", "a3", "a4"):
        clients.places[name].keep()
    assert not clients.open("192.0.2.1", "a5") and clients.aborted == ["a1"]
    assert clients.open("192.0.2.2", "b1")


def test_a_client_beyond_the_bound_of_all_replaces_one_of_the_client_with_most() -> None:
    clients = Clients()
    for index in range(PER_ADDRESS):
        assert clients.open("2001:db8::1", f"a{index}") and clients.open("192.0.2.2", f"b{index}")
    assert clients.open("192.0.2.3", "c0") and clients.open("192.0.2.3", "c1")
    clients.places["a0"].keep()  # of those without a key, the other client has more
    for index in range(6):
        assert clients.open(f"198.51.100.{index}", f"probe{index}")
    assert clients.aborted == ["b0", "a1", "b1", "c0", "a2", "b2"]


def test_an_aborted_connection_ends_without_effect() -> None:
    clients = Clients()
    for index in range(PER_ADDRESS + 1):
        assert clients.open("192.0.2.1", str(index))
    aborted = clients.places["0"]
    aborted.keep()
    aborted.release()
    aborted.release()
    for name in "1234":
        clients.places[name].keep()
    assert not clients.open("192.0.2.1", "5"), "its place is counted once"


def test_every_order_of_changes() -> None:
    """Against lists that are searched."""
    rng = random.Random(1)
    for _ in range(200):
        connections: KeylessConnections[int] = KeylessConnections()
        expected: list[tuple[str, int]] = []
        for number in range(60):
            if expected and rng.random() < 0.45:
                client, old = rng.choice(expected)
                expected.remove((client, old))
                connections.discard(client, old)
                connections.discard(client, old)
            else:
                client = rng.choice("abc")
                expected.append((client, number))
                connections.add(client, number)
            counts = Counter(client for client, _ in expected)
            for client in "abc":
                assert connections.oldest_of(client) == next((n for c, n in expected if c == client), None)
            found = connections.oldest_of_most()
            if not expected:
                assert found is None
                continue
            (owner,) = (client for client, number in expected if number == found)
            assert counts[owner] == max(counts.values()) and found == connections.oldest_of(owner)
