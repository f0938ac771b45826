"""Addresses of servers, and where plaintext is allowed. Loads no gRPC, which takes 10 MB.

Plaintext is allowed on loopback, and elsewhere only with `insecure`. Unix sockets are always plaintext: the
permissions of their folder say who may connect.
"""

import ipaddress
from typing import Final

_MAX_PORT: Final = 65535
_MAX_SOCKET_PATH_BYTES: Final = 107


class AddressInUse(OSError):
    """Another process serves this address; the message names it and the remedy."""


def check_plaintext(address: str, *, insecure: bool) -> None:
    """Raise ValueError when plaintext would leave this machine without `insecure`."""
    if not insecure and not is_local(address):
        raise ValueError(
            f"address={address!r}: plaintext beyond loopback; set security.tls_certificate, "
            "security.tls_key and security.tls_authority, or say --insecure"
        )


def is_local(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    host = address.removeprefix("dns:///").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def counted_as(address: str) -> str:
    """Return what limits count a caller's address as: the /64 of IPv6, which one caller has whole."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), 64), strict=False))


def check_address(address: str) -> str:
    """Return `address` when it is HOST:PORT or unix:/path; raises ValueError with the remedy."""
    try:
        address.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"address={address!r}: is no text; write HOST:PORT or unix:/path in UTF-8"
        ) from error
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if not path or len(path.encode()) > _MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"address='{address}': a socket path has 1 to {_MAX_SOCKET_PATH_BYTES} bytes")
        return address
    host, _, port = address.removeprefix("dns:///").rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > _MAX_PORT:
        raise ValueError(f"address={address!r}: write HOST:PORT or unix:/path")
    return address
