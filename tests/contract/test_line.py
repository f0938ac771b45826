"""A line to Redis: many calls over one connection, each with its own reply or with what broke it."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.broker.log import line
from penstock.broker.log.line import Line, Piece, answer
from penstock.launch.commands.certificates import main
from penstock.launch.commands.request import Order
from penstock.rpc.identity import TlsFiles
from tests.support.run.small_run import RUN
from tests.support.storage.guarded_redis import USERS
from tests.support.storage.redis_server import RedisServer

MIB = 2**20
GREETED = b":0\r\n"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def calls(redis_url: str) -> AsyncIterator[Line]:
    """A line to a fresh server."""
    made = Line(redis_url, None)
    yield made
    await made.aclose()


@asynccontextmanager
async def line_to(serve: Serve, folder: Path) -> AsyncIterator[Line]:
    """A line to something that is no Redis."""
    made = Line(f"unix://{folder}/other.sock", None)
    async with await asyncio.start_unix_server(serve, folder / "other.sock"):
        yield made
        await made.aclose()


async def read_command(reader: asyncio.StreamReader) -> list[bytes]:
    """One command as it was written."""
    count = int((await reader.readline())[1:])
    return [(await reader.readexactly(int((await reader.readline())[1:]) + 2))[:-2] for _ in range(count)]


async def test_replies_come_to_those_who_asked(calls: Line) -> None:
    await asyncio.gather(*(calls.ask("SET", f"key:{i}", i) for i in range(500)))
    asked = [calls.ask("GET", f"key:{i}") for i in range(500)]
    with pytest.raises(ResponseError, match="wrong number"):
        await asyncio.gather(*asked[:250], calls.ask("GET"), *asked[250:])
    assert await asyncio.gather(*(calls.ask("GET", f"key:{i}") for i in range(500))) == [
        str(i).encode() for i in range(500)
    ]


async def test_what_is_larger_than_a_socket_takes_arrives_whole(calls: Line) -> None:
    await calls.open()
    large = bytes(range(256)) * (5 * MIB // 256)
    replies = [asyncio.get_running_loop().create_future() for _ in range(3)]
    pieces: list[Piece] = [
        b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\n1\r\n",
        b"*3\r\n$3\r\nSET\r\n$1\r\nb\r\n$%d\r\n" % len(large),
        memoryview(large),
        b"\r\n*2\r\n$6\r\nSTRLEN\r\n$1\r\nb\r\n",
    ]
    calls.write(pieces, [partial(answer, reply) for reply in replies])
    assert await asyncio.gather(calls.ask("GET", "a"), *replies) == [b"1", b"OK", b"OK", len(large)]
    assert await calls.ask("GET", "b") == large


async def test_a_database_is_chosen_by_the_url(redis_url: str) -> None:
    third, first = Line(f"{redis_url}?db=3", None), Line(redis_url, None)
    await third.ask("SET", "key", "third")
    third.renew()
    assert await third.ask("GET", "key") == b"third"
    assert await first.ask("GET", "key") is None
    await asyncio.gather(third.aclose(), first.aclose())


async def test_a_line_that_is_renewed_ends_what_is_under_way(calls: Line) -> None:
    numbers = [await calls.ask("CLIENT", "ID")]
    under_way = asyncio.ensure_future(calls.ask("CLIENT", "ID"))
    await asyncio.sleep(0)
    calls.renew()
    numbers += [await under_way, await calls.ask("CLIENT", "ID")]
    assert numbers[0] == numbers[1] != numbers[2]


async def test_what_was_to_be_written_goes_on_though_the_line_is_to_be_renewed(calls: Line) -> None:
    own = int(await calls.ask("CLIENT", "ID"))
    calls.renew()
    late = asyncio.get_running_loop().create_future()
    calls.write((b"*2\r\n$6\r\nCLIENT\r\n$2\r\nID\r\n",), (partial(answer, late),))
    other = int(await calls.ask("CLIENT", "ID"))
    assert await late == own != other
    while b"id=%d " % own in await calls.ask("CLIENT", "LIST"):
        pass
    assert calls.is_open


async def test_a_server_that_says_nothing_is_not_waited_for(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "REPLY_TIMEOUT_S", 0.2)
    opened = 0

    async def greet_and_wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await read_command(reader)
        writer.write(GREETED)
        await reader.read()

    async with line_to(greet_and_wait, short_folder) as asked:
        for number in (1, 2):
            failed = await asyncio.gather(*(asked.ask("GET", "a") for _ in range(9)), return_exceptions=True)
            assert {type(error) for error in failed} == {RedisTimeoutError}
            assert opened == number


async def test_a_server_that_answers_slowly_is_waited_for(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "REPLY_TIMEOUT_S", 1.0)

    async def answer_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_command(reader)
        writer.write(GREETED)
        for number in range(4):
            await read_command(reader)
            await asyncio.sleep(0.4)
            writer.write(b":%d\r\n" % number)

    async with line_to(answer_slowly, short_folder) as asked:
        assert await asyncio.gather(*(asked.ask("GET", "a") for _ in range(4))) == list(range(4))


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b":1\r\n:2\r\n"])
async def test_what_is_no_reply_breaks_the_line(short_folder: Path, said: bytes) -> None:
    ended = asyncio.get_running_loop().create_future()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_command(reader)
        writer.write(GREETED)
        await read_command(reader)
        writer.write(said)
        ended.set_result(await reader.read())

    async with line_to(speak, short_folder) as asked:
        await asyncio.gather(asked.ask("GET", "a"), return_exceptions=True)
        assert await ended == b""
        assert not asked.is_open


async def test_a_line_that_cannot_be_opened_says_so_to_all_who_wait(short_folder: Path) -> None:
    absent = Line(f"unix://{short_folder}/absent.sock", None)
    failed = await asyncio.gather(*(absent.ask("PING") for _ in range(3)), return_exceptions=True)
    assert {type(error) for error in failed} == {RedisConnectionError}
    await absent.aclose()


@asynccontextmanager
async def over_tls(server: RedisServer, files: TlsFiles, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """The server behind something that ends TLS, asks for certificates and passes bytes on: its URL."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.authority)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(str(files.certificate), files.key)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def pump(source: asyncio.StreamReader, drain: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(MIB):
                    drain.write(data)
                    await drain.drain()
            except OSError:
                pass
            drain.close()

        behind, towards = await asyncio.open_unix_connection(server.url.removeprefix("unix://"))
        await asyncio.gather(pump(reader, towards), pump(behind, writer))

    async with await asyncio.start_server(pass_on, host, 0, ssl=context) as listening:
        yield f"rediss://{host}:{listening.sockets[0].getsockname()[1]}"


def certificates(folder: Path, of: str) -> TlsFiles:
    """What an authority signed for one process."""
    if not folder.exists():
        main(Order(folder=folder, run=RUN, users=USERS))
    return TlsFiles(
        certificate=folder / f"{of}.pem", key=folder / f"{of}.key", authority=folder / "authority.pem"
    )


async def test_a_line_goes_over_tls(redis_server: RedisServer, tmp_path: Path) -> None:
    own = certificates(tmp_path / "own", "broker")
    async with over_tls(redis_server, certificates(tmp_path / "own", "redis")) as url:
        secure = Line(url, None, own)
        large = bytes(3 * MIB)
        given = await asyncio.gather(secure.ask("SET", "a", large), secure.ask("STRLEN", "a"))
        assert list(given) == [b"OK", len(large)]
        assert await secure.ask("GET", "a") == large
        await secure.aclose()


async def test_files_of_the_url_come_before_those_of_the_settings(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    own, other = (certificates(tmp_path / name, "broker") for name in ("own", "other"))
    async with over_tls(redis_server, certificates(tmp_path / "own", "redis")) as url:
        named = f"ssl_ca_certs={own.authority}&ssl_certfile={own.certificate}&ssl_keyfile={own.key}"
        secure = Line(f"{url}?{named}", None, other)
        assert await secure.ask("PING") == b"PONG"
        await secure.aclose()


async def test_a_line_over_tcp_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int]] = []

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_command(reader)
        writer.write(GREETED)

    connected = line._Wire.connection_made

    def look(self: line._Wire, transport: asyncio.BaseTransport) -> None:
        connected(self, transport)
        own = transport.get_extra_info("socket")
        taken.append((own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), own.family))

    monkeypatch.setattr(line._Wire, "connection_made", look)
    async with await asyncio.start_server(greet, "127.0.0.1", 0) as listening:
        asked = Line(f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}", None)
        await asked.open()
        await asked.aclose()
    assert taken == [(1, socket.AF_INET)]


async def test_a_server_of_another_authority_or_name_is_not_spoken_to(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    own, other = (certificates(tmp_path / name, "broker") for name in ("own", "other"))
    its = certificates(tmp_path / "own", "redis")
    async with over_tls(redis_server, its) as url, over_tls(redis_server, its, "127.0.0.2") as elsewhere:
        strangers = [(url, replace(own, authority=other.authority)), (url, replace(own, authority=None))]
        for address, files in [*strangers, (elsewhere, own)]:
            secure = Line(address, None, files)
            with pytest.raises(RedisConnectionError, match="certificate verify failed"):
                await secure.ask("PING")
            await secure.aclose()


async def test_who_has_no_certificate_is_not_served(redis_server: RedisServer, tmp_path: Path) -> None:
    own, other = (certificates(tmp_path / name, "broker") for name in ("own", "other"))
    async with over_tls(redis_server, certificates(tmp_path / "own", "redis")) as url:
        for files in (TlsFiles(authority=own.authority), replace(other, authority=own.authority)):
            secure = Line(url, None, files)
            with pytest.raises(RedisConnectionError):
                await secure.ask("PING")
            await secure.aclose()
