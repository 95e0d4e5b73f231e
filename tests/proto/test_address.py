"""Addresses as text."""

import pytest

from headrace_base.address import host_port, port_of, split_address


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("127.0.0.1:8000", "127.0.0.1", 8000), ("http://[::1]:1", "::1", 1), ("a.example:65535", "a.example", 65535)],
)
def test_host_and_port(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)
    assert port_of(address) == port
    assert host_port(host, port) == host_port(f"[{host}]", port) == address.removeprefix("http://")


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:x", "host:²", "http://host", "\x1b[2Jhost:1", "\x1b://host:1", "a b:1"]
)
def test_what_is_no_address(address: str) -> None:
    assert port_of(address) == 0
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        split_address(address)
