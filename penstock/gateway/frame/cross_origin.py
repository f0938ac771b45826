"""What a browser is told of pages elsewhere that may call, as Fetch has it (CORS).

A browser asks before a page of another origin sends a token or JSON, and hands on no answer that does not
name that origin. Cookies are none of it: callers say who they are in a header.
"""

import re
from typing import Final

from starlette.responses import Response

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
