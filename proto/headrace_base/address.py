"""Addresses of sockets as text: 'host:port', with brackets around an IPv6 host."""


def host_port(host: str, port: int) -> str:
    """'127.0.0.1:8000', '[::1]:8000'; `host` with or without brackets."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of 'host:port' or 'http://host:port'. Raises ValueError."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    plain = address.isprintable() and " " not in address  # it may be shown in a terminal
    if not colon or not host or not plain or not (port.isascii() and port.isdigit()):
        raise ValueError(f"'{address}' is not HOST:PORT")
    return host.strip("[]"), int(port)


def port_of(address: str) -> int:
    """The port of 'host:port' or 'http://host:port'; 0 without one."""
    try:
        return split_address(address)[1]
    except ValueError:
        return 0
