import asyncio
import json
import select
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.application import gateway_listener
from penstock.gateway.frame import envelope
from penstock.gateway.frame.envelope import HEADERS, Doors, Envelope
from penstock.gateway.frame.event_stream import ENDING, EventStream
from penstock.gateway.frame.requests import CallLimits
from penstock.gateway.frame.route_access import make_app
from penstock.gateway.http_server import Connections, HttpServer
from penstock.gateway.store.tables import Role
from penstock.launch.gateway.local_runner import LocalRunner
from penstock.rpc.address import AddressInUse
from penstock.rpc.gate import Rates
from tests.support.gateway.job_templates import write_templates
from tests.support.gateway.small_gateway import SmallGateway, serving
from tests.support.run.harness import eventually

FORM = b"grant_type=password&username=ada&password=wrong"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HttpServer]:
    doors = Doors(
        hosts=frozenset({"gateway.example"}), origins=frozenset({"https://page.example"}), body_s=0.5
    )
    app = make_app(gateway_listener(SmallGateway.in_folder(tmp_path).parts, doors))
    with serving(app, head_s=0.5) as served:
        yield served


def connected(server: HttpServer) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def spoken(server: HttpServer, request: bytes) -> bytes:
    """Everything that comes back until the server closes or is silent after an answer."""
    with connected(server) as connection:
        connection.sendall(request)
        reply = b""
        while b"\r\n\r\n" not in reply:
            part = connection.recv(65536)
            if not part:
                break
            reply += part
        return reply


def head(method: str, path: str, *lines: str, host: str = "127.0.0.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", *lines, "", ""]).encode()


def status(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1]) if reply else 0


FORM_TYPE = "Content-Type: application/x-www-form-urlencoded"


def test_a_body_that_is_too_large_is_not_read(server: HttpServer) -> None:
    said = head("POST", "/api/auth/token", FORM_TYPE, "Content-Length: 2000000")
    assert status(spoken(server, said)) == 413
    chunk = b"20000\r\n" + b"a" * 0x20000 + b"\r\n"
    chunked = head("POST", "/api/auth/token", FORM_TYPE, "Transfer-Encoding: chunked") + chunk * 9
    assert status(spoken(server, chunked)) == 413


def test_a_body_that_comes_too_slowly_is_refused(server: HttpServer) -> None:
    slow = head("POST", "/api/auth/token", FORM_TYPE, f"Content-Length: {len(FORM)}") + FORM[:5]
    reply = spoken(server, slow)
    assert status(reply) == 408
    assert b"connection: close" in reply.lower()


def test_a_head_that_comes_too_slowly_is_cut_off(server: HttpServer) -> None:
    assert spoken(server, b"GET /api/health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ") == b""
    with connected(server) as connection:
        connection.sendall(head("GET", "/api/health"))
        assert status(connection.recv(65536)) == 200
        connection.sendall(b"GET /api/health HTTP/1.1\r\n")
        assert connection.recv(65536).startswith((b"", b"{"))
        while connection.recv(65536):
            pass


def to_its_end(connection: socket.socket, *lines: str) -> bytes:
    connection.sendall(head("GET", "/api/health", *lines))
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_full_server_answers_in_the_usual_form(server: HttpServer) -> None:
    counted = envelope.REQUESTS.labels("other", "other", "503")
    before = counted._value.get()
    with serving(make_app_of(server), most_connections=3) as served, ExitStack() as held:
        first, second, third, fourth = (held.enter_context(connected(served)) for _ in range(4))
        refused = to_its_end(fourth)
        assert status(refused) == 503
        said, _, body = refused.partition(b"\r\n\r\n")
        assert json.loads(body).keys() == {"error", "detail", "field"}
        headers = dict(line.lower().split(": ", 1) for line in said.decode().splitlines()[1:])
        assert (headers["connection"], headers["retry-after"]) == ("close", "1")
        assert {name.lower(): value.lower() for name, value in HEADERS.items()}.items() <= headers.items()
        assert counted._value.get() == before + 1
        assert status(to_its_end(third, "Connection: close")) == 503
        second.sendall(head("GET", "/api/health"))
        assert status(second.recv(65536)) == 200
        assert status(to_its_end(first, "Connection: close")) == 200


def test_a_head_that_is_too_large_is_refused(server: HttpServer) -> None:
    assert status(spoken(server, head("GET", "/api/health", "X: " + "a" * 200_000)[:-4])) in {400, 431}


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("127.0.0.1", 200),
        ("localhost:8000", 200),
        ("[::1]:8000", 200),
        ("gateway.example", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("LOCALHOST", 200),
        *((host, 421) for host in ("", "[", "[::1", "u@127.0.0.1", "127.0.0.1:80@evil", "127.0.0.1/a")),
        *((host, 421) for host in ("localhost?a", "localhost#a", "localhost:a", "127.0.0.1, evil", "::1")),
    ],
)
def test_only_hosts_that_are_named_are_answered(server: HttpServer, host: str, code: int) -> None:
    assert status(spoken(server, head("GET", "/api/health", host=host))) == code


def test_http_1_0_needs_no_host_and_a_compressed_body_is_refused(server: HttpServer) -> None:
    assert status(spoken(server, b"GET /api/health HTTP/1.0\r\n\r\n")) == 200
    assert status(spoken(server, b"GET /api/health HTTP/1.0\r\nHost: evil.example\r\n\r\n")) == 421
    for coding, code in (("gzip", 415), ("BR", 415), ("identity", 200)):
        assert status(spoken(server, head("GET", "/api/health", f"Content-Encoding: {coding}"))) == code


def test_every_answer_carries_the_policy(server: HttpServer) -> None:
    for path in ("/api/health", "/api/me", "/nowhere"):
        reply = spoken(server, head("GET", path)).decode().lower()
        assert [name for name, value in HEADERS.items() if f"{name}: {value}".lower() not in reply] == []
        assert "server: " not in reply


def test_the_server_stops_in_spite_of_a_slow_client(server: HttpServer) -> None:
    with connected(server) as connection:
        connection.sendall(b"GET /api/health HTTP/1.1\r\n")
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        stopping.join(30)
        assert not stopping.is_alive()
        with suppress(ConnectionResetError):  # closed either way; a reset where bytes came unread
            assert connection.recv(1) == b""


@pytest.mark.parametrize(
    ("proxies", "seen"), [((), "127.0.0.1"), (("10.0.0.0/8",), "127.0.0.1"), (("127.0.0.0/8",), "10.1.1.1")]
)
def test_only_named_proxies_say_who_sent_a_request(proxies: tuple[str, ...], seen: str) -> None:
    app = FastAPI()

    @app.get("/")
    def client(request: Request) -> str:
        assert request.client is not None
        return request.client.host

    with serving(app, proxies=proxies) as served:
        said = {"X-Forwarded-For": "192.0.2.9, 10.1.1.1"}
        assert httpx2.get(f"{served.url}/", headers=said).json() == seen


@pytest.mark.parametrize("path", ["events?job=", "jobs/{job}/log"])
def test_a_stream_ends_with_its_server(tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture) -> None:
    runner = LocalRunner(tmp_path / "jobs", write_templates(tmp_path / "templates"))
    gateway = SmallGateway.in_folder(tmp_path, runner=runner)
    header = gateway.token("alpha")
    body = {"agent": "mine", "template": "quick"}
    job = gateway.client.post("/api/projects/alpha/jobs", json=body, headers=header).json()["id"]
    asked = head("GET", f"/api/projects/alpha/{path.format(job=job)}", *map(": ".join, header.items()))
    served = HttpServer(make_app(gateway_listener(gateway.parts, Doors())), "127.0.0.1:0")
    served.start()
    with connected(served) as connection:
        connection.sendall(asked)
        reply = b""
        while b"\n\n" not in reply:  # its first event, or a sign of life
            reply += connection.recv(65536)
        served.stop()
        while part := connection.recv(65536):
            reply += part
    assert status(reply) == 200
    assert reply.endswith(b"0\r\n\r\n")
    assert [one.getMessage() for one in caplog.records if one.levelname in {"WARNING", "ERROR"}] == []


@pytest.mark.parametrize(("proxies", "let_in"), [((), False), (("127.0.0.1",), True)])
def test_an_address_with_too_many_connections_gets_no_more(
    server: HttpServer, proxies: tuple[str, ...], let_in: bool
) -> None:
    def answer(connection: socket.socket) -> int:
        with suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(head("GET", "/api/health"))
            return status(connection.recv(65536))
        return 0

    with serving(make_app_of(server), proxies=proxies, most_of_address=2) as served:
        with connected(served) as first:
            assert answer(first) == 200
            with connected(served) as second, connected(served) as third:
                assert answer(second) == 200
                assert answer(third) == (200 if let_in else 0)

        def is_let_in() -> bool:
            with connected(served) as again:
                return answer(again) == 200

        eventually(is_let_in)  # the server hears of their ends a moment later


def test_an_account_follows_a_limited_number_of_streams(tmp_path: Path) -> None:
    gateway = SmallGateway.in_folder(tmp_path)
    parts = replace(gateway.parts, limits=CallLimits(streams=1))
    ada, bob = gateway.token("alpha"), gateway.token("alpha")
    with serving(make_app(gateway_listener(parts, Doors()))) as served:
        path, job = f"{served.url}/api/projects/alpha/events", {"job": ""}
        with httpx2.stream("GET", path, params=job, headers=ada) as first:
            assert first.status_code == 200
            refused = httpx2.get(path, params=job, headers=ada)
            assert (refused.status_code, refused.json()["error"]) == (429, "too_many")
            with httpx2.stream("GET", path, params=job, headers=bob) as other:
                assert other.status_code == 200

        def is_followed() -> bool:
            with httpx2.stream("GET", path, params=job, headers=ada) as again:
                return again.status_code == 200

        eventually(is_followed)  # the server hears of its end a moment later


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ("nowhere", "write HOST:PORT"),
        ("unix:/tmp/x", "write HOST:PORT"),
        ("0.0.0.0:8000", "passwords and tokens would travel in plaintext"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(server: HttpServer, listen: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HttpServer(make_app_of(server), listen)
    with pytest.raises(AddressInUse, match="choose another port"):
        HttpServer(make_app_of(server), server.address)


def test_a_server_that_stops_unasked_has_failed(server: HttpServer, tmp_path: Path) -> None:
    (tmp_path / "none.pem").write_text("no certificate")
    pem, ended = tmp_path / "none.pem", threading.Event()
    broken = HttpServer(make_app_of(server), "127.0.0.1:0", certificate=pem, key=pem)
    broken.start(on_end=ended.set)
    assert ended.wait(60)
    assert broken.failed
    broken.stop()


def test_a_server_told_to_stop_has_not_failed(server: HttpServer) -> None:
    ended = threading.Event()
    other = HttpServer(make_app_of(server), "127.0.0.1:0")
    other.start(on_end=ended.set)
    other.stop()
    assert ended.wait(60)
    assert not other.failed


def make_app_of(server: HttpServer) -> Any:
    return server._server.config.app


def test_no_part_of_an_answer_waits_until_the_one_before_is_acknowledged(tmp_path: Path) -> None:
    gateway = SmallGateway.in_folder(tmp_path)
    served = HttpServer(make_app(gateway_listener(gateway.parts, Doors())), "127.0.0.1:0")
    with connected(served):
        connection, _ = served._socket.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    served._socket.close()


ONE = Rates(calls=1e-6, bytes=1e9)


def test_an_address_with_too_many_requests_waits(tmp_path: Path) -> None:
    gateway = SmallGateway.in_folder(tmp_path, address=ONE)
    first, second = gateway.client.get("/api/health"), gateway.client.get("/api/health")
    assert (first.status_code, second.status_code) == (200, 429)
    assert int(second.headers["retry-after"]) >= 1
    assert second.json()["error"] == "too_many"


def test_addresses_of_one_network_of_ipv6_have_the_limits_of_one(tmp_path: Path) -> None:
    gateway = SmallGateway.in_folder(tmp_path, address=ONE)
    mapped = ("::ffff:192.0.2.1", "192.0.2.1", "::ffff:192.0.2.2")
    seen = ("2001:db8::1", "2001:db8::2:3", "2001:db8:0:0:ffff::", "2001:db8:0:1::1", "fe80::1%eth0", *mapped)
    codes = list[int]()
    for address in seen:
        client = TestClient(gateway.client.app, base_url="http://127.0.0.1", client=(address, 1))
        codes.append(client.get("/api/health").status_code)
    assert codes == [200, 429, 429, 200, 200, 200, 429, 200]
    held = Connections(proxies=["2001:db8:9::/48"], most=2)
    assert [held.begin(f"2001:db8::{n}") for n in (1, 2, 3)] == [True, True, False]
    assert held.begin("2001:db8:0:1::1")
    assert [held.begin(f"2001:db8:9::{n}") for n in (1, 2, 3)] == [True] * 3
    for number in (1, 2, 3):
        held.end(f"2001:db8::{number}")
    assert held.begin("2001:db8::4")


def test_a_request_with_two_lengths_is_the_last_of_its_connection(server: HttpServer) -> None:
    said = head("POST", "/api/auth/token", FORM_TYPE, "Content-Length: 3", "Transfer-Encoding: chunked")
    with connected(server) as connection:
        connection.sendall(said + b"3\r\nabc\r\n0\r\n\r\n" + head("GET", "/api/health"))
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    assert (status(reply), reply.count(b"HTTP/1.1 ")) == (422, 1)
    assert b"connection: close" in reply.lower()


def test_an_account_with_too_many_requests_waits(tmp_path: Path) -> None:
    gateway = SmallGateway.in_folder(tmp_path, account=ONE)
    gateway.person("ada", "alpha", Role.OWNER)
    ada, program = gateway.bearer("ada"), gateway.token("alpha")
    codes = [gateway.get("/api/me", who).status_code for who in (ada, ada, program)]
    assert codes == [200, 429, 200]


DOORS = Doors(max_body_bytes=10, large_at_once=1)
SCOPE: Final[dict[str, Any]] = {
    "type": "http",
    "method": "POST",
    "path": "/api/feedback",
    "headers": [(b"host", b"127.0.0.1")],
    "client": ("127.0.0.1", 1),
}


async def application(_scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def of(*parts: bytes) -> AsyncIterator[bytes]:
    """A body that is there."""
    for part in parts:
        yield part


class Caller:
    """Keeps the answer to one request. parts: of its body."""

    def __init__(self, envelope: Envelope, parts: AsyncIterator[bytes] | None = None) -> None:
        self._envelope, self._parts = envelope, parts or of()
        self.status = 0
        self.headers = dict[str, str]()

    async def call(self, method: str = "POST", state: Any = None, **headers: str) -> "Caller":
        said = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        asked = {"method": method, "headers": [*SCOPE["headers"], *said], "state": state or {}}
        await self._envelope(SCOPE | asked, self._receive, self._send)
        return self

    async def _receive(self) -> dict[str, Any]:
        part = await anext(self._parts, b"")
        return {"type": "http.request", "body": part, "more_body": bool(part)}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}


async def answered(envelope: Envelope, parts: AsyncIterator[bytes]) -> int:
    return (await Caller(envelope, parts).call()).status


async def test_a_large_body_beyond_the_limit_is_asked_to_retry() -> None:
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


LINE = json.dumps({"prompt": "p", "response": "r" * 150_000, "score": 1}).encode() + b"\n"


def test_an_account_or_project_that_sends_large_bodies_slowly_stops_no_others(tmp_path: Path) -> None:
    gateway = SmallGateway.in_folder(tmp_path)
    place, more = "/api/projects/{}/agents/a/feedback", ["Content-Length: 3000000"]
    for name in ("ada", "bob", "cleo"):
        gateway.person(name, "alpha", Role.EDITOR if name != "ada" else Role.OWNER)
    with serving(make_app(gateway_listener(gateway.parts, Doors()))) as served, ExitStack() as held:

        def slow(caller: dict[str, str]) -> socket.socket:
            connection = held.enter_context(connected(served))
            said = head("POST", place.format("alpha"), *map(": ".join, caller.items()), *more)
            connection.sendall(said + b"x" * 2_000_000)
            return connection

        def imported(caller: dict[str, str], project: str) -> int:
            url = f"{served.url}{place.format(project)}"
            return httpx2.post(url, content=8 * LINE, headers=caller).status_code

        first = [slow(gateway.bearer("ada")) for _ in range(4)]
        refused = set[socket.socket]()
        while len(refused) < 3:
            ready, _, _ = select.select([one for one in first if one not in refused], [], [], 20)
            assert ready, "more than one large body of an account is read"
            assert {status(one.recv(65536)) for one in ready} == {429}
            refused |= {*ready}
        assert imported(gateway.bearer("bob"), "alpha") == 201
        second = slow(gateway.token("alpha"))
        eventually(lambda: imported(gateway.bearer("cleo"), "alpha") == 429)
        assert imported(gateway.token("beta"), "beta") == 201
        second.close()
        eventually(lambda: imported(gateway.bearer("cleo"), "alpha") == 201)


async def test_a_defect_is_answered_in_the_usual_form(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(_scope: Any, _receive: Any, _send: Any) -> None:
        raise RuntimeError("a defect")

    counted = envelope.REQUESTS.labels("other", "other", "500")
    before = counted._value.get()
    reply = await Caller(Envelope(broken, DOORS, lambda _: None)).call()
    assert reply.status == 500
    assert {name.lower(): value for name, value in HEADERS.items()}.items() <= reply.headers.items()
    assert counted._value.get() == before + 1
    assert [one.getMessage() for one in caplog.records] == ["a request failed"]


PAGE = "https://page.example"


async def test_a_named_page_gets_headers_of_cors() -> None:
    envelope = Envelope(application, Doors(origins=frozenset({PAGE})), lambda _: None)
    asked = {"access_control_request_method": "PUT", "access_control_request_headers": "authorization"}
    first = await Caller(envelope).call("OPTIONS", origin=PAGE, **asked)
    assert first.status == 204
    assert "PUT" in first.headers["access-control-allow-methods"]
    assert "Authorization" in first.headers["access-control-allow-headers"]
    then = await Caller(envelope).call(origin=PAGE)
    assert then.status == 201
    for reply in (first, then):
        assert (reply.headers["access-control-allow-origin"], reply.headers["vary"]) == (PAGE, "Origin")
        assert "access-control-allow-credentials" not in reply.headers


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://127.0.0.1", "null", "", "http://127.0.0.1.evil.example"],
)
async def test_other_pages_get_no_headers_of_cors(origin: str) -> None:
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
def test_a_host_or_origin_that_no_request_can_have_is_refused(hosts: set[str], origins: set[str]) -> None:
    with pytest.raises(ConfigurationError, match="write"):
        Doors(hosts=frozenset(hosts), origins=frozenset(origins))
    for proxy in ("*", "proxy.example", "10.0.0.1/8", ""):
        with pytest.raises(ConfigurationError, match="write an address"):
            Doors(proxies=(proxy,))
    Doors(proxies=("10.0.0.7", "10.0.0.0/24", "::1"))
    Doors(hosts=frozenset({"a.example", "fe80::1"}), origins=frozenset({PAGE, "http://127.0.0.1:8080"}))


@pytest.mark.parametrize(("ends", "status"), [(True, 503), (False, 0)])
async def test_a_waiting_caller_is_told_that_the_server_ends(ends: bool, status: int) -> None:
    waits, ending = asyncio.Event(), asyncio.Event()

    async def long(_scope: Any, _receive: Any, _send: Any) -> None:
        waits.set()
        await asyncio.Event().wait()

    caller = Caller(Envelope(long, DOORS, lambda _: None))
    task = asyncio.ensure_future(caller.call(state={ENDING: ending}))
    await waits.wait()
    if ends:
        ending.set()
    task.cancel()
    await asyncio.wait([task])
    assert (task.cancelled(), caller.status) == (not ends, status)


class Listener:
    """Who reads a stream at a server that can be ended."""

    def __init__(self) -> None:
        self.ending = asyncio.Event()
        self.heard = list[bytes]()
        self.is_over = False
        self.first = asyncio.Event()

    async def read(self, stream: EventStream) -> None:
        scope = {"type": "http", "state": {ENDING: self.ending}}
        await stream(scope, self._stay, self._hear)

    async def _stay(self) -> Any:
        await asyncio.Event().wait()

    async def _hear(self, message: Any) -> None:
        if body := message.get("body"):
            self.heard.append(body)
            self.first.set()
        self.is_over |= message.get("more_body") is False


async def test_an_endless_stream_ends_with_its_server() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncIterator[str]:
        try:
            yield "first"
            await asyncio.Event().wait()
        finally:
            closed.set()

    listener = Listener()
    reading = asyncio.ensure_future(listener.read(EventStream(endless())))
    await listener.first.wait()
    listener.ending.set()
    await reading
    assert (listener.heard, listener.is_over, closed.is_set()) == ([b"first"], True, True)


@pytest.mark.parametrize("grace_s", [0.0, 1000.0])
async def test_an_answer_continues_for_a_while(grace_s: float) -> None:
    goes_on = asyncio.Event()

    async def answer() -> AsyncIterator[str]:
        yield "a word"
        await goes_on.wait()
        yield ", and another"

    listener = Listener()
    stream = EventStream(answer(), grace_s=grace_s, cut_off="!")
    reading = asyncio.ensure_future(listener.read(stream))
    await listener.first.wait()
    listener.ending.set()
    if grace_s:
        await asyncio.sleep(0)
        goes_on.set()
    await reading
    assert listener.heard == [b"a word", b", and another" if grace_s else b"!"]
    assert listener.is_over


async def test_an_error_before_the_deadline_is_raised_as_usual() -> None:
    async def late() -> AsyncIterator[str]:
        yield "first"
        raise TimeoutError("of its own")

    with pytest.raises(BaseException) as raised:
        await Listener().read(EventStream(late()))
    assert "of its own" in str(raised.value)
