"""The PEM files of a process, for gRPC and for Redis. Loads no gRPC."""

import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of a process's certificate chain and key, and of the authority of its peers."""

    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Return what differs when a file was replaced or written; raises OSError when one is gone."""
        found = [path.stat() for path in (self.certificate, self.key, self.authority) if path is not None]
        return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in found)

    def check_pair(self) -> None:
        """Raise ValueError unless the key is the certificate's."""
        if self.certificate is None or self.key is None:
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
        except ssl.SSLError as error:
            raise ValueError(
                f"tls_certificate={self.certificate} tls_key={self.key}: {error.reason or error}; "
                "give a PEM certificate and its own key"
            ) from error
