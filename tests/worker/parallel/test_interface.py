"""gloo and NCCL use the interface of the rank's address alone."""

import os
import socket
import threading
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
from torch._C._distributed_c10d import HashStore

from headrace_worker.comm import interface
from headrace_worker.comm.errors import RendezvousError
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.comm.group import Group, host_group


def test_the_interface_of_an_address() -> None:
    assert interface.interface_of("127.0.0.1") == interface.interface_of("localhost") == "lo"
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family.name == "AF_INET":
                assert interface.interface_of(address.address) == name
    for host in ("192.0.2.1", "no such host"):
        with pytest.raises(RendezvousError):
            interface.interface_of(host)


def test_an_address_by_name_or_network() -> None:
    assert interface.address_on("lo") == interface.address_on("127.0.0.0/8") == "127.0.0.1"
    for name, addresses in psutil.net_if_addrs().items():
        plain = [entry.address for entry in addresses if entry.family.name == "AF_INET"]
        if plain:
            assert interface.address_on(name) == plain[0] and interface.address_on(f"{plain[0]}/32") == plain[0]


def test_a_network_with_all_addresses_is_not_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    address = SimpleNamespace(family=socket.AF_INET, address="10.1.0.7")
    loopback = SimpleNamespace(family=socket.AF_INET, address="127.0.0.1")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [loopback], "eth7": [address]})
    assert interface.address_on("0.0.0.0/0") == "10.1.0.7"


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ("ib7", r"ib7: this machine has no such address; it has .*lo \(127\.0\.0\.1\)"),
        ("192.0.2.192/29", "has no such address"),
        ("10.1.0.0/99", "write a network as"),
    ],
)
def test_an_interface_that_this_machine_lacks(wanted: str, sentence: str) -> None:
    with pytest.raises(RendezvousError, match=sentence):
        interface.address_on(wanted)


def test_nccl_is_restricted_unless_the_operator_did_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(interface.VARIABLE, raising=False)
    interface.restrict_nccl("127.0.0.1")
    assert os.environ[interface.VARIABLE] == "=lo"
    monkeypatch.setenv(interface.VARIABLE, "ib0")
    interface.restrict_nccl("127.0.0.1")
    assert os.environ[interface.VARIABLE] == "ib0"


def test_gloo_uses_the_given_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # the address overrides it
    store = HashStore()
    store.set_timeout(timedelta(seconds=10))
    made: list[Group] = []
    before = set(psutil.Process().net_connections("inet"))

    def make(rank: int) -> None:
        made.append(host_group(store, "host", "127.0.0.1", rank, 2, FailureDetector(rank)))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    opened = set(psutil.Process().net_connections("inet")) - before
    assert len(opened) >= 2 and {connection.laddr.ip for connection in opened} == {"127.0.0.1"}
    assert len(made) == 2
