"""With what a process proves who it is, and where it may do without.

Plaintext is allowed on loopback and unix sockets; anywhere else only when `insecure` is said.
"""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

import grpc


class AddressInUse(OSError):
    """Another process serves this address; the message names it and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """PEM bytes of this process's certificate chain and key, and of the authority of its peers."""

    insecure: bool = False
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    authority: bytes | None = None

    @classmethod
    def from_files(
        cls, *, insecure: bool, certificate: Path | None, key: Path | None, authority: Path | None
    ) -> "Credentials":
        """Read the files; raises ValueError when only one of certificate and key is given."""
        if (certificate is None) != (key is None):
            raise ValueError(f"tls_certificate={certificate} tls_key={key}: give both or neither")
        return cls(
            insecure=insecure,
            certificate=certificate.read_bytes() if certificate else None,
            key=key.read_bytes() if key else None,
            authority=authority.read_bytes() if authority else None,
        )

    def for_server(self) -> grpc.ServerCredentials | None:
        """TLS of a server, None for plaintext; with an authority clients must show a certificate."""
        if self.certificate is None or self.key is None:
            return None
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], self.authority, self.authority is not None
        )

    def for_channel(self) -> grpc.ChannelCredentials | None:
        """TLS of a client, None for plaintext."""
        if self.authority is None and self.certificate is None:
            return None
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


def check_plaintext(address: str, *, insecure: bool) -> None:
    """Raise ValueError when plaintext would leave this machine without having been asked for."""
    if not insecure and not is_local(address):
        raise ValueError(
            f"address={address!r}: plaintext beyond loopback; set security.tls_certificate, "
            "security.tls_key and security.tls_authority, or say --insecure"
        )


def is_local(address: str) -> bool:
    """Whether an address is a unix socket or loopback."""
    if address.startswith("unix:"):
        return True
    host = address.removeprefix("dns:///").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(address: str) -> str:
    """Return `address` when it is HOST:PORT or unix:/path; raises ValueError with the remedy."""
    if address.startswith("unix:"):
        _check_socket_path(address.removeprefix("unix:"))
        return address
    host, _, port = address.removeprefix("dns:///").rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > _MAX_PORT:
        raise ValueError(f"address={address!r}: write HOST:PORT or unix:/path")
    return address


_MAX_PORT = 65535
_MAX_SOCKET_PATH = 107


def _check_socket_path(path: str) -> None:
    if not path or len(path.encode()) > _MAX_SOCKET_PATH:
        raise ValueError(f"address='unix:{path}': a socket path has 1 to {_MAX_SOCKET_PATH} bytes")
