"""A provider of identities (OpenID Connect): where one signs in at it, and who it says came back.

    sign in there (state, nonce, challenge) ─► code ─► exchanged here with the verifier ─► ID token, checked

Only what the provider's own documents name is called, over TLS or on this machine; nothing redirects a call.
"""

import json
import threading
import time
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

import jwt

from penstock.gateway.accounts.account_errors import Unauthenticated
from penstock.gateway.store.tables import Role
from penstock.protocol.limits import KIB

ALGORITHMS: Final = ("RS256", "PS256", "ES256", "EdDSA")
KNOWN_S: Final = 3600.0
"""Seconds for which the provider's documents are taken as they were."""
AGAIN_S: Final = 30.0
"""Seconds between two looks for a key that is not known."""
CALL_S: Final = 10.0
MAX_BYTES: Final = 256 * KIB
SKEW_S: Final = 60
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


class ProviderFailed(Unauthenticated):
    """Reports a provider that does not answer, or whose answer does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomers:
    """Says what people become whose address is of a domain, and verified: members of a project."""

    project: str
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSettings:
    """A provider as the operator names it.

    issuer: its URL, as its tokens say it. title: for people. gateway: URL under which browsers reach the
    gateway. domains: of addresses whose people may come without an invitation.
    """

    issuer: str
    client_id: str
    client_secret: str = field(repr=False)
    gateway: str
    title: str = "single sign-on"
    domains: Mapping[str, Newcomers] = field(default_factory=dict)

    @property
    def redirect(self) -> str:
        """Return the address to which the provider sends people back, exactly."""
        return f"{self.gateway.rstrip('/')}/api/auth/oidc/callback"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Somebody whom a provider knows. address: "" unless the provider has verified it."""

    issuer: str
    subject: str
    address: str
    name: str


class Provider:
    """A provider; safe to use from several threads."""

    def __init__(self, settings: ProviderSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._places: dict[str, Any] = {}
        self._keys: dict[str, Any] = {}
        self._known_at_s = self._keys_at_s = -KNOWN_S

    def address(self, *, state: str, nonce: str, challenge: str) -> str:
        """Return where one signs in; raises ProviderFailed."""
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
        """Exchange a code; returns who it stands for. Raises ProviderFailed."""
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
            raise ProviderFailed("the provider's token does not count: try again") from error
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
        """Return the key of a token; one that is new is looked for, once in a while."""
        with self._lock:
            is_known = kid in self._keys or (not kid and self._keys)
            if not is_known and time.monotonic() - self._keys_at_s > AGAIN_S:
                self._keys_at_s = time.monotonic()
                found = _called(self._documents_held()["jwks_uri"])
                self._keys = {str(one.key_id or ""): one.key for one in jwt.PyJWKSet.from_dict(found).keys}
            if not kid and len(self._keys) == 1:
                return next(iter(self._keys.values()))
            if kid not in self._keys:
                raise ProviderFailed("the provider shows no key that has signed its token: try again")
            return self._keys[kid]

    def _documents(self) -> dict[str, Any]:
        with self._lock:
            return self._documents_held()

    def _documents_held(self) -> dict[str, Any]:
        if time.monotonic() - self._known_at_s > KNOWN_S:
            issuer = self.settings.issuer
            found = _called(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
            places = ("authorization_endpoint", "token_endpoint", "jwks_uri")
            if found.get("issuer") != issuer or not all(is_safe(str(found.get(name))) for name in places):
                raise ProviderFailed("the provider's document is of another issuer, or names plain HTTP")
            self._places, self._known_at_s = found, time.monotonic()
        return self._places


def is_safe(url: str) -> bool:
    """Return whether a URL is one of HTTPS, or of this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and host in _LOOPBACK))


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow none: it would carry what is said to somebody else."""


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
