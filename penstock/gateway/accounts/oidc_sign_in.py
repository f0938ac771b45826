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

from penstock.gateway.accounts import attempts, identities, sessions
from penstock.gateway.accounts.account_errors import Unauthenticated
from penstock.gateway.accounts.accounts import Accounts
from penstock.gateway.accounts.oidc_provider import Provider
from penstock.gateway.accounts.passwords import hash_password
from penstock.gateway.accounts.secrets import INVITATION, REFRESH, is_secret, new_secret
from penstock.gateway.accounts.sessions import Grant
from penstock.gateway.accounts.signing_keys import BadToken, Keys

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
            user = identities.find(session, identity)
            if user is None:
                user = identities.add(
                    session,
                    now,
                    identity,
                    self.provider.settings,
                    invitation=str(claims["invitation"]),
                    password=password,
                )
            return sessions.begin(session, now, self._keys, user)

        return self._accounts.run(work)
