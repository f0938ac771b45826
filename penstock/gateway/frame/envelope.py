"""The ASGI middleware around every request and every answer of a gateway, and its settings.

It refuses requests with a foreign Host or Origin, beyond the rate of an address, and with a body that is too
large or too slow, before any content could be stored. It adds the security headers to every answer.
"""

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_network
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.frame.event_stream import ending, is_full
from penstock.gateway.frame.requests import ApiError, route_of
from penstock.protocol.limits import MIB
from penstock.rpc.address import counted_as
from penstock.runtime.metrics import LATENCY_S, declare

# ---- Headers of CORS, which allow pages of other origins to call.

_PREFLIGHT: Final = {
    "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE",
    "Access-Control-Allow-Headers": (
        "Authorization, Content-Type, Idempotency-Key, Last-Event-ID, Penstock-Link, Penstock-Project, Prefer"
    ),
    "Access-Control-Max-Age": "600",
}
"""Headers of the answer to a preflight request."""
_SEEN: Final = "Location, Retry-After"
"""Headers of an answer that a page of another origin may read in addition to the usual ones."""
_ORIGIN: Final = re.compile(r"(https?)://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
_HOST: Final = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{0,5})?")
_USUAL: Final = {"http": "80", "https": "443"}


def is_origin(text: str) -> bool:
    """Return whether a text is an origin, written as browsers write it."""
    found = _ORIGIN.fullmatch(text)
    return found is not None and found[2] != _USUAL[found[1]]


def permission(origin: str) -> dict[str, str]:
    """Return the headers that let pages of an origin read an answer."""
    return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _SEEN, "Vary": "Origin"}


MAX_BODY_BYTES: Final = 1 * MIB
MAX_IMPORT_BYTES: Final = 64 * MIB
LARGE_AT_ONCE: Final = 4
"""Bodies above `MAX_BODY_BYTES` that are in memory at once; a project may have half, an account a quarter."""
BODY_S: Final = 30.0
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """Which requests a listener accepts.

    hosts: accepted names in the Host header in addition to loopback. origins: of other pages that may call,
    as `https://HOST[:PORT]`. large: path suffixes of the routes whose body may have `MAX_IMPORT_BYTES`.
    body_s: seconds within which a body must arrive. max_body_bytes: of other routes. large_at_once:
    concurrent large bodies. any_host: accept every Host header. proxies: addresses and networks of trusted
    proxies.

    Raises ConfigurationError for a malformed host, origin or proxy.
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
        """Check that each is written as in requests: any other spelling would never match."""
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
        name = _name_of(host)
        if not self.any_host and name not in _LOOPBACK and name not in self.hosts:
            raise ApiError(421, "this gateway does not answer under this host: start it with --host NAME")

    def check_origin(self, origin: str, host: str) -> None:
        own = origin.partition("://")[2] == host
        if not own and origin not in self.origins:
            raise ApiError(403, "pages of this origin may not call: start the gateway with --origin URL")


def _name_of(host: str) -> str:
    """Return the name in the value of a Host header, "" where that is no name with an optional port."""
    found = _HOST.fullmatch(host.lower())
    return found[1].strip("[]") if found else ""


HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

log = logging.getLogger(__name__)

# ---- Metrics of a gateway. Labels are declared paths and methods of routes, never what a caller wrote.

_families = declare("gateway")

REQUESTS: Final = _families.counter(
    "gateway_requests_total", "Requests answered, by method, route and status", "method", "route", "code"
)
REQUEST_SECONDS: Final = _families.histogram(
    "gateway_request_seconds", "Time from a request's head to the begin of its answer", LATENCY_S
)
RATINGS: Final = _families.counter(
    "gateway_ratings_total", "Ratings taken: one by a call, many as lines, one by a link", "way"
)
JOBS: Final = _families.gauge("gateway_jobs", "Jobs of all gateways that have not ended, by state", "state")
JOB_HEARD: Final = _families.gauge(
    "gateway_job_heard_timestamp_seconds",
    "When the run of a job of this gateway has last written, of that which is silent longest; 0: none runs",
)
JOBS_ENDED: Final = _families.counter(
    "gateway_jobs_ended_total", "Jobs that this gateway has seen end, by state", "state"
)


class Envelope:
    """The middleware around an application.

    admit: counts a request of a client address; raises ApiError beyond the rate limit. form: makes the answer
    to a request that is refused here.
    """

    def __init__(
        self,
        app: ASGIApp,
        doors: Doors,
        admit: Callable[[str], None],
        form: Callable[[ApiError], Response] = ApiError.response,
    ) -> None:
        self._app, self._form = app, form
        self._doors = doors
        self._admit = admit
        self._large_bodies = Counter[str]()
        """By who sends them: all callers (""), a project, an account."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, send)
        body = _Body(receive, self._doors, self._limit(scope["path"]), partial(self._admit_large, scope))
        try:
            self._check(scope, answer)
            headers = Headers(scope=scope)
            body.check_length(headers.get("content-length"))
            asks_first = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
            is_told = asks_first and answer.permitted
            app = Response(status_code=204, headers=_PREFLIGHT) if is_told else self._app
            await app(scope, body.receive, answer.send)
        except ApiError as error:
            if answer.begun:
                raise
            await self._form(error)(scope, receive, answer.send)
        except Exception:
            if answer.begun:
                raise
            # Here, and not by a handler of the framework's: that one answers outside of this.
            log.exception("a request failed", extra={"route": route_of(scope)})
            defect = ApiError(500, "a defect of the gateway; its log says more")
            await self._form(defect)(scope, receive, answer.send)
        except asyncio.CancelledError:
            if not ending(scope).is_set():
                raise
            # The server waits no longer, and would log the cancellation as a defect.
            log.warning("a request was given up: the server ends", extra={"route": route_of(scope)})
            if not answer.begun:
                given_up = ApiError(503, "this gateway ends: ask again", retry_s=1.0)
                await self._form(given_up)(scope, receive, answer.send)
        finally:
            self._large_bodies -= Counter(body.large_of)

    def _admit_large(self, scope: Scope) -> list[str]:
        """Count a large body, and return for whom; the caller is known before the body is read."""
        most, state = self._doors.large_at_once, scope.get("state") or {}
        shares = {"": most}
        if "member" in state:
            shares[f"project/{state['member'].project}"] = max(most // 2, 1)
        if "principal" in state:
            shares[state["principal"].subject] = max(most // 4, 1)
        for sender, share in shares.items():
            if self._large_bodies[sender] >= share:
                detail = (
                    f"{share} large bodies of {sender or 'all callers'} are being sent: wait for one to end"
                )
                raise ApiError(429, detail, retry_s=1.0)
        self._large_bodies.update(list(shares))
        return list(shares)

    def _check(self, scope: Scope, answer: "_Answer") -> None:
        if is_full(scope):
            answer.is_last = True
            raise ApiError(503, "this gateway has no room for another connection: ask again", retry_s=1.0)
        headers = Headers(scope=scope)
        # A proxy in front may believe the other one of two lengths, and take the body for a request.
        answer.is_last = "content-length" in headers and "transfer-encoding" in headers
        host = headers.get("host", "")
        if "host" in headers or scope.get("http_version") != "1.0":  # which knows no Host
            self._doors.check_host(host)
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "content-encoding: send the body without compression")
        if "origin" in headers:
            origin = headers["origin"]
            self._doors.check_origin(origin, host)
            answer.permitted = permission(origin) if origin in self._doors.origins else {}
        if not scope["path"].isprintable():
            raise ApiError(404, "no such path")  # no database stores NUL
        client = scope.get("client")
        self._admit(counted_as(client[0]) if client else "")

    def _limit(self, path: str) -> int:
        large = any(path.endswith(suffix) for suffix in self._doors.large)
        return MAX_IMPORT_BYTES if large else self._doors.max_body_bytes


class _Body:
    """Receives a body, within its limits of size and time.

    admit_large: called once the body exceeds the usual size; returns who is charged, or raises. large_of: it.
    """

    def __init__(
        self, receive: Receive, doors: Doors, limit: int, admit_large: Callable[[], list[str]]
    ) -> None:
        self._receive = receive
        self._limit = limit
        self._left = limit
        self._small = doors.max_body_bytes
        self._admit_large = admit_large
        self._within_s = doors.body_s
        self._deadline_s = asyncio.get_running_loop().time() + doors.body_s
        self._whole = False
        self.large_of = list[str]()

    def check_length(self, length: str | None) -> None:
        if length is not None and length.isdigit() and int(length) > self._limit:
            raise self._too_large()

    async def receive(self) -> Message:
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError as error:
            detail = f"the body did not come within {self._within_s:g} s: send it faster, or less of it"
            raise ApiError(408, detail) from error
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise self._too_large()
        if not self.large_of and self._limit - self._left > self._small:
            self.large_of = self._admit_large()
        self._whole = not message.get("more_body", False)
        return message

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._limit} bytes: send it in parts")


class _Answer:
    """Adds the common headers to an answer, and counts it.

    permitted: headers of CORS. is_last: whether the connection is closed after the answer.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._began_s = time.monotonic()
        self.begun = False
        self.permitted = dict[str, str]()
        self.is_last = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            MutableHeaders(scope=message).update({**HEADERS, **self.permitted})
            if self.is_last or message["status"] in {408, 413}:  # of these the rest of the body is not read
                MutableHeaders(scope=message)["Connection"] = "close"
            self._count(message["status"])
        await self._send(message)

    def _count(self, status: int) -> None:
        known = getattr(self._scope.get("route"), "methods", None) or ()
        method = self._scope["method"] if self._scope["method"] in known else "other"
        REQUESTS.labels(method, route_of(self._scope) or "other", str(status)).inc()
        REQUEST_SECONDS.observe(time.monotonic() - self._began_s)
