"""What a server may ignore in a request's head, and what it must not (RFC 9110, section 7.8; RFC 9112, section 3.2)."""

from httptools import HttpRequestParser

Headers = list[tuple[bytes, bytes]]  # names in lower case


def without_upgrade(parser: HttpRequestParser, url: bytes, headers: Headers) -> bytes:
    """The head that was parsed last, without the offer to change the protocol, as bytes to parse."""
    lines = [b"%s %s HTTP/%s" % (parser.get_method(), url, parser.get_http_version().encode())]
    lines += [b"%s: %s" % header for header in headers if header[0] != b"upgrade"]
    return b"\r\n".join((*lines, b"", b""))


def use_one_host(url: bytes, headers: Headers) -> None:
    """Leaves the host that counts: the one in the request line, if it has one. Raises ValueError for two headers."""
    places = [place for place, (name, _) in enumerate(headers) if name == b"host"]
    if len(places) > 1:
        raise ValueError("more than one Host")
    authority = _authority(url)
    if authority is None:
        return
    for place in places:
        del headers[place]
    headers.append((b"host", authority))


def _authority(url: bytes) -> bytes | None:
    """Of http://AUTHORITY/path; None for the usual /path, and for *."""
    scheme, found, rest = url.partition(b"://")
    if not found or scheme.startswith((b"/", b"*")):
        return None
    for end in b"/?#":
        rest = rest.partition(b"%c" % end)[0]
    return rest
