"""Signing in at an identity provider (OpenID Connect), which the file of `--oidc` describes.

    sign in there (state, nonce, challenge) ─► code ─► exchanged here with the verifier ─► ID token, checked

Only endpoints of the provider's documents are called, over TLS or on this machine; redirects are refused. The
browser keeps state, nonce and verifier in a signed cookie for ten minutes. docs/gateway.md describes the
file; a relative `client_secret_file` is relative to its folder.
"""

import hmac
import json
import secrets
import threading
import time
import tomllib
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final
from urllib.error import HTTPError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

import jwt
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy.orm import Session

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.accounts import audit, projects, sessions, users
from penstock.gateway.accounts.accounts import Accounts
from penstock.gateway.accounts.principal import (
    INVITATION,
    REFRESH,
    AccountConflict,
    BadInput,
    Forbidden,
    Unauthenticated,
    is_secret,
    new_secret,
)
from penstock.gateway.accounts.projects import check_project
from penstock.gateway.accounts.sessions import BadToken, Grant, Keys
from penstock.gateway.accounts.users import hash_password
from penstock.gateway.store.tables import IdentityRow, ProjectRow, Role, UserRow
from penstock.protocol.limits import KIB

ALGORITHMS: Final = ("RS256", "PS256", "ES256", "EdDSA")
KNOWN_S: Final = 3600.0
"""Seconds for which the documents of the provider are cached."""
AGAIN_S: Final = 30.0
"""Seconds between two attempts to fetch an unknown key."""
CALL_S: Final = 10.0
MAX_BYTES: Final = 256 * KIB
SKEW_S: Final = 60
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


class ProviderFailed(Unauthenticated):
    """Reports a provider that does not answer, or an invalid answer."""


class Newcomers(BaseModel):
    """The project and role of newcomers with a verified address of a domain."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    project: str
    role: Role = Role.VIEWER


class ProviderSettings(BaseModel):
    """A provider as the operator describes it; the file names a file with the secret.

    issuer: its URL, as in its tokens. title: for people. gateway: URL at which browsers reach the gateway.
    domains: of email addresses that need no invitation.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True)

    issuer: Annotated[str, Field(max_length=256)]
    client_id: Annotated[str, Field(min_length=1, max_length=256)]
    client_secret: Annotated[str, Field(alias="client_secret_file", repr=False)]
    gateway: Annotated[str, Field(max_length=256)]
    title: Annotated[str, Field(min_length=1, max_length=64)] = "single sign-on"
    domains: dict[str, Newcomers] = Field(default_factory=dict)

    @property
    def redirect(self) -> str:
        """Return the exact redirect URI."""
        return f"{self.gateway.rstrip('/')}/api/auth/oidc/callback"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A person as a provider identifies them. address: of email; "" unless the provider has verified it."""

    issuer: str
    subject: str
    address: str
    name: str


class Provider:
    """A provider; safe to use from several threads."""

    def __init__(self, settings: ProviderSettings) -> None:
        self.settings = settings
        self._lock = threading.RLock()
        self._places: dict[str, Any] = {}
        self._keys: dict[str, Any] = {}
        self._known_at_s = self._keys_at_s = -KNOWN_S

    def address(self, *, state: str, nonce: str, challenge: str) -> str:
        """Return the URL at which the person signs in; raises ProviderFailed."""
        place = self._documents()["authorization_endpoint"]
        query = {
            "response_type": "code",
            "client_id": self.settings.client_id,
            "redirect_uri": self.settings.redirect,
            "scope": "openid email profile",
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        return f"{place}{'&' if '?' in place else '?'}{urlencode(query)}"

    def identity(self, code: str, *, verifier: str, nonce: str) -> Identity:
        """Exchange a code for the identity of the person; raises ProviderFailed."""
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self.settings.redirect,
            "client_id": self.settings.client_id,
            "code_verifier": verifier,
        }
        pair = f"{quote(self.settings.client_id, safe='')}:{quote(self.settings.client_secret, safe='')}"
        headers = {"Authorization": f"Basic {b64encode(pair.encode()).decode()}"}
        answer = _called(self._documents()["token_endpoint"], urlencode(form).encode(), headers)
        return self._checked(str(answer.get("id_token", "")), nonce)

    def _checked(self, token: str, nonce: str) -> Identity:
        try:
            header = jwt.get_unverified_header(token)
            claims: dict[str, Any] = jwt.decode(
                token,
                self._key(str(header.get("kid", ""))),
                algorithms=list(ALGORITHMS),
                audience=self.settings.client_id,
                issuer=self.settings.issuer,
                leeway=SKEW_S,
                options={"require": ["exp", "iat", "iss", "aud", "sub"]},
            )
        except (jwt.PyJWTError, ValueError) as error:
            raise ProviderFailed("the provider's token is not valid: try again") from error
        audience = claims["aud"]
        if claims.get("nonce") != nonce or not isinstance(claims["sub"], str) or not claims["sub"]:
            raise ProviderFailed("the provider's token is of another sign-in: try again")
        if isinstance(audience, list) and len(audience) > 1 and claims.get("azp") != self.settings.client_id:
            raise ProviderFailed("the provider's token is for somebody else: try again")
        verified = claims.get("email_verified") is True
        address = str(claims.get("email", "")).strip().lower()
        return Identity(
            issuer=self.settings.issuer,
            subject=claims["sub"],
            address=address if verified else "",
            name=str(claims.get("preferred_username") or address.partition("@")[0] or ""),
        )

    def _key(self, kid: str) -> Any:
        """Return the key with an id; an unknown one is fetched, at most every `AGAIN_S` seconds."""
        with self._lock:
            is_known = kid in self._keys or (not kid and self._keys)
            if not is_known and time.monotonic() - self._keys_at_s > AGAIN_S:
                self._keys_at_s = time.monotonic()
                found = _called(self._documents()["jwks_uri"])
                self._keys = {str(one.key_id or ""): one.key for one in jwt.PyJWKSet.from_dict(found).keys}
            if not kid and len(self._keys) == 1:
                return next(iter(self._keys.values()))
            if kid not in self._keys:
                raise ProviderFailed("the provider shows no key that has signed its token: try again")
            return self._keys[kid]

    def _documents(self) -> dict[str, Any]:
        with self._lock:
            if time.monotonic() - self._known_at_s > KNOWN_S:
                issuer = self.settings.issuer
                found = _called(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
                places = ("authorization_endpoint", "token_endpoint", "jwks_uri")
                if found.get("issuer") != issuer or not all(is_safe(str(found.get(name))) for name in places):
                    raise ProviderFailed("the provider's document is of another issuer, or names plain HTTP")
                self._places, self._known_at_s = found, time.monotonic()
            return self._places


def is_safe(url: str) -> bool:
    """Return whether a URL has HTTPS, or is of this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and host in _LOOPBACK))


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Refuse redirects, which would send the request to another server."""


_OPENER: Final = build_opener(_NoRedirect, ProxyHandler())


def _called(
    url: str, body: bytes | None = None, headers: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the JSON object that a call of the provider answers with; raises ProviderFailed."""
    request = Request(url, body, dict(headers))  # noqa: S310 - HTTPS, or this machine's: `is_safe`
    try:
        with _OPENER.open(request, timeout=CALL_S) as reply:
            content = json.loads(reply.read(MAX_BYTES))
    except HTTPError as error:
        error.close()
        raise ProviderFailed(f"the provider refused with {error.code}: try again") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ProviderFailed("the provider does not answer now: try again") from error
    if not isinstance(content, dict):
        raise ProviderFailed("the provider's answer is no object")
    return content


# ---- People of an identity provider. Each function is part of a transaction of the caller.

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
    """Add a newcomer who has an invitation, or a verified address of an accepted domain.

    password: a hash that no password matches. Raises Forbidden for others, BadInput for an invalid
    invitation.
    """
    row = projects.find_invitation(session, now, invitation) if invitation else None
    welcome = settings.domains.get(identity.address.rpartition("@")[2]) if identity.address else None
    if row is None and (welcome is None or session.get(ProjectRow, welcome.project) is None):
        raise Forbidden(NOT_KNOWN)
    by = f"oidc/{settings.issuer}"[:64]
    user = _named(session, now, identity, password, by=by)
    session.add(IdentityRow(issuer=identity.issuer, subject=identity.subject, user=user.id, since=now))
    audit.note(session, now, by=by, action="identity added", subject=f"user/{user.id}")
    if row is not None:
        projects.redeem(session, now, row, user=user.id)
    elif welcome is not None:
        projects.set_role(session, now, project=welcome.project, user=user.id, role=welcome.role, by=by)
    return user


def _named(session: Session, now: datetime, identity: Identity, password: str, *, by: str) -> UserRow:
    """Add a person under the name that the provider reports, or a similar one if that is taken."""
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


class OidcSignIn:
    """Sign-ins at one provider."""

    def __init__(self, provider: Provider, accounts: Accounts, keys: Keys) -> None:
        self.provider, self._accounts, self._keys = provider, accounts, keys

    def depart(self, invitation: str) -> tuple[str, str]:
        """Start a sign-in; returns the URL of the provider, and the cookie for the browser.

        invitation: of a newcomer, or "". Raises ProviderFailed.
        """
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
        return address, self._keys.sign(claims)

    def arrive(self, cookie: str, *, state: str, code: str, issuer: str, address: str) -> Grant:
        """Complete a sign-in, and start a session. issuer: as the provider reports it, or "".

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
        self._accounts.count_attempt(account, address)
        identity = self.provider.identity(code, verifier=str(claims["verifier"]), nonce=str(claims["nonce"]))
        password = hash_password(new_secret(REFRESH), name="unused")

        def work(session: Session, now: datetime) -> Grant:
            users.forgive_attempts(session, account=account, address=address)
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


_OTHERS: Final = 0o077


def read_provider(file: Path) -> ProviderSettings:
    """Return the provider that a file describes; raises ConfigurationError that names the wrong field."""
    try:
        found = ProviderSettings.model_validate(tomllib.loads(file.read_text()), by_alias=True, by_name=False)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigurationError(
            f"--oidc {file}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--oidc {file}: cannot be read as TOML: {error}") from error
    for name, url in (("issuer", found.issuer), ("gateway", found.gateway)):
        if not is_safe(url):
            raise ConfigurationError(f"--oidc {file}: {name}: use https://, or http:// on this machine alone")
    for domain, one in found.domains.items():
        _check_newcomers(file, domain, one)
    secret = _secret(file.parent / found.client_secret)
    domains = {name.lower(): one for name, one in found.domains.items()}
    return found.model_copy(update={"client_secret": secret, "domains": domains})


def _check_newcomers(file: Path, domain: str, one: Newcomers) -> None:
    try:
        check_project(one.project)
    except BadInput as error:
        raise ConfigurationError(f"--oidc {file}: domains.{domain}.project: {error}") from error
    if one.role is Role.OWNER:
        raise ConfigurationError(
            f"--oidc {file}: domains.{domain}.role: use viewer or editor; an owner is added by name"
        )


def _secret(file: Path) -> str:
    try:
        if file.stat().st_mode & _OTHERS:
            raise ConfigurationError(
                f"client_secret_file={str(file)!r}: others may read it; chmod 600 it, and renew the secret"
            )
        found = file.read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"client_secret_file={str(file)!r}: the client's secret cannot be read: {error}"
        ) from error
    if not found:
        raise ConfigurationError(
            f"client_secret_file={str(file)!r}: is empty; write the client's secret into it"
        )
    return found
