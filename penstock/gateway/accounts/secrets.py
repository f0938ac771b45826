"""Random secrets that are handed out once and kept as digests."""

import re
import secrets
from hashlib import sha256
from typing import Final

API: Final = "pst"
REFRESH: Final = "psr"
INVITATION: Final = "psi"
LINK: Final = "psl"
_SECRET = re.compile(r"ps[a-z]_[A-Za-z0-9_-]{43}")


def new_secret(kind: str) -> str:
    """Return 256 random bits as text, behind a prefix by which scanners find a leaked secret."""
    return f"{kind}_{secrets.token_urlsafe(32)}"


def is_secret(text: str, kind: str) -> bool:
    """Return whether a text has the form of a secret of this kind."""
    return text.startswith(f"{kind}_") and _SECRET.fullmatch(text) is not None


def digest(secret: str) -> str:
    """Return what is stored of a secret. It is random, so a fast hash without salt keeps it."""
    return sha256(secret.encode()).hexdigest()


def new_id() -> str:
    """Return a random id of a row, 24 hexadecimal characters."""
    return secrets.token_hex(12)
