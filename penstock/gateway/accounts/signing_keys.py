"""The keys of the gateways of one installation, in a file that they share: Ed25519, by their `kid`.

    {"keys": [{"kid": "…", "private": "…base64 of 32 bytes…"}, …], "pseudonyms": "…base64 of 32 bytes…"}

The first key signs, all are accepted: to rotate, put a new one in front and delete the last when its tokens
have expired. The file is read when a gateway starts. `pseudonyms` makes opaque ids of people
(`Keys.pseudonym`); without it the ratings of a person cannot be found any more.
"""

import base64
import hmac
import json
import os
import secrets
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from penstock.config.configuration_error import ConfigurationError
from penstock.runtime.output_file import write_once

ALGORITHM: Final = "EdDSA"
ISSUER: Final = "penstock-gateway"
MAX_TOKEN_LENGTH: Final = 4096
_KEY_BYTES: Final = 32


class BadToken(Exception):
    """Reports an access token that this installation did not sign, or that has expired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of a file; `signing` is the id of the one that signs."""

    signing: str
    private: dict[str, Ed25519PrivateKey] = field(repr=False)
    pseudonyms: bytes = field(repr=False)

    def sign(self, claims: dict[str, Any]) -> str:
        """Return a JWT of the claims, which say `exp`, `iat`, `sub` and `aud`."""
        key, headers = self.private[self.signing], {"kid": self.signing, "typ": "at+jwt"}
        token: str = jwt.encode({**claims, "iss": ISSUER}, key, algorithm=ALGORITHM, headers=headers)
        return token

    def verify(self, token: str, now: datetime, *, audience: str) -> dict[str, Any]:
        """Return the claims of a token that one of the keys signed for this audience; raises BadToken."""
        if len(token) > MAX_TOKEN_LENGTH or not token.isascii():
            raise BadToken("the token is too long, or not of ASCII")
        try:
            header = jwt.get_unverified_header(token)
            key = self.private.get(str(header.get("kid")))
            if key is None or header.get("typ") != "at+jwt":
                raise BadToken("the token is not of a key of this gateway")
            claims: dict[str, Any] = jwt.decode(
                token,
                key.public_key(),
                algorithms=[ALGORITHM],
                audience=audience,
                issuer=ISSUER,
                options={"require": ["exp", "sub", "aud", "iss"], "verify_exp": False, "verify_iat": False},
            )
        except jwt.PyJWTError as error:
            raise BadToken("the token is not valid, or no more") from error
        if not (isinstance(claims["exp"], int) and now.timestamp() < claims["exp"]):
            raise BadToken("the token has expired: refresh it, or sign in again")
        return claims

    def pseudonym(self, purpose: str, *parts: str) -> str:
        """Return an opaque id of the parts, 32 hexadecimal characters."""
        text = json.dumps([purpose, *parts]).encode()
        return hmac.new(self.pseudonyms, text, sha256).hexdigest()[:32]


def make_keys(file: Path) -> None:
    """Write a file with new keys, readable by its owner alone, unless it exists."""
    private = base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()
    pseudonyms = base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()
    content = {"keys": [{"kid": secrets.token_hex(4), "private": private}], "pseudonyms": pseudonyms}
    write_once(file, json.dumps(content).encode(), mode=0o600)  # never over another gateway's


def read_keys(file: Path) -> Keys:
    """Return the keys of a file; raises ConfigurationError for one that others may read or that is broken."""
    try:
        status, text = file.stat(), file.read_text()
    except OSError as error:
        raise ConfigurationError(f"--keys {file}: {error.strerror}") from error
    # One that belongs to somebody else, as a mounted secret to root, can only be read by a group.
    if status.st_mode & (0o077 if status.st_uid == os.geteuid() else 0o037):
        raise ConfigurationError(f"--keys {file}: others may read it; chmod 600 it, and renew the keys")
    try:
        content = json.loads(text)
        private = {str(one["kid"]): _private(one["private"]) for one in content["keys"]}
        pseudonyms = base64.b64decode(content["pseudonyms"], validate=True)
        signing = str(content["keys"][0]["kid"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigurationError(f"--keys {file}: not a file of keys that `penstock gateway` made") from error
    return Keys(signing=signing, private=private, pseudonyms=pseudonyms)


def _private(text: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(base64.b64decode(text, validate=True))
