"""What a cluster or its operator puts into secrets before the pods of `production` start.

cert-manager: a certificate for each Certificate, as it asks. The operator: the commands of
docs/kubernetes.md.
"""

import ipaddress
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.deploy.custom_resources import Certificate, CertificateSpec
from tests.deploy.manifests import ROOT, Object, kinds
from tests.deploy.node.network import DATABASE

Secrets = dict[str, dict[str, bytes]]
_PURPOSES: Final = {
    "server auth": ExtendedKeyUsageOID.SERVER_AUTH,
    "client auth": ExtendedKeyUsageOID.CLIENT_AUTH,
}


def made_by_cert_manager(objects: tuple[Object, ...]) -> Secrets:
    wanted = [Certificate.model_validate(one).spec for one in kinds(objects, "Certificate")]
    (authority,) = [spec for spec in wanted if spec.isCA]
    key = ec.generate_private_key(ec.SECP256R1())
    root = _sign(authority, key, key, _subject(authority))
    secrets = {}
    for spec in wanted:
        own = key if spec.isCA else ec.generate_private_key(ec.SECP256R1())
        certificate = root if spec.isCA else _sign(spec, own, key, root.subject)
        secrets[spec.secretName] = {
            "tls.crt": certificate.public_bytes(serialization.Encoding.PEM),
            "tls.key": own.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
            "ca.crt": root.public_bytes(serialization.Encoding.PEM),
        }
    return secrets


def _subject(spec: CertificateSpec) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, spec.commonName or "")])


def _sign(
    spec: CertificateSpec,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
) -> x509.Certificate:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(_subject(spec))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(hours=int(spec.duration.removesuffix("h"))))
        .add_extension(x509.BasicConstraints(ca=spec.isCA, path_length=None), critical=True)
    )
    names = [*map(_name, spec.dnsNames), *map(x509.UniformResourceIdentifier, spec.uris)]
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    purposes = [_PURPOSES[usage] for usage in spec.usages if usage in _PURPOSES]
    if purposes:
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def made_by_operator(folder: Path) -> Secrets:
    penstock = str(Path(sys.executable).with_name("penstock"))
    users = str(ROOT / "deploy" / "redis" / "users.acl")
    command = [penstock, "certificates", str(folder), "--run", "cartpole", "--redis-users", users]
    subprocess.run([*command, "--password", "registry"], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    passwords = {path.name: path.read_bytes() for path in folder.glob("redis-*.password")}
    return {
        "redis-users": {"users.acl": (folder / "users.acl").read_bytes(), **passwords},
        "registry": {
            "url": f"postgresql://penstock@{DATABASE}:5432/penstock".encode(),
            "password": (folder / "registry.password").read_bytes(),
        },
    }
