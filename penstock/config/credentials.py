"""Credentials of this process, from its configuration."""

import re
from pathlib import Path
from typing import Final
from urllib.parse import quote

from penstock.config.settings import ConfigurationError, RegistrySection, SecuritySection
from penstock.rpc.auth import Credentials
from penstock.rpc.identity import TlsFiles

_HEADER: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""Name of a header (RFC 9110, token)."""


def credentials(section: SecuritySection) -> Credentials:
    try:
        return Credentials.from_files(
            insecure=section.insecure,
            certificate=section.tls_certificate,
            key=section.tls_key,
            authority=section.tls_authority,
            token_file=section.token_file,
            accepted_tokens=section.accepted_tokens,
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"security: {error}") from error


def tls_files(section: SecuritySection) -> TlsFiles:
    """Return the files by which this process calls Redis over rediss://."""
    return TlsFiles(certificate=section.tls_certificate, key=section.tls_key, authority=section.tls_authority)


def redis_password(section: SecuritySection) -> str | None:
    if section.redis_password is not None:
        return section.redis_password.get_secret_value()
    if section.redis_password_file is None:
        return None
    return _text(section.redis_password_file, "security.redis_password_file")


def http_headers(section: SecuritySection) -> dict[str, str]:
    """Return the headers in `http_headers_file`; empty where it is not set."""
    file = section.http_headers_file
    if file is None:
        return {}
    headers = {}
    for number, line in enumerate(_text(file, "security.http_headers_file").splitlines(), start=1):
        name, colon, value = line.partition(":")
        if not line.strip():
            continue
        if not (colon and _HEADER.fullmatch(name) and value.isascii() and value.strip().isprintable()):
            raise ConfigurationError(
                f"security.http_headers_file={file}: line {number} is no header; write NAME: VALUE"
            )
        headers[name] = value.strip()
    return headers


def _text(file: Path, key: str) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigurationError(f"{key}={file}: {error.strerror}; name a file that can be read") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{key}={file}: not UTF-8 ({error.reason}); save it as UTF-8") from error


def registry_with_password(section: RegistrySection) -> str:
    """Return `registry.url` with its password, for a connection; "" where it is not set."""
    file, (scheme, mark, place) = section.password_file, section.url.partition("://")
    if file is None or not section.url:
        return section.url
    if not scheme.startswith("postgres"):
        raise ConfigurationError(
            f"registry.password_file={file}: only a postgresql:// registry has a password; leave it out"
        )
    password = _text(file, "registry.password_file")
    server, slash, database = place.partition("/")
    user, _, host = server.rpartition("@")
    return f"{scheme}{mark}{user}:{quote(password, safe='')}@{host}{slash}{database}"
