"""How a gateway may be reached: under which names, by whose pages, with bodies of which size."""

import re
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Final
from urllib.parse import urlsplit

from starlette.responses import Response

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.frame.api_errors import ApiError
from penstock.protocol.limits import MIB

# ---- What a browser is told of pages elsewhere that may call, as Fetch has it (CORS).

_METHODS: Final = "GET, POST, PUT, DELETE"
_HEADERS: Final = (
    "Authorization, Content-Type, Idempotency-Key, Last-Event-ID, Penstock-Link, Penstock-Project, Prefer"
)
_SEEN: Final = "Location, Retry-After"
"""Headers of an answer that the page may read, beside those that every page may."""
_KNOWN_S: Final = 600
"""Seconds for which a browser need not ask again."""
_ORIGIN: Final = re.compile(r"(https?)://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
_USUAL: Final = {"http": "80", "https": "443"}


def is_origin(text: str) -> bool:
    """Return whether a text is an origin, written as browsers write it."""
    found = _ORIGIN.fullmatch(text)
    return found is not None and found[2] != _USUAL[found[1]]


def permission(origin: str) -> dict[str, str]:
    """Return the headers by which a browser hands an answer on to a page of an origin."""
    return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _SEEN, "Vary": "Origin"}


def preflight() -> Response:
    """Return the answer to a browser that asks what a page may send."""
    said = {
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Allow-Headers": _HEADERS,
        "Access-Control-Max-Age": str(_KNOWN_S),
    }
    return Response(status_code=204, headers=said)


MAX_BODY_BYTES: Final = 1 * MIB
MAX_IMPORT_BYTES: Final = 64 * MIB
LARGE_AT_ONCE: Final = 4
"""Bodies above `MAX_BODY_BYTES` that are in memory at the same time."""
BODY_S: Final = 30.0
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """Says how the gateway may be reached.

    hosts: names that a request may give as its host, beside loopback's. origins: pages elsewhere from which a
    browser may call, as `https://HOST[:PORT]`. large: routes whose body may have `MAX_IMPORT_BYTES`, by path
    suffix. large_at_once: of such bodies. body_s: seconds in which a body must have come, however large.
    any_host: whatever name it gives. proxies: addresses and networks of proxies in front.

    Raises ConfigurationError for a host or an origin that no request has, and a proxy that is no address.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    large: frozenset[str] = frozenset({"/feedback"})
    body_s: float = BODY_S
    max_body_bytes: int = MAX_BODY_BYTES
    large_at_once: int = LARGE_AT_ONCE
    any_host: bool = False
    proxies: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that each is written as requests have it: no other would ever be found equal."""
        for host in sorted(self.hosts):
            if not host or _name_of(f"[{host}]" if ":" in host else host) != host:
                raise ConfigurationError(
                    f"--host {host}: write the name alone, in small letters, as gateway.example"
                )
        for origin in sorted(self.origins):
            if not is_origin(origin):
                raise ConfigurationError(
                    f"--origin {origin}: write it as browsers do, in small letters, as https://page.example "
                    "or http://127.0.0.1:8080"
                )
        for proxy in self.proxies:
            try:
                ip_network(proxy)
            except ValueError as error:
                raise ConfigurationError(
                    f"--proxy {proxy}: write an address or a network, as 10.0.0.7 or 10.0.0.0/24"
                ) from error

    def check_host(self, host: str) -> None:
        """Raise ApiError 421 for a request that was made under another name."""
        name = _name_of(host)
        if not self.any_host and name not in _LOOPBACK and name not in self.hosts:
            raise ApiError(421, "this gateway does not answer under this host: start it with --host NAME")

    def check_origin(self, origin: str, host: str) -> None:
        """Raise ApiError 403 for a request that a page of another origin makes."""
        own = origin.partition("://")[2] == host
        if not own and origin not in self.origins:
            raise ApiError(403, "pages of this origin may not call: start the gateway with --origin URL")


def _name_of(host: str) -> str:
    """Return the name in the value of a Host header, "" where it has none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
