"""With what this process proves who it is to the others, as its configuration says."""

from urllib.parse import quote

from penstock.config.settings import ConfigurationError, RegistrySection, SecuritySection
from penstock.rpc.auth import Credentials
from penstock.rpc.tls_files import TlsFiles


def credentials(section: SecuritySection) -> Credentials:
    """The files that the section names, read; raises ConfigurationError for what cannot be read or used."""
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
    """The files by which this process calls Redis over rediss://."""
    return TlsFiles(certificate=section.tls_certificate, key=section.tls_key, authority=section.tls_authority)


def redis_password(section: SecuritySection) -> str | None:
    """Return the password that is set, or else the one in the file.

    Raises ConfigurationError for a file that is not there.
    """
    if section.redis_password is not None:
        return section.redis_password.get_secret_value()
    if section.redis_password_file is None:
        return None
    try:
        return section.redis_password_file.read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"security.redis_password_file: {error}") from error


def registry_with_password(section: RegistrySection) -> str:
    """`registry.url` with its password, as a connection needs it, "" where none is set; not to be shown.

    Raises ConfigurationError for a password file that cannot be read, or that the URL has no place for.
    """
    file, (scheme, mark, place) = section.password_file, section.url.partition("://")
    if file is None or not section.url:
        return section.url
    if not scheme.startswith("postgres"):
        raise ConfigurationError(
            f"registry.password_file={file}: only a postgresql:// registry has a password; leave it out"
        )
    try:
        password = file.read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"registry.password_file: {error}") from error
    server, slash, database = place.partition("/")
    user, _, host = server.rpartition("@")
    return f"{scheme}{mark}{user}:{quote(password, safe='')}@{host}{slash}{database}"
