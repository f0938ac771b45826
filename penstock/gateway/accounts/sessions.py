"""Sessions of people: an access token of 15 minutes, and refresh tokens that are exchanged once each.

    sign in ─► session ─► refresh token 1 ─► refresh token 2 ─► …      until it ends, or after 30 days

A refresh token that is used twice was copied, so the session ends. Two tabs of one browser may use the same
one within `GRACE`; then each gets its own successor. A person has at most `MAX_SESSIONS`, and a session at
most `MAX_EXCHANGES`.
"""

import base64
import hmac
import json
import os
import secrets
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.accounts import api_tokens, audit
from penstock.gateway.accounts.principal import (
    REFRESH,
    Principal,
    Unauthenticated,
    digest,
    new_id,
    new_secret,
)
from penstock.gateway.store.tables import RefreshRow, SessionRow, UserRow
from penstock.runtime.output_file import write_once

# ---- The keys of the gateways of one installation, in a file that they share

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
        """Return a JWT of the claims, which must have `exp`, `iat`, `sub` and `aud`."""
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
            raise BadToken("the token is not valid (any more)") from error
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
    # The file of another user, such as a mounted secret of root, is readable only by its group.
    if status.st_mode & (0o077 if status.st_uid == os.geteuid() else 0o037):
        raise ConfigurationError(f"--keys {file}: others may read it; chmod 600 it, and renew the keys")
    try:
        content = json.loads(text)
        private = {
            str(one["kid"]): Ed25519PrivateKey.from_private_bytes(
                base64.b64decode(one["private"], validate=True)
            )
            for one in content["keys"]
        }
        pseudonyms = base64.b64decode(content["pseudonyms"], validate=True)
        signing = str(content["keys"][0]["kid"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigurationError(f"--keys {file}: not a file of keys that `penstock gateway` made") from error
    return Keys(signing=signing, private=private, pseudonyms=pseudonyms)


ACCESS: Final = timedelta(minutes=15)
SESSION: Final = timedelta(days=30)
GRACE: Final = timedelta(seconds=10)
MAX_SESSIONS: Final = 256
"""Of a person."""
MAX_EXCHANGES: Final = 5000
"""Refresh tokens of a session; one every 15 minutes for 30 days makes 2,880."""
AUDIENCE: Final = "penstock-gateway"
_ENDED: Final = "the session has ended: sign in again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Tokens issued by a sign-in or an exchange. refresh: None for a program."""

    access: str
    refresh: str | None
    lasts: timedelta = ACCESS


def begin(session: Session, now: datetime, keys: Keys, user: UserRow) -> Grant:
    """Start a session of an authenticated person; beyond MAX_SESSIONS the oldest is deleted."""
    _make_room(session, user.id)
    row = SessionRow(id=new_id(), user=user.id, expires=now + SESSION, ended=None, reason="")
    session.add(row)
    audit.note(session, now, by=f"user/{user.id}", action="signed in", subject=f"session/{row.id}")
    return _grant(session, now, keys, row, user)


def exchange(session: Session, now: datetime, keys: Keys, refresh: str) -> Grant | None:
    """Exchange a refresh token for the next one and an access token.

    Returns None for an invalid one. An exception would roll back the transaction, and with it the end of the
    session after a token was used twice.
    """
    row = session.get(RefreshRow, digest(refresh))
    found = None if row is None else session.get(SessionRow, row.session)
    user = None if found is None else session.get(UserRow, found.user)
    if row is None or found is None or user is None or found.ended is not None or found.expires <= now:
        return None
    if row.used is not None and now - row.used > GRACE:
        found.ended, found.reason = now, "a refresh token was used twice"
        audit.note(
            session, now, by=f"user/{user.id}", action="refresh token reused", subject=f"session/{found.id}"
        )
        return None
    row.used = row.used or now
    exchanged = select(func.count()).select_from(RefreshRow).where(RefreshRow.session == found.id)
    if (session.scalar(exchanged) or 0) >= MAX_EXCHANGES:
        found.ended, found.reason = now, "its refresh tokens were exchanged too often"
        return None
    return _grant(session, now, keys, found, user)


def end(session: Session, now: datetime, id_: str) -> None:
    row = session.get(SessionRow, id_)
    if row is not None and row.ended is None:
        row.ended, row.reason = now, "signed out"
        audit.note(session, now, by=f"user/{row.user}", action="signed out", subject=f"session/{id_}")


def grant_to_program(now: datetime, keys: Keys, principal: Principal) -> Grant:
    """Return an access token for the API token that a program presented (client credentials)."""
    claims = {"sub": principal.subject, "aud": AUDIENCE, "iat": now, "exp": now + ACCESS}
    return Grant(access=keys.sign(claims), refresh=None)


def by_access_token(session: Session, now: datetime, keys: Keys, token: str) -> Principal:
    """Return the principal of an access token, as it is in the database now; raises Unauthenticated."""
    try:
        claims = keys.verify(token, now, audience=AUDIENCE)
    except BadToken as error:
        raise Unauthenticated(str(error)) from error
    kind, _, id_ = str(claims["sub"]).partition("/")
    if kind == "token":
        return api_tokens.by_id(session, now, id_)
    return _person(session, now, id_, str(claims.get("sid")), claims.get("num"))


def again(session: Session, now: datetime, principal: Principal) -> Principal:
    """Return a principal as it is in the database now; raises Unauthenticated if it is no longer valid.

    Long answers, such as streams, call this instead of checking the token again.
    """
    if principal.user is None or principal.session is None:
        return api_tokens.by_id(session, now, principal.subject.partition("/")[2])
    return _person(session, now, principal.user, principal.session, principal.number)


def _make_room(session: Session, user: str) -> None:
    """Delete the oldest sessions of a person who has as many as they may, with their refresh tokens."""
    own = select(SessionRow.id).where(SessionRow.user == user)
    newest_first = own.order_by(SessionRow.expires.desc(), SessionRow.id)
    too_many = newest_first.offset(MAX_SESSIONS - 1)  # in the statements: more than one takes as parameters
    session.execute(delete(RefreshRow).where(RefreshRow.session.in_(too_many)))
    session.execute(delete(SessionRow).where(SessionRow.id.in_(too_many)))


def _person(session: Session, now: datetime, user_id: str, session_id: str, number: object) -> Principal:
    """Return the person of a session that has not ended; raises Unauthenticated."""
    row, user = session.get(SessionRow, session_id), session.get(UserRow, user_id)
    if row is None or user is None or row.user != user.id or user.disabled:
        raise Unauthenticated(_ENDED)
    if row.ended is not None or row.expires <= now or number != user.session_number:
        raise Unauthenticated(_ENDED)
    return Principal(
        subject=f"user/{user.id}",
        name=user.name,
        user=user.id,
        session=row.id,
        number=user.session_number,
    )


def _grant(session: Session, now: datetime, keys: Keys, row: SessionRow, user: UserRow) -> Grant:
    refresh = new_secret(REFRESH)
    session.add(RefreshRow(digest=digest(refresh), session=row.id, used=None))
    claims = {
        "sub": f"user/{user.id}",
        "aud": AUDIENCE,
        "iat": now,
        "exp": now + ACCESS,
        "sid": row.id,
        "num": user.session_number,
    }
    return Grant(access=keys.sign(claims), refresh=refresh)
