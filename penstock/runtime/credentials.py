"""With what this process proves who it is to the others, as its configuration says."""

from penstock.runtime.settings import ConfigurationError, SecuritySection
from penstock.wire.auth import Credentials


def credentials(section: SecuritySection) -> Credentials:
    """The files that the section names, read; raises ConfigurationError for what cannot be read or used."""
    try:
        return Credentials.from_files(
            insecure=section.insecure,
            certificate=section.tls_certificate,
            key=section.tls_key,
            authority=section.tls_authority,
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"security: {error}") from error
