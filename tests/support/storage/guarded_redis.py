"""A Redis that asks who calls: the shipped ACL file with passwords, and TLS where the server can.

`penstock certificates` makes passwords and certificates, as an operator would.
"""

import socket
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Final

import redis

from penstock.launch.commands.certificates import main
from penstock.launch.commands.request import Order
from penstock.rpc.identity import TlsFiles
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
        """Where the test itself calls as admin."""
        return f"unix://admin:any@{self.folder / 'redis.sock'}"

    def url_of(self, user: str) -> str:
        """Where a user calls: over TLS where the server serves it, else by the socket."""
        if self.tls_port:
            return f"rediss://{user}@127.0.0.1:{self.tls_port}/0"
        return f"unix://{user}@{self.folder / 'redis.sock'}"

    def password(self, user: str) -> str:
        """The user's password."""
        return self.password_file(user).read_text().strip()

    def password_file(self, user: str) -> Path:
        """Where it stands."""
        return self.certificates / f"redis-{user}.password"

    def files_of(self, user: str) -> TlsFiles:
        """Certificate, key and authority of a process."""
        return TlsFiles(
            certificate=self.certificates / f"{user}.pem",
            key=self.certificates / f"{user}.key",
            authority=self.certificates / "authority.pem",
        )

    def admin(self) -> Any:
        """A client that may do everything."""
        return redis.Redis.from_url(self.url)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
