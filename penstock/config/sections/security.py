"""Who may talk to whom."""

from pathlib import Path

from pydantic import SecretStr

from penstock.config.sections.section import Section


class SecuritySection(Section):
    """Who may talk to whom."""

    insecure: bool = False
    """Allow plaintext beyond loopback and unix sockets."""
    tls_certificate: Path | None = None
    """PEM file of this process's certificate chain."""
    tls_key: Path | None = None
    """PEM file of its key."""
    tls_authority: Path | None = None
    """PEM file of the authority that signs the peers."""
    token_file: Path | None = None
    """File with the token that this process shows over TLS, where the server asks for tokens."""
    accepted_tokens: Path | None = None
    """File of digests of accepted tokens, from `penstock certificates`, in place of client certificates."""
    redis_password: SecretStr | None = None
    """Password of the Redis user, from the environment; a command line that names it is refused."""
    redis_password_file: Path | None = None
    """File with that password, where it is not set otherwise."""
    http_headers_file: Path | None = None
    """File of headers, one NAME: VALUE a line, for HTTP endpoints that are asked for rewards."""
