"""`penstock certificates`: an authority, and certificates and tokens for each process of a run.

For development and small installations; larger ones have an authority that signs certificates with the same
alternative name (`rpc.identity`). A second call with the same folder keeps the authority and replaces the
rest: that is how certificates are rotated. Files: certificate and key per party, a token per party and the
file by which a server accepts them, and with `users` the ACL file of Redis with a new password per user.
`passwords` names further ones that are made once and kept. Keys, tokens and passwords have mode 0600.
"""

import ipaddress
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.config.run_folder import make_private
from penstock.config.settings import ConfigurationError
from penstock.launch.commands.request import Order
from penstock.protocol.limits import check_id
from penstock.rpc.auth import digest, line
from penstock.rpc.identity import Identity, Party
from penstock.runtime.exit import EXIT_OK

AUTHORITY: Final = "authority"
AUTHORITY_DAYS: Final = 3650
SERVER: Final = "server"
"""Name of a policy server: an actor for the broker, with ids that begin with it, and a server for clients."""
LOCAL_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
_CLOCK_SKEW: Final = timedelta(minutes=5)
_SECRET_BYTES: Final = 32
_BEFORE: Final = "# from the call before; the next one takes them back\n"


@dataclass(frozen=True, slots=True)
class Authority:
    """Certificate and key that sign the others."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def main(order: Order) -> int:
    """Make an authority, certificates and tokens for a run; called again: new ones of the same authority."""
    try:
        check_id("--run", order.run)
        for name in order.actors:
            check_id("--actor", name)
        for name in order.passwords:
            check_id("--password", name)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if not 0.0 < order.days <= AUTHORITY_DAYS:
        raise ConfigurationError(
            f"--days {order.days:g}: a certificate holds above 0 and at most {AUTHORITY_DAYS} days, the "
            "authority's own time"
        )
    if order.users is not None:
        order.users.read_text()  # before anything is written
    make_private(order.folder)
    authority = authority_of(order.folder)
    for name, identity in identities(order):
        issue(authority, order, name, identity)
    issue(authority, order, "redis", None)
    _write_tokens(order)
    for name in order.passwords:
        path = order.folder / f"{name}.password"
        if not path.exists():  # a database may have it since it was made
            _write(path, f"{secrets.token_urlsafe(_SECRET_BYTES)}\n".encode(), secret=True)
    if order.users is not None:
        _write_users(order.folder, order.users)
    print(f"{order.folder}: {', '.join(sorted(path.name for path in order.folder.iterdir()))}")
    return EXIT_OK


def identities(order: Order) -> Iterator[tuple[str, Identity]]:
    """Yield file name and identity of every certificate except that of Redis."""
    for party in Party:
        yield party.value, Identity(run=order.run, party=party)
    yield SERVER, Identity(run=order.run, party=Party.ACTOR, name=SERVER)
    for name in order.actors:
        yield f"actor-{name}", Identity(run=order.run, party=Party.ACTOR, name=name)


def issue(authority: Authority, order: Order, name: str, identity: Identity | None) -> None:
    """Write NAME.key and NAME.pem. identity: None for Redis, which calls no other process."""
    key = ec.generate_private_key(ec.SECP256R1())
    serves = identity is None or identity.party is Party.BROKER or name == SERVER
    builder = _builder(name, authority.certificate.subject, key, timedelta(days=order.days))
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    # The certificate of an actor is not one of a server, on any host. Redis is called by its own probes.
    server = [ExtendedKeyUsageOID.SERVER_AUTH] if serves else []
    purposes = x509.ExtendedKeyUsage([*server, ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = builder.add_extension(purposes, critical=False)
    names: list[x509.GeneralName] = []
    for host in (*LOCAL_HOSTS, *order.hosts) if serves else ():
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    names += [x509.UniformResourceIdentifier(str(identity))] if identity else []
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(authority.key, hashes.SHA256())
    _write(order.folder / f"{name}.key", _key_pem(key), secret=True)
    _write(order.folder / f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM))


def authority_of(folder: Path) -> Authority:
    """Return the authority of a folder, made where there is none."""
    certificate_file, key_file = folder / f"{AUTHORITY}.pem", folder / f"{AUTHORITY}.key"
    if certificate_file.exists() and key_file.exists():
        key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigurationError(f"{key_file}: not a key that this command made; choose another folder")
        return Authority(x509.load_pem_x509_certificate(certificate_file.read_bytes()), key)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(f"penstock authority {secrets.token_hex(4)}")
    builder = _builder(None, subject, key, timedelta(days=AUTHORITY_DAYS)).subject_name(subject)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    _write(key_file, _key_pem(key), secret=True)
    _write(certificate_file, certificate.public_bytes(serialization.Encoding.PEM))
    return Authority(certificate, key)


def _builder(
    name: str | None, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, life: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + life)
    )
    return builder if name is None else builder.subject_name(_name(f"penstock {name}"))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_tokens(order: Order) -> None:
    """Write a token per calling party, and the file of digests by which a server accepts them.

    The tokens of the previous call stay accepted until the next one, while they are being replaced.
    """
    known = order.folder / "tokens"
    before = known.read_text().partition(_BEFORE)[0] if known.exists() else ""
    lines = []
    for name, identity in identities(order):
        if identity.party in (Party.ACTOR, Party.CLIENT, Party.OPERATOR):
            token = secrets.token_urlsafe(_SECRET_BYTES)
            _write(order.folder / f"{name}.token", f"{token}\n".encode(), secret=True)
            lines.append(line(identity, token))
    kept = f"{_BEFORE}{before}" if before else ""
    _write(known, f"{''.join(lines)}{kept}".encode(), secret=True)


def _write_users(folder: Path, template: Path) -> None:
    """Write the ACL file, with the digest of a new password for every enabled user."""
    lines = []
    for text in template.read_text().splitlines():
        words = text.split()
        if len(words) > 2 and words[0] == "user" and words[2] == "on":
            password = secrets.token_urlsafe(_SECRET_BYTES)
            _write(folder / f"redis-{words[1]}.password", f"{password}\n".encode(), secret=True)
            words.insert(3, f"#{digest(password)}")
        lines.append(" ".join(words) + "\n")
    _write(folder / "users.acl", "".join(lines).encode(), secret=True)


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Replace a file atomically, so that a server that reads it again never reads a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
