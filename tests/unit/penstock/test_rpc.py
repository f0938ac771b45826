import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from penstock.client import PolicyClient
from penstock.config.settings import BrokerSection
from penstock.launch.commands.certificates import main
from penstock.launch.commands.request import Order
from penstock.protocol.limits import MAX_MESSAGE_BYTES, MIB
from penstock.rpc.address import AddressInUse, check_address, check_plaintext, is_local
from penstock.rpc.auth import ACCESS, ACTOR, AcceptedTokens, Credentials, digest, may_call
from penstock.rpc.channel import open_async_channel, open_channel
from penstock.rpc.gate import (
    MAX_ALL_UNREAD_BYTES,
    MAX_CALLER_UNREAD_BYTES,
    MAX_CALLERS,
    MAX_DELAY_S,
    MAX_UNREAD_BYTES,
    SMALL_BYTES,
    Boundary,
    Exceeded,
    Gate,
    RateLimits,
    Rates,
)
from penstock.rpc.identity import Identity, Party, Unidentified, from_alternative_names, parse
from penstock.runtime.server_frame import STREAMS_PER_CONNECTION, Front, HealthServicer, Status, bind
from penstock.v1 import weights_pb2 as pb
from tests.support.abuse.wire import RawChannel, answer_of


def test_a_call_is_served_to_the_parties_that_its_table_names_alone() -> None:
    own = {"/outside.Service/Ask": ACTOR, "/penstock.v1.ControlService/Stop": ACTOR}
    assert may_call(Party.ACTOR, "/outside.Service/Ask", own)
    assert not may_call(Party.CLIENT, "/outside.Service/Ask", own)
    assert not may_call(Party.ACTOR, "/outside.Service/Ask")
    assert not may_call(Party.ACTOR, "/penstock.v1.ControlService/Stop", own)
    assert not any(may_call(party, "/outside.Service/Tell", own) for party in Party)
    for path, parties in ACCESS.items():
        assert all(may_call(party, path) == (party in parties) for party in Party)


def test_plaintext_beyond_loopback_and_unix_sockets_must_be_asked_for() -> None:
    for address in ("127.0.0.1:1", "localhost:50051", "[::1]:50051", "unix:/tmp/x", "127.8.0.1:1"):
        assert is_local(address)
        check_plaintext(address, insecure=False)
    for address in ("0.0.0.0:1", "broker:50051", "10.0.0.1:1", "[::]:1", "dns:///broker:50051"):
        with pytest.raises(ValueError, match=r"tls_certificate.*--insecure"):
            check_plaintext(address, insecure=False)
        check_plaintext(address, insecure=True)


async def test_plaintext_beyond_loopback_is_refused_on_both_sides() -> None:
    opens: list[Callable[[], object]] = [
        lambda: bind(Front([], BrokerSection()).server, "0.0.0.0:0", PLAIN),
        lambda: open_async_channel("broker:50051", PLAIN),
        lambda: open_channel("broker:50051", PLAIN),
        lambda: PolicyClient("broker:50051"),
    ]
    for opening in opens:
        with pytest.raises(ValueError, match="insecure"):
            opening()
    PolicyClient("broker:50051", credentials=Credentials(insecure=True)).close()


@pytest.mark.parametrize(
    "address", ["", "broker", ":50051", "broker:", "broker:x", "broker:70000", "unix:", "unix:" + "x" * 108]
)
def test_a_malformed_address_is_named(address: str) -> None:
    with pytest.raises(ValueError, match="address="):
        check_address(address)


def test_a_certificate_needs_its_key_which_is_never_shown(tmp_path: Path) -> None:
    assert "secret" not in repr(Credentials(certificate=b"c", key=b"secret"))
    with pytest.raises(ValueError, match="give both or neither"):
        Credentials.from_files(insecure=False, certificate=tmp_path / "c.pem", key=None, authority=None)


LINE = f"{digest('secret')} penstock://run-a/operator\n"


def test_a_file_that_stays_broken_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tokens"
    file.write_text(LINE)
    known = AcceptedTokens(file)
    file.write_text("this is no file of tokens\n")
    for _ in range(3):
        assert known.identify("Bearer secret").run == "run-a"
    assert len(caplog.records) == 1
    file.write_text("")
    with pytest.raises(Unidentified):
        known.identify("Bearer secret")


def calls_of_identify(known: AcceptedTokens) -> int:
    """Functions that are called, once the file has been read."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        known.identify("Bearer secret")
    finally:
        sys.setprofile(before)
    return count


def test_a_token_is_found_as_fast_among_many(tmp_path: Path) -> None:
    counts = []
    for others in (0, 2_000):
        file = tmp_path / f"{others}"
        lines = [f"{digest(str(index))} penstock://run-a/actor/a-{index}\n" for index in range(others)]
        file.write_text("".join([*lines, LINE]))
        known = AcceptedTokens(file)
        counts.append(calls_of_identify(known))
    assert counts[0] == counts[1]


PATIENCE_S = 20.0
SERVING = health_pb2.HealthCheckResponse.SERVING
ASKED = health_pb2.HealthCheckRequest()


@pytest.fixture
def port() -> Iterator[int]:
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(0)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A proxy that takes no call, for every way in which gRPC learns of one."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        for name in ("grpc_proxy", "https_proxy", "http_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{listening.getsockname()[1]}")
        for name in ("no_grpc_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield listening


@pytest.mark.usefixtures("proxy")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_calls_of_this_machine_pass_no_proxy(host: str, port: int, proxy: socket.socket) -> None:
    address = f"{host}:{port}"

    async def ask() -> health_pb2.HealthCheckResponse:
        async with open_async_channel(address, Credentials()) as channel:
            return await health_pb2_grpc.HealthStub(channel).Check(ASKED, timeout=PATIENCE_S)

    with open_channel(address, Credentials()) as channel:
        assert health_pb2_grpc.HealthStub(channel).Check(ASKED, timeout=PATIENCE_S).status == SERVING
    assert asyncio.run(ask()).status == SERVING
    with pytest.raises(BlockingIOError):
        proxy.accept()


LARGE = bytes(3 * MIB)


class Aborted(Exception):
    """As gRPC ends a call."""


class Call:
    """A call over TCP whose reply is not read yet."""

    method, invocation_metadata = "/a.Service/Get", ()

    def __init__(self) -> None:
        self.on_read: list[Callable[[Any], None]] = []
        self.add_done_callback = self.on_read.append

    def peer(self) -> str:
        return "ipv4:127.0.0.1:40000"

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        raise Aborted(text)


@pytest.mark.parametrize("reply", [LARGE, pb.GetWeightsReply(chunk=LARGE)], ids=["bytes", "message"])
async def test_a_caller_that_reads_nothing_gets_no_more_replies(reply: Any) -> None:
    async def get(_request: bytes, _context: Any) -> Any:
        return reply

    async def handler(_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(get)

    gate = Gate(Boundary(), RateLimits(Rates(calls=1e6, bytes=1e12)))
    gated = await gate.intercept_service(handler, Call())  # type: ignore[arg-type]
    first = Call()
    assert await gated.unary_unary(b"", first) is reply
    with pytest.raises(Aborted, match="are not read yet"):
        await gated.unary_unary(b"", Call())
    first.on_read[0](first)
    assert await gated.unary_unary(b"", Call()) is reply


async def test_a_watcher_that_reads_nothing_delays_no_call() -> None:
    servicer = HealthServicer()
    await servicer.set("", Status.SERVING)
    slow, quick = (servicer.Watch(health_pb2.HealthCheckRequest(), None) for _ in range(2))
    assert (await anext(slow)).status == (await anext(quick)).status == Status.SERVING
    async with asyncio.timeout(30):
        await servicer.set("", Status.NOT_SERVING)
        assert (await anext(quick)).status == Status.NOT_SERVING
    checked = await servicer.Check(health_pb2.HealthCheckRequest(), None)
    assert checked.status == Status.NOT_SERVING


async def test_a_watcher_is_told_each_change_of_its_service_once() -> None:
    servicer = HealthServicer()
    watcher = servicer.Watch(health_pb2.HealthCheckRequest(service="a"), None)
    assert (await anext(watcher)).status == Status.SERVICE_UNKNOWN
    coming = asyncio.ensure_future(anext(watcher))
    await servicer.set("b", Status.SERVING)
    await servicer.set("a", Status.SERVING)
    assert (await coming).status == Status.SERVING
    listed = await servicer.List(health_pb2.HealthListRequest(), None)
    assert set(listed.statuses) == {"a", "b"}


@pytest.mark.parametrize(
    "identity",
    [Identity(run="run-a", party=party, name=name) for party in Party for name in ("", "gpu-3")],
    ids=str,
)
def test_an_identity_is_read_back(identity: Identity) -> None:
    assert parse(str(identity)) == identity
    assert from_alternative_names([b"localhost", str(identity).encode()]) == identity


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "penstock://",
        "penstock://run-a",
        "penstock://run-a/",
        "penstock://run-a/king",
        "penstock://run-a/actor/",
        "penstock://run-a/actor/a/b",
        "penstock://../actor",
        "penstock://run-a/actor/..",
        "penstock://Run-A/actor",
        "penstock:// run-a/actor",
        "penstock://run-a/actor\0",
        "penstock://run-a/ACTOR",
        "https://run-a/actor",
    ],
)
def test_an_invalid_identity_is_refused(uri: str) -> None:
    with pytest.raises(Unidentified):
        parse(uri)


@pytest.mark.parametrize(
    "names", [[], [b"localhost"], [b"penstock://run-a/actor", b"penstock://run-a/operator"], [b"\xff"]]
)
def test_a_certificate_holds_one_identity(names: list[bytes]) -> None:
    with pytest.raises(Unidentified, match="one is needed"):
        from_alternative_names(names)


@pytest.mark.parametrize(
    ("actor_id", "allowed"),
    [("gpu-3", True), ("gpu-3-0", True), ("gpu-30", False), ("gpu", False), ("gpu-4", False)],
)
def test_a_name_allows_itself_and_longer_names_that_it_begins(actor_id: str, allowed: bool) -> None:
    assert Identity(run="run-a", party=Party.ACTOR, name="gpu-3").may_act_as(actor_id) is allowed
    assert Identity(run="run-a", party=Party.ACTOR).may_act_as(actor_id)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def limits(calls: float = 10, size: float = 1000 * MAX_MESSAGE_BYTES) -> tuple[RateLimits, Clock]:
    clock = Clock()
    return RateLimits(Rates(calls=calls, bytes=size), clock), clock


def test_one_seconds_calls_pass_at_once_and_further_ones_wait() -> None:
    found, clock = limits(calls=10)
    delays = [found.reserve("a", 1) for _ in range(20)]
    assert delays[:10] == [0.0] * 10
    assert delays[10:] == pytest.approx([0.1 * (index + 1) for index in range(10)])
    for _ in range(3):
        with pytest.raises(Exceeded, match=r"more than 10 calls"):
            found.reserve("a", 1)
    assert found.reserve("another", 1) == 0.0, "callers do not pay for one another"
    clock.now_s += 3600
    assert [found.reserve("a", 1) for _ in range(10)] == [0.0] * 10, "time fills a second's worth, not more"
    assert found.reserve("a", 1) > 0
    for index in range(3 * MAX_CALLERS):
        found.reserve(f"caller-{index}", 1)
    assert len(found) == MAX_CALLERS


def test_bytes_in_both_directions_count_towards_the_rate() -> None:
    found, clock = limits(calls=1000, size=MAX_MESSAGE_BYTES)
    assert found.reserve("a", 2 * MAX_MESSAGE_BYTES) == 0.0
    assert found.reserve("a", MAX_MESSAGE_BYTES) == pytest.approx(MAX_DELAY_S)
    with pytest.raises(Exceeded, match="bytes a second"):
        found.reserve("a", MAX_MESSAGE_BYTES)
    clock.now_s += 10
    found.charge("a", 4 * MAX_MESSAGE_BYTES)
    with pytest.raises(Exceeded):
        found.reserve("a", 1)


def test_a_caller_that_reads_nothing_gets_no_more_answers() -> None:
    found, _ = limits()
    first = found.keep("slow", "c-1", MAX_UNREAD_BYTES)
    with pytest.raises(Exceeded, match="read them first"):
        found.keep("slow", "c-1", 1)
    found.keep("other", "c-2", MIB)()
    first()
    found.keep("slow", "c-1", MAX_UNREAD_BYTES)()


def test_actors_that_share_a_certificate_read_side_by_side() -> None:
    found, _ = limits()
    most = MAX_CALLER_UNREAD_BYTES // MIB
    kept = [found.keep("gpu-3", f"c-{index}", MIB) for index in range(most)]
    with pytest.raises(Exceeded, match="read them first"):
        found.keep("gpu-3", "c-new", MIB)
    kept.pop()()
    found.keep("gpu-3", "c-new", MIB)()


def test_unread_replies_of_all_callers_together_are_limited() -> None:
    found, _ = limits()
    kept = [found.keep(f"c-{index}", "c", MIB) for index in range(MAX_ALL_UNREAD_BYTES // MIB)]
    with pytest.raises(Exceeded, match="of replies to all callers"):
        found.keep("honest", "c", MIB)
    found.keep("honest", "c", SMALL_BYTES)()
    kept.pop()()
    found.keep("honest", "c", MIB)()


@pytest.fixture
def channel_address(tmp_path: Path) -> Iterator[str]:
    """A server over TLS that holds a Watch for as long as nothing changes.

    Its authority lies in `tmp_path`.
    """
    main(Order(folder=tmp_path, run="run-a"))
    server = grpc.server(ThreadPoolExecutor(4))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    pair = ((tmp_path / "broker.key").read_bytes(), (tmp_path / "broker.pem").read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0)


def put_anew(path: Path) -> None:
    """The same bytes in a new file, as a rotation that keeps the authority."""
    fresh = path.with_name("fresh")
    fresh.write_bytes(path.read_bytes())
    fresh.replace(path)


def test_close_ends_a_call_that_was_begun_before_the_rotation(channel_address: str, tmp_path: Path) -> None:
    authority = tmp_path / "authority.pem"
    credentials = Credentials.from_files(insecure=False, certificate=None, key=None, authority=authority)
    with closing(open_channel(channel_address, credentials)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        held = stub.Watch(request, timeout=PATIENCE_S)
        assert next(held).status == SERVING
        put_anew(authority)
        assert stub.Check(request, timeout=PATIENCE_S).status == SERVING
        assert held.is_active(), "a rotation ends no call"
        channel.close()
        with pytest.raises(grpc.RpcError):
            next(held)
        assert held.code() is grpc.StatusCode.CANCELLED


PLAIN = Credentials()


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Front, str]]:
    front = Front(["penstock.v1.ControlService"], BrokerSection())
    address = bind(front.server, "127.0.0.1:0", PLAIN)
    await front.server.start()
    yield front, address
    await front.server.stop(None)


async def test_a_served_address_answers_health_checks_of_a_bounded_size() -> None:
    request = health_pb2.HealthCheckRequest(service="penstock.v1.ControlService")
    async with served() as (front, address), open_async_channel(address, PLAIN) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for serving, status in ((True, SERVING), (False, health_pb2.HealthCheckResponse.NOT_SERVING)):
            await front.set_serving(serving=serving)
            assert (await stub.Check(request, timeout=5)).status == status
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="x" * (9 * MIB)), timeout=5)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_address_in_use_is_an_error_that_names_it(tmp_path: Path) -> None:
    async with served() as (_, address):
        with pytest.raises(AddressInUse, match=f"{address}: port in use; choose another"):
            bind(Front([], BrokerSection()).server, address, PLAIN)
    address = f"unix:{tmp_path / 's'}"
    first = Front([], BrokerSection())
    bind(first.server, address, PLAIN)
    await first.server.start()
    with pytest.raises(AddressInUse, match="is in use"):
        bind(Front([], BrokerSection()).server, address, PLAIN)
    await first.server.stop(None)
    with socket.socket(socket.AF_UNIX) as dead:
        (tmp_path / "s").unlink(missing_ok=True)
        dead.bind(str(tmp_path / "s"))
    second = Front([], BrokerSection())
    assert bind(second.server, address, PLAIN) == address
    await second.server.stop(None)


async def test_calls_that_come_while_the_server_is_busy_wait_for_it() -> None:
    async with served() as (front, address):
        await front.set_serving(serving=True)
        with ExitStack() as stack:
            channels = [stack.enter_context(RawChannel(address)) for _ in range(24)]
            # The server's event loop is this one: until the wait below it looks at no call.
            calls = [
                channel.start("/grpc.health.v1.Health/Check", b"")
                for channel in channels
                for _ in range(STREAMS_PER_CONNECTION)
            ]
            answers = await asyncio.to_thread(lambda: [answer_of(call) for call in calls])
    assert {(answer.code, answer.text) for answer in answers} == {(grpc.StatusCode.OK, "")}
