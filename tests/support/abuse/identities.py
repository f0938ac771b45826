"""Callers of every kind at one broker over TLS: with certificates or tokens, good, wrong, old and none."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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
from tests.support.run.broker_process import BrokerProcess, eventually, launch, open_run
from tests.support.run.simulated_actor import code_of
from tests.support.run.small_run import RUN
from tests.support.storage.redis_server import RedisServer, find_binaries

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
        """What Redis holds, byte for byte, but for what changes with time."""
        client: Any = redis.Redis.from_url(self.server.url)
        found = {key: client.dump(key) for key in client.scan_iter("*")}
        client.close()
        return found

    def refused(self, label: str) -> float:
        """How many calls the broker says that it refused for this reason."""
        return self.broker.refused(label)


@contextmanager
def secured(folder: Path, *, tokens: bool = False, **section: Any) -> Iterator[Secure]:
    """A broker that asks for certificates, or for tokens; `section`: more of its own settings."""
    files = folder / "certificates"
    make_certificates(files)
    server = RedisServer(find_binaries()[0], folder)
    server.start()
    learner = open_run(server.url)
    security = {"tls_certificate": str(files / "broker.pem"), "tls_key": str(files / "broker.key")}
    proof = (
        {"accepted_tokens": str(files / "tokens")}
        if tokens
        else {"tls_authority": str(files / "authority.pem")}
    )
    settings = {"run": RUN, "security": security | proof, "broker": section}
    broker = launch(server.url, folder / "broker", settings=settings)
    try:
        eventually(broker.is_ready, "readiness of the broker", within_s=PATIENCE_S)
        yield Secure(broker=broker, server=server, learner=learner, folder=files, settings=settings)
    finally:
        broker.end()
        learner.close()
        server.kill()


def make_certificates(folder: Path) -> None:
    """Everybody of the run, and callers who are not what they should be."""
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
    """How a call with these bytes ends."""
    try:
        channel.unary_unary(path, None, None)(data, timeout=PATIENCE_S, **options)
    except grpc.RpcError as error:
        return code_of(error)
    return grpc.StatusCode.OK, ""
