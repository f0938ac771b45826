"""Callers of every kind at one broker over TLS: with certificates or tokens, good, wrong, old and none."""

import http.client
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import redis

from penstock.broker.log.learner_log import LearnerLog
from penstock.launch.commands.certificates import authority_of, issue, main
from penstock.launch.commands.request import Order
from penstock.rpc.auth import Credentials, line
from penstock.rpc.identity import Identity, Party
from tests.support.run import harness
from tests.support.run.harness import PATIENCE_S as COMMAND_S
from tests.support.run.harness import BrokerProcess, open_run
from tests.support.run.simulated_actor import code_of
from tests.support.run.small_run import RUN
from tests.support.storage.redis_server import RedisServer

PATIENCE_S: Final = 60
OTHER_RUN: Final = "run-b"
NAMES: Final = ("gpu-3", "gpu-4")
_EXPIRED_DAYS: Final = -0.001


@dataclass(frozen=True, kw_only=True)
class Secure:
    """A broker over TLS, its settings, its Redis, and the folder with all certificates and tokens."""

    broker: BrokerProcess
    server: RedisServer
    learner: LearnerLog
    folder: Path
    settings: dict[str, Any]

    def credentials(self, name: str, *, token: bool = False) -> Credentials:
        """What a caller of this name shows: its certificate, or its token."""
        file = self.folder / name
        return Credentials.from_files(
            insecure=False,
            certificate=None if token or not name else file.with_suffix(".pem"),
            key=None if token or not name else file.with_suffix(".key"),
            authority=self.folder / "authority.pem",
            token_file=file.with_suffix(".token") if token else None,
        )

    def keys(self) -> dict[bytes, bytes]:
        client: Any = redis.Redis.from_url(self.server.url)
        found = {key: client.dump(key) for key in client.scan_iter("*")}
        client.close()
        return found


@contextmanager
def secured(folder: Path, *, tokens: bool = False, **section: Any) -> Iterator[Secure]:
    """A broker that asks for certificates, or for tokens; `section`: more of its own settings."""
    files = folder / "certificates"
    make_certificates(files)
    security = {"tls_certificate": str(files / "broker.pem"), "tls_key": str(files / "broker.key")}
    proof = (
        {"accepted_tokens": str(files / "tokens")}
        if tokens
        else {"tls_authority": str(files / "authority.pem")}
    )
    settings = {"run": RUN, "security": security | proof, "broker": section}
    with (
        harness.redis(folder) as server,
        closing(open_run(server.url)) as learner,
        harness.broker(server.url, folder / "broker", settings=settings) as broker,
    ):
        yield Secure(broker=broker, server=server, learner=learner, folder=files, settings=settings)


def make_certificates(folder: Path) -> None:
    order = Order(folder=folder, run=RUN, actors=NAMES)
    main(order)
    old = Order(folder=folder, run=RUN, days=_EXPIRED_DAYS)
    issue(authority_of(folder), old, "expired", Identity(run=RUN, party=Party.ACTOR))
    foreign = Identity(run=OTHER_RUN, party=Party.ACTOR)
    issue(authority_of(folder), order, "other-run", foreign)
    issue(authority_of(folder), order, "no-run", None)
    stranger = folder / "stranger-authority"
    main(Order(folder=stranger, run=RUN))
    for suffix in ("pem", "key", "token"):
        shutil.copy(stranger / f"actor.{suffix}", folder / f"stranger.{suffix}")
    _foreign_token(folder, foreign)


def _foreign_token(folder: Path, identity: Identity) -> None:
    (folder / "other-run.token").write_text("token-of-another-run\n")
    tokens = folder / "tokens"
    tokens.write_text(tokens.read_text() + line(identity, "token-of-another-run"))


def outcome(
    channel: grpc.Channel, path: str, data: bytes = b"", **options: Any
) -> tuple[grpc.StatusCode, str]:
    try:
        channel.unary_unary(path, None, None)(data, timeout=PATIENCE_S, **options)
    except grpc.RpcError as error:
        return code_of(error)
    return grpc.StatusCode.OK, ""


PASSWORD: Final = "hunter2-0d9f"  # noqa: S105 - the one that is looked for
PENSTOCK: Final = (str(Path(sys.executable).with_name("penstock")),)
USERS: Final = Path("deploy/redis/users.acl").absolute()


@contextmanager
def locked_redis(folder: Path) -> Iterator[RedisServer]:
    with harness.redis(folder) as server:
        client: Any = redis.Redis.from_url(server.url)
        client.config_set("requirepass", PASSWORD)
        client.close()
        yield server


def printed(*words: str, **environment: str) -> str:
    done = harness.command(*words, env={**os.environ, **environment})
    return done.stdout + done.stderr


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


ENVIRONMENT: Final = {"PGPASSWORD": "pg", "WANDB_API_KEY": "wandb", "HF_TOKEN": "hub"}
"""Secrets that libraries take from the environment, by what theirs begin with."""


def planted(folder: Path) -> tuple[list[str], dict[str, str], list[str]]:
    """Settings and environment that carry secrets by every road that is documented, and the secrets."""
    certificates = folder / "certificates"
    words = ("--run", "guarded", "--actor", "a-0", "--password", "registry", "--password", "postgres")
    printed("certificates", str(certificates), *words, "--redis-users", str(USERS))
    mark = "planted-0d9f"
    (folder / "headers").write_text(f"Authorization: Bearer {mark}-one\nX-Api-Key: {mark}-two\n")
    environment = {name: f"{value}-{mark}" for name, value in ENVIRONMENT.items()}
    files = [*certificates.glob("*.key"), *certificates.glob("*.token"), *certificates.glob("*.password")]
    secrets = [secret_of(file) for file in files]
    secrets += [
        f"{mark}-one",
        f"{mark}-two",
        *(value.partition("=")[2] or value for value in environment.values()),
    ]
    settings = [
        f"security.http_headers_file={folder / 'headers'}",
        f"security.tls_certificate={certificates / 'learner.pem'}",
        f"security.tls_key={certificates / 'learner.key'}",
        f"security.tls_authority={certificates / 'authority.pem'}",
        f"security.token_file={certificates / 'actor.token'}",
        f"security.accepted_tokens={certificates / 'tokens'}",
    ]
    return settings, environment, [*secrets, PASSWORD]


def secret_of(file: Path) -> str:
    """What must not turn up: of a key the longest line of its PEM."""
    return max(file.read_text().splitlines(), key=len)


def pages_of(folder: Path) -> set[str]:
    pages = set()
    for file in (folder / "endpoints").glob("*.json"):
        try:
            port = json.loads(file.read_text())["metrics_port"]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=1.0) as reply:
                pages.add(reply.read().decode())
        except (OSError, ValueError, http.client.HTTPException):
            continue  # it is starting or ending
    return pages


def stored_in(server: RedisServer, runs: str) -> str:
    """Everything that Redis keeps: the specification that actors receive lies there, too."""
    client: Any = redis.Redis(unix_socket_path=str(server.folder / "redis.sock"), password=PASSWORD)
    kept = b"".join(client.dump(key) for key in client.scan_iter())
    client.close()
    assert runs.encode() in kept
    return str(kept.decode(errors="replace"))


def logged_by(server: RedisServer) -> str:
    files = [path for path in server.folder.rglob("appendonly*") if path.is_file()]
    log = b"".join(path.read_bytes() for path in files)
    assert b"FCALL" in log or b"EVALSHA" in log or b"XADD" in log or b"hset" in log.lower()
    return log.decode(errors="replace")


def lines_of_family(pid: int) -> set[str]:
    found = set()
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            found |= {command_line(int(child)), *lines_of_family(int(child))}
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
    return found


def leaves_no_secret(
    locked: RedisServer, folder: Path, what: str, more: Sequence[str], *, runs: str = "CartPole-v1"
) -> None:
    """Train with the secrets; no file, line, process, page or key of Redis has one.

    what: is trained.   more: settings.   runs: a word that Redis holds when the run was there.
    """
    run, log = folder / "run", folder / "train.log"
    (folder / "password").write_text(f"{PASSWORD}\n")
    settings, environment, secrets = planted(folder)
    assert len(set(secrets)) >= 20
    settings += [f"security.redis_password_file={folder / 'password'}", "run=guarded", "actor.count=1", *more]
    words = ["train", what, "--run-dir", str(run), "--redis", f"unix://{locked.folder / 'redis.sock'}"]
    words += [word for one in settings for word in ("--set", one)]
    seen: set[str] = set()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*PENSTOCK, *words], stdout=output, stderr=output, env={**os.environ, **environment}
        )
    try:
        while process.poll() is None:
            seen |= lines_of_family(process.pid) | pages_of(run)
    finally:
        process.kill()
        process.wait(COMMAND_S)
    assert process.returncode == 0, log.read_text()
    assert any("learner --redis" in line for line in seen)
    assert any("penstock_" in page for page in seen)
    told = "\n".join([*seen, log.read_text(), stored_in(locked, runs), logged_by(locked)])
    assert [secret for secret in secrets if secret in told] == []
    files = [path for path in run.rglob("*") if path.is_file()]
    assert [path for path in files if any(one.encode() in path.read_bytes() for one in secrets)] == []
    assert [path for path in files if path.stat().st_mode & 0o077] == []
    assert run.stat().st_mode & 0o777 == 0o700
