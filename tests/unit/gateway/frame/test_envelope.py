"""What surrounds every request: how many large bodies are in memory at a time."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the gateway needs its extra")

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.frame import envelope
from penstock.gateway.frame.envelope import HEADERS, Doors, Envelope
from penstock.gateway.frame.event_stream import ENDING

DOORS = Doors(max_body_bytes=10, large_at_once=1)
SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/api/feedback",
    "headers": [(b"host", b"127.0.0.1")],
    "client": ("127.0.0.1", 1),
}


async def application(_scope: Any, receive: Any, send: Any) -> None:
    """Read a whole body, and answer."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def answered(envelope: Envelope, parts: AsyncIterator[bytes]) -> int:
    """The status of the answer to a body that comes in parts."""
    found: list[int] = []

    async def receive() -> dict[str, Any]:
        part = await anext(parts, b"")
        return {"type": "http.request", "body": part, "more_body": bool(part)}

    async def send(message: Any) -> None:
        found.extend([message["status"]] if message["type"] == "http.response.start" else [])

    await envelope(dict(SCOPE), receive, send)
    return found[0]


async def of(*parts: bytes) -> AsyncIterator[bytes]:
    """A body that is there."""
    for part in parts:
        yield part


async def test_one_large_body_too_many_is_asked_to_come_again() -> None:
    envelope = Envelope(application, DOORS, lambda _: None)
    half, rest = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield 11 * b"x"
        half.set()
        await rest.wait()
        yield 11 * b"x"

    first = asyncio.create_task(answered(envelope, slow()))
    await half.wait()
    assert await answered(envelope, of(6 * b"x", 6 * b"x")) == 429
    assert await answered(envelope, of(10 * b"x")) == 201
    rest.set()
    assert await first == 201
    assert await answered(envelope, of(6 * b"x", 6 * b"x")) == 201
    half.clear()
    rest.clear()
    first = asyncio.create_task(answered(envelope, slow()))
    await half.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await answered(envelope, of(11 * b"x")) == 201


class Caller:
    """Keeps the answer to one request."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self.status = 0
        self.headers = dict[str, str]()

    async def call(self, method: str, **headers: str) -> "Caller":
        """Send a request without a body."""
        said = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        host = (b"host", b"127.0.0.1")
        await self._envelope({**SCOPE, "method": method, "headers": [host, *said]}, self._receive, self._send)
        return self

    async def _receive(self) -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}


async def test_a_defect_is_an_answer_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(_scope: Any, _receive: Any, _send: Any) -> None:
        raise RuntimeError("a defect")

    counted = envelope.REQUESTS.labels("other", "other", "500")
    before = counted._value.get()
    reply = await Caller(Envelope(broken, DOORS, lambda _: None)).call("POST")
    assert reply.status == 500
    assert {name.lower(): value for name, value in HEADERS.items()}.items() <= reply.headers.items()
    assert counted._value.get() == before + 1
    assert [one.getMessage() for one in caplog.records] == ["a request failed"]


PAGE = "https://page.example"


async def test_a_browser_is_told_that_a_page_which_was_named_may_call() -> None:
    envelope = Envelope(application, Doors(origins=frozenset({PAGE})), lambda _: None)
    asked = {"access_control_request_method": "PUT", "access_control_request_headers": "authorization"}
    first = await Caller(envelope).call("OPTIONS", origin=PAGE, **asked)
    assert first.status == 204
    assert "PUT" in first.headers["access-control-allow-methods"]
    assert "Authorization" in first.headers["access-control-allow-headers"]
    then = await Caller(envelope).call("POST", origin=PAGE)
    assert then.status == 201
    for reply in (first, then):
        assert (reply.headers["access-control-allow-origin"], reply.headers["vary"]) == (PAGE, "Origin")
        assert "access-control-allow-credentials" not in reply.headers


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1", "null", ""])
async def test_a_browser_is_told_nothing_of_other_pages(origin: str) -> None:
    envelope = Envelope(application, Doors(origins=frozenset({PAGE})), lambda _: None)
    headers = {"origin": origin} if origin else {}
    for method in ("OPTIONS", "POST"):
        reply = await Caller(envelope).call(method, access_control_request_method="PUT", **headers)
        assert reply.status == (201 if origin in {"", "http://127.0.0.1"} else 403)
        assert not any(name.startswith("access-control") for name in reply.headers)


@pytest.mark.parametrize(
    ("hosts", "origins"),
    [
        *(({host}, set()) for host in ("https://a.example", "a.example:8000", "A.example", "a.example/", "")),
        *((set(), {one}) for one in ("*", "page.example", f"{PAGE}/", "https://Page.example", f"{PAGE}:443")),
        *((set(), {one}) for one in ("null", "ftp://page.example", "https://", "http://u@page.example")),
    ],
)
def test_what_no_request_would_ever_have_is_refused(hosts: set[str], origins: set[str]) -> None:
    with pytest.raises(ConfigurationError, match="write"):
        Doors(hosts=frozenset(hosts), origins=frozenset(origins))
    for proxy in ("*", "proxy.example", "10.0.0.1/8", ""):
        with pytest.raises(ConfigurationError, match="write an address"):
            Doors(proxies=(proxy,))
    Doors(proxies=("10.0.0.7", "10.0.0.0/24", "::1"))
    Doors(hosts=frozenset({"a.example", "fe80::1"}), origins=frozenset({PAGE, "http://127.0.0.1:8080"}))


@pytest.mark.parametrize("ends", [True, False])
async def test_who_still_waits_when_the_server_ends_is_told(ends: bool) -> None:
    waits, ending = asyncio.Event(), asyncio.Event()
    sent = list[Any]()

    async def long(_scope: Any, _receive: Any, _send: Any) -> None:
        waits.set()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    envelope = Envelope(long, DOORS, lambda _: None)
    task = asyncio.ensure_future(envelope({**SCOPE, "state": {ENDING: ending}}, receive, send))
    await waits.wait()
    if ends:
        ending.set()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() == (not ends)
    assert [one["status"] for one in sent if "status" in one] == [503] * ends
