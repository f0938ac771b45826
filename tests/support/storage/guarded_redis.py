"""A Redis that asks who calls: the shipped ACL file with passwords, and TLS where the server can."""

import asyncio
import socket
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import redis

from penstock.broker.log import connection
from penstock.broker.log.connection import connect_async
from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Answer, Commit, LogState
from penstock.broker.log.store import Store
from penstock.config.settings import BrokerSection
from penstock.launch.commands.certificates import main
from penstock.launch.commands.request import Order
from penstock.protocol.fragment import Kind
from penstock.protocol.limits import WEIGHT_CHUNK_BYTES
from penstock.protocol.messages import Episode, Publication, Report, Role, Watch
from penstock.rpc.identity import TlsFiles
from tests.support.run import small_run
from tests.support.run.store_run import PACING, TTL_MS, Actor, item
from tests.support.storage.redis_server import Binary, RedisServer, find_binaries

USERS: Final = Path(__file__).resolve().parents[3] / "deploy" / "redis" / "users.acl"
ADMIN: Final = "user admin on nopass ~* &* +@all\n"
"""Only tests have one: looks at what the others did."""


@cache
def has_tls(binary: Binary) -> bool:
    """Whether the server was built with TLS; others do not know the setting."""
    command = [binary.path, "--port", "0", "--tls-port", "0", "--dir", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    return "Bad directive" not in done.stdout + done.stderr


def tls_binary() -> Binary | None:
    """A server with TLS, None where there is none."""
    return next((binary for binary in find_binaries() if has_tls(binary)), None)


class GuardedRedis(RedisServer):
    """Users of `deploy/redis/users.acl`, their passwords in `certificates`; `admin` only for the test."""

    def __init__(self, binary: Binary, folder: Path, *, run: str, tls: bool = False) -> None:
        self.certificates = folder / "certificates"
        main(Order(folder=self.certificates, run=run, users=USERS))
        acl = self.certificates / "users.acl"
        acl.write_text(acl.read_text() + ADMIN)
        self.tls_port = _free_port() if tls else 0
        super().__init__(binary, folder, "--aclfile", str(acl), *(self._tls_options() if tls else ()))

    def _tls_options(self) -> tuple[str, ...]:
        files = self.certificates
        return (
            *("--bind", "127.0.0.1", "--tls-port", str(self.tls_port), "--tls-auth-clients", "yes"),
            *("--tls-cert-file", f"{files / 'redis.pem'}", "--tls-key-file", f"{files / 'redis.key'}"),
            *("--tls-ca-cert-file", f"{files / 'authority.pem'}", "--tls-protocols", "TLSv1.2 TLSv1.3"),
        )

    @property
    def url(self) -> str:
        return f"unix://admin:any@{self.folder / 'redis.sock'}"

    def url_of(self, user: str) -> str:
        """Where a user calls: over TLS where the server serves it, else by the socket."""
        if self.tls_port:
            return f"rediss://{user}@127.0.0.1:{self.tls_port}/0"
        return f"unix://{user}@{self.folder / 'redis.sock'}"

    def password(self, user: str) -> str:
        return self.password_file(user).read_text().strip()

    def password_file(self, user: str) -> Path:
        return self.certificates / f"redis-{user}.password"

    def files_of(self, user: str) -> TlsFiles:
        return TlsFiles(
            certificate=self.certificates / f"{user}.pem",
            key=self.certificates / f"{user}.key",
            authority=self.certificates / "authority.pem",
        )

    def admin(self) -> Any:
        return redis.Redis.from_url(self.url)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


_EPISODE: Final = Episode(slot_id=0, episode_id=0, episode_return=1.0, length=1, terminated=True, version=1)


def clear(admin: Any) -> None:
    """An empty server that knows no script, so that both ways of running one are taken."""
    admin.flushall()
    admin.script_flush()
    admin.acl_log_reset()


async def play(server: GuardedRedis, broker: str, learner: str) -> None:
    """A run with both roles as these users: begun, rewound, gone on with, in lock-step, ended."""
    admin = server.admin()
    tls = server.files_of("broker")
    inspector = connect_async(server.url_of(broker), server.password("broker"), tls)
    store = Store.connect(server.url_of(broker), password=server.password("broker"), tls=tls)
    log = await asyncio.to_thread(_connect, server, learner)
    try:
        await connection.examine(inspector, server.url_of(broker), replace_patched(admin))
        await _begin(store, log)
        changes: Any = store.changes()
        await anext(changes)
        await changes.aclose()
        known = await _work(store, log)
        await _come_back(admin, store, log, known)
        await _lock_step(store, log)
    finally:
        log.close()
        await store.aclose()
        await inspector.aclose()
        admin.close()


def replace_patched(admin: Any) -> BrokerSection:
    return BrokerSection(patched_redis=str(admin.info()["redis_version"]))


def _connect(server: GuardedRedis, user: str) -> LearnerLog:
    return LearnerLog.connect(
        server.url_of(user), wait_s=5.0, password=server.password("learner"), tls=server.files_of("learner")
    )


async def _begin(store: Store, log: LearnerLog) -> None:
    log.acquire(small_run.RUN, "learner", TTL_MS)
    # Sessions run out at once: the next opening closes those before it.
    log.start(small_run.specification().encode(), replace(PACING, session_timeout_ms=1))
    log.publish(b"first", update=0, settled=0, scalars={}, pin=True)
    await store.specification()
    publication = await store.publication(1)
    assert publication is not None
    await store.weights_chunk(1, 0)


async def _work(store: Store, log: LearnerLog) -> LogState:
    """Every call of actors and learner once; returns what the learner knows."""
    actor = Actor(store, "actor-0")
    first = await actor.open()
    await actor.open()
    await store.watch(Watch(session=first.session))  # fenced by the second
    await store.owner_of(actor.session)
    await actor.append(2)
    await store.append(actor.session, 2, [item(actor.session, 1)])
    await actor.append(kind=Kind.SHADOW)
    await store.watch(Watch(session=actor.session, applied_version=1, probe_log_prob=(0.0,)))
    await store.report(Report(session=actor.session, sequence=1, episodes=(_EPISODE,)))
    await asyncio.sleep(0.005)  # Redis time moves on beyond the timeout
    await Actor(store, "actor-1").open()
    for action in ("pause", "resume", "checkpoint"):
        await store.control(action, "because")
    command, _ = await store.command("restore", "good", "one")
    await store.command("restore", "good", "one")
    await store.command("checkpoint", "", "two")
    log.answer(Answer(number=2, request_id="two", detail="refused", refusal=1))
    assert [one.number for one in log.commands()] == [1, 2]
    log.flush(1, force=True)
    await store.status()
    entries = log.read(0, 10, 0)
    log.fetch([entry.number for entry in entries])
    log.read_reports(0, 10)
    log.renew()
    log.settle(1)
    log.observe("{}")
    log.max_memory_bytes()
    log.acked()
    log.fetched_versions()
    log.residue(0)
    for update in (1, 2):
        log.publish(b"next", update=update, settled=2, scalars={})
    log.publish(b"n" * (WEIGHT_CHUNK_BYTES + 1), update=3, settled=2, scalars={})
    log.request_evaluation(1)
    log.end_evaluation(1)
    assert log.kept.keep({1}, highest=3, traffic_revision=1) == (1,)
    log.kept.restore(Publication(1, 0, "0" * 64, 4), b"past")
    for number in (1, 2):
        log.commit(Commit(checkpoint_id=f"c{number}", manifest_sha256="0" * 64, position=number, trim=1))
    answers = (Answer(number=command.number, request_id="one", detail="done"),)
    log.commit(Commit(checkpoint_id="c3", manifest_sha256="0" * 64, position=2, trim=1, answers=answers))
    log.missing(1)
    return log.snapshot()


async def _come_back(admin: Any, store: Store, log: LearnerLog, known: LogState) -> None:
    """Redis returns without its newest entries, as after a crash; an actor saw more acknowledged."""
    actor = Actor(store, "actor-2")
    await actor.open()
    await actor.append(1)
    beyond = {**known.sequences, actor.session: 3}
    admin.hset("penstock:state", "closed", 1)
    log.reopen(replace(known, number=known.number + 5, log_lost=known.log_lost + 1, sequences=beyond))
    await actor.watch()
    actor.acked = 5
    await actor.append(1)
    log.publish(b"again", update=4, settled=0, scalars={})
    log.read(0, 100, 0)
    await store.close_session(actor.session)


async def _lock_step(store: Store, log: LearnerLog) -> None:
    log.start(small_run.specification().encode(), replace(PACING, lock_step=True), resume=log.snapshot())
    evaluator = Actor(store, "evaluator", role=Role.EVALUATION)
    await evaluator.open()
    actor = Actor(store, "actor-3")
    await actor.open()
    log.publish(b"round", update=5, settled=0, scalars={}, round=1)
    log.round_complete(1)
    await actor.watch()
    await actor.append(1)
    log.release()
