"""The credentials of a process; `penstock.rpc.address` says where plaintext is allowed.

Certificates are rotated by replacing the files: a server reads them again before the next handshake, a
client's channel is built anew (`channel`).
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import grpc

from penstock.rpc.address import check_plaintext
from penstock.rpc.identity import Identity, Party, TlsFiles, Unidentified, parse, stamp_of

# ---- Bearer tokens, of servers and clients.

log = logging.getLogger(__name__)

BEARER: Final = "Bearer "
MAX_TOKEN_LENGTH: Final = 512
_DIGEST_LENGTH: Final = 64


def digest(secret: str) -> str:
    """Return the digest that stands for a token in its file, and for a password in Redis."""
    return hashlib.sha256(secret.encode()).hexdigest()


def line(identity: Identity, token: str) -> str:
    return f"{digest(token)} {identity}\n"


class AcceptedTokens:
    """The tokens that a server accepts; raises ValueError that names the line of a file that is wrong."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._complaint = ""
        self._stamp = stamp_of(file)
        self._known = _read(file)

    def identify(self, header: str) -> Identity:
        """Return the identity of the token in an `authorization` header; raises Unidentified."""
        if not header.startswith(BEARER) or len(header) > MAX_TOKEN_LENGTH:
            raise Unidentified("send a token: `authorization: Bearer …` (security.token_file)")
        # The time of the search tells at most something of a digest, and no token can be made from that.
        found = self._current().get(digest(header.removeprefix(BEARER)))
        if found is None:
            raise Unidentified("this token is not known here (any more)")
        return found

    def _current(self) -> dict[str, Identity]:
        """Return identities by digest, by the file as it is now; a broken or missing file changes nothing."""
        with self._lock:
            try:
                stamp = stamp_of(self._file)
                if stamp != self._stamp:
                    self._known, self._stamp, self._complaint = _read(self._file), stamp, ""
            except (OSError, ValueError) as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    log.warning("the accepted tokens cannot be read now, the old ones stay: %s", error)
            return self._known


def _read(file: Path) -> dict[str, Identity]:
    known = {}
    for number, text in enumerate(file.read_text().splitlines(), 1):
        words = text.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or len(words[0]) != _DIGEST_LENGTH or not words[0].isalnum():
            raise ValueError(f"{file}:{number}: write SHA256 penstock://RUN/PARTY[/NAME]")
        try:
            known[words[0].lower()] = parse(words[1])
        except Unidentified as error:
            raise ValueError(f"{file}:{number}: {error}") from error
    return known


class TokenFile(grpc.AuthMetadataPlugin):
    """The token of a client, read for every call, so that a new one takes effect at once."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self, _context: Any, callback: Callable[[Any, Exception | None], None]) -> None:
        try:
            token = self._file.read_text().strip()
        except OSError as error:
            callback((), error)
        else:
            callback((("authorization", f"{BEARER}{token}"),), None)


class Proof(Enum):
    """The proof of identity that a server requires of its callers."""

    NOTHING = "nothing"
    CERTIFICATE = "certificate"
    TOKEN = "token"  # noqa: S105 - not one


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """PEM bytes of this process's certificate chain and key, and of the authority of its peers.

    `token_file`: a client's own token; `accepted_tokens`: those that a server knows (`tokens`).
    """

    insecure: bool = False
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    authority: bytes | None = None
    token_file: Path | None = None
    accepted_tokens: Path | None = None
    files: TlsFiles = field(default_factory=TlsFiles)
    stamp: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)

    @classmethod
    def from_files(
        cls,
        *,
        insecure: bool,
        certificate: Path | None,
        key: Path | None,
        authority: Path | None,
        token_file: Path | None = None,
        accepted_tokens: Path | None = None,
    ) -> "Credentials":
        """Read the files of this process, in PEM; None for what it does not use."""
        if (certificate is None) != (key is None):
            raise ValueError(f"tls_certificate={certificate} tls_key={key}: give both or neither")
        files = TlsFiles(certificate=certificate, key=key, authority=authority)
        stamp = files.stamp()
        read = cls(
            insecure=insecure,
            certificate=certificate.read_bytes() if certificate else None,
            key=key.read_bytes() if key else None,
            authority=authority.read_bytes() if authority else None,
            token_file=token_file,
            accepted_tokens=accepted_tokens,
            files=files,
            stamp=stamp,
        )
        files.check_pair()
        return read

    def renewed(self) -> "Credentials | None":
        """Return these credentials from files that were replaced; None while they were not, or not wholly."""
        try:
            stamp = self.files.stamp()
            if stamp == self.stamp:
                return None
            fresh = Credentials.from_files(
                insecure=self.insecure,
                certificate=self.files.certificate,
                key=self.files.key,
                authority=self.files.authority,
                token_file=self.token_file,
                accepted_tokens=self.accepted_tokens,
            )
        except (OSError, ValueError) as error:
            log.warning("the TLS files cannot be used now, the old ones stay", extra={"error": str(error)})
            return None
        # Replaced once more while they were read: the next look finds them whole.
        return fresh if fresh.stamp == stamp == self.files.stamp() else None

    def proof(self, address: str) -> Proof:
        """Return the proof that a server with these credentials requires of callers of an address."""
        if address.startswith("unix:") or self.certificate is None:
            return Proof.NOTHING
        if self.accepted_tokens is not None:
            return Proof.TOKEN
        return Proof.NOTHING if self.authority is None else Proof.CERTIFICATE

    def for_server(self, address: str) -> grpc.ServerCredentials | None:
        """Return the TLS of a server, None for plaintext."""
        proof = self.proof(address)
        if self.certificate is None or address.startswith("unix:"):
            check_plaintext(address, insecure=self.insecure)
            return None
        if proof is Proof.NOTHING and not self.insecure:
            raise ValueError(
                f"address={address!r}: callers would show no proof of identity; set security.tls_authority "
                "(certificates) or security.accepted_tokens, or say --insecure"
            )
        rotation = _ServerRotation(self, asks_certificate=proof is Proof.CERTIFICATE)
        fetch: Any = rotation.fetch  # the stubs do not know that None means no change
        return grpc.dynamic_ssl_server_credentials(
            rotation.configuration(), fetch, proof is Proof.CERTIFICATE
        )

    def for_channel(self, address: str) -> grpc.ChannelCredentials | None:
        """Return the TLS of a client, None for plaintext."""
        nothing = self.authority is None and self.certificate is None and self.token_file is None
        if nothing or address.startswith("unix:"):
            check_plaintext(address, insecure=self.insecure)
            return None
        tls = grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)
        if self.token_file is None:
            return tls
        token = grpc.metadata_call_credentials(TokenFile(self.token_file))
        return grpc.composite_channel_credentials(tls, token)


class _ServerRotation:
    """Gives gRPC, before every handshake, the certificate of the files as they are by then."""

    def __init__(self, credentials: Credentials, *, asks_certificate: bool) -> None:
        self._credentials = credentials
        self._asks_certificate = asks_certificate

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        now = self._credentials
        roots = now.authority if self._asks_certificate else None
        pair = (now.key or b"", now.certificate or b"")
        return grpc.ssl_server_certificate_configuration([pair], roots)

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """None while nothing changed. Called by threads of gRPC, one handshake at a time or several."""
        fresh = self._credentials.renewed()
        if fresh is None:
            return None
        self._credentials = fresh
        log.info("TLS files were replaced: new connections use them")
        return self.configuration()


# ---- The methods that each party may call, of the core's servers.

ANYBODY: Final = frozenset(Party)
ACTOR: Final = frozenset({Party.ACTOR})
CLIENT: Final = frozenset({Party.CLIENT})
OPERATOR: Final = frozenset({Party.OPERATOR})

Calls = Mapping[str, frozenset[Party]]
"""Parties by the full name of a method, such as "/package.Service/Method"."""
NO_CALLS: Final[Calls] = MappingProxyType({})
_SERVICES: Final[Mapping[str, tuple[frozenset[Party], str]]] = {
    "ExperienceService": (ACTOR, "OpenSession Append CloseSession ReportEpisodes"),
    "WeightService": (ACTOR, "WatchLatest GetWeights"),
    "ControlService": (
        OPERATOR,
        "Status Pause Resume Stop Checkpoint Flush Restore ListVersions Promote Rollback SetTraffic",
    ),
    "PolicyService": (CLIENT, "Act ActStream StartEpisode Reward EndEpisode Describe"),
}
ACCESS: Final[Calls] = {
    **{
        f"/penstock.v1.{service}/{method}": parties
        for service, (parties, methods) in _SERVICES.items()
        for method in methods.split()
    },
    # Probes look at health with whatever certificate they have.
    "/grpc.health.v1.Health/Check": ANYBODY,
    "/grpc.health.v1.Health/Watch": ANYBODY,
    "/grpc.health.v1.Health/List": ANYBODY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": OPERATOR,
}


def may_call(party: Party, method: str, own: Calls = NO_CALLS) -> bool:
    return party in ACCESS.get(method, own.get(method, frozenset()))
