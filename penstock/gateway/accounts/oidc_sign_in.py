"""Signing in at a provider of identities: what the browser takes there, and what it must bring back.

What it takes along is signed and lies in a cookie: state, nonce and verifier of one sign-in, for ten minutes.
"""

import hmac
import secrets
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Final

from sqlalchemy.orm import Session

from penstock.gateway.accounts import audit, projects, sessions, users
from penstock.gateway.accounts import projects as invitations
from penstock.gateway.accounts import users as attempts
from penstock.gateway.accounts.account_errors import AccountConflict, BadInput, Forbidden, Unauthenticated
from penstock.gateway.accounts.accounts import Accounts
from penstock.gateway.accounts.oidc_provider import Identity, Provider, ProviderSettings
from penstock.gateway.accounts.secrets import INVITATION, REFRESH, is_secret, new_secret
from penstock.gateway.accounts.sessions import BadToken, Grant, Keys
from penstock.gateway.accounts.users import hash_password
from penstock.gateway.store.tables import IdentityRow, ProjectRow, UserRow

# ---- People whom a provider of identities knows: each function is part of a caller's transaction.

NOT_KNOWN = "you have no account here: ask the owner of a project for an invitation"


def find(session: Session, identity: Identity) -> UserRow | None:
    """Return the person of an identity, None for a newcomer; raises Forbidden for one who is disabled."""
    row = session.get(IdentityRow, (identity.issuer, identity.subject))
    user = None if row is None else session.get(UserRow, row.user)
    if user is not None and user.disabled:
        raise Forbidden("this account is disabled")
    return user


def add(
    session: Session,
    now: datetime,
    identity: Identity,
    settings: ProviderSettings,
    *,
    invitation: str,
    password: str,
) -> UserRow:
    """Add a newcomer who has an invitation, or a verified address of a domain that may come.

    password: a hash that nothing matches. Raises Forbidden for anybody else, BadInput for an invitation that
    does not count.
    """
    row = invitations.find(session, now, invitation) if invitation else None
    welcome = settings.domains.get(identity.address.rpartition("@")[2]) if identity.address else None
    if row is None and (welcome is None or session.get(ProjectRow, welcome.project) is None):
        raise Forbidden(NOT_KNOWN)
    by = f"oidc/{settings.issuer}"[:64]
    user = _named(session, now, identity, password, by=by)
    session.add(IdentityRow(issuer=identity.issuer, subject=identity.subject, user=user.id, since=now))
    audit.note(session, now, by=by, action="identity added", subject=f"user/{user.id}")
    if row is not None:
        invitations.redeem(session, now, row, user=user.id)
    elif welcome is not None:
        projects.set_role(session, now, project=welcome.project, user=user.id, role=welcome.role, by=by)
    return user


def _named(session: Session, now: datetime, identity: Identity, password: str, *, by: str) -> UserRow:
    """Add a person under the name that the provider gives them, or one like it where that is taken."""
    suffix = secrets.token_hex(4)
    wished = "".join(
        one for one in identity.name.lower() if one.isascii() and (one.isalnum() or one in "._+-")
    )
    wished = wished.lstrip("._+-")[:100]
    for name in filter(None, (wished, f"{wished}-{suffix}" if wished else f"person-{suffix}")):
        try:
            return users.add(session, now, name=users.check_name(name), password=password, by=by)
        except (AccountConflict, BadInput):
            continue
    raise AccountConflict("no name is free: try again")


LASTS: Final = timedelta(minutes=10)
AUDIENCE: Final = "penstock-oidc"
_NOT_BEGUN: Final = "this sign-in was not begun in this browser, or too long ago: begin it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A browser that leaves for the provider. cookie: what it takes along."""

    address: str
    cookie: str


class OidcSignIn:
    """Sign-ins at one provider."""

    def __init__(self, provider: Provider, accounts: Accounts, keys: Keys) -> None:
        self.provider, self._accounts, self._keys = provider, accounts, keys

    def depart(self, invitation: str) -> Departure:
        """Begin a sign-in. invitation: of a newcomer, or "". Raises ProviderFailed."""
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        challenge = urlsafe_b64encode(sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        now = self._accounts.now()
        claims = {
            "sub": "oidc",
            "aud": AUDIENCE,
            "iat": now,
            "exp": now + LASTS,
            "state": state,
            "nonce": nonce,
            "verifier": verifier,
            "invitation": invitation if is_secret(invitation, INVITATION) else "",
        }
        address = self.provider.address(state=state, nonce=nonce, challenge=challenge)
        return Departure(address=address, cookie=self._keys.sign(claims))

    def arrive(self, cookie: str, *, state: str, code: str, issuer: str, address: str) -> Grant:
        """End a sign-in, and begin a session. issuer: as the provider says it, or "".

        Raises Unauthenticated, Forbidden, BadInput, TooManyAttempts.
        """
        try:
            claims = self._keys.verify(cookie, self._accounts.now(), audience=AUDIENCE)
        except BadToken as error:
            raise Unauthenticated(_NOT_BEGUN) from error
        if not hmac.compare_digest(str(claims["state"]).encode(), state.encode(errors="replace")):
            raise Unauthenticated(_NOT_BEGUN)
        if issuer and issuer != self.provider.settings.issuer:
            raise Unauthenticated("the answer is of another provider: begin again")
        account = f"oidc/{address}"
        attempts.check(
            self._accounts.run(
                lambda session, now: attempts.count(session, now, account=account, address=address)
            )
        )
        identity = self.provider.identity(code, verifier=str(claims["verifier"]), nonce=str(claims["nonce"]))
        password = hash_password(new_secret(REFRESH), name="unused")

        def work(session: Session, now: datetime) -> Grant:
            attempts.forgive(session, account=account, address=address)
            user = find(session, identity)
            if user is None:
                user = add(
                    session,
                    now,
                    identity,
                    self.provider.settings,
                    invitation=str(claims["invitation"]),
                    password=password,
                )
            return sessions.begin(session, now, self._keys, user)

        return self._accounts.run(work)
