"""The identity of a caller, `penstock://RUN/PARTY[/NAME]`, from its certificate or its token.

A certificate without a name may act under any actor id, one with a name only under that name and names that
it begins: `gpu-3` allows the actor ids `gpu-3` and `gpu-3-…`. And the PEM files. Loads no gRPC.
"""

import ssl
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from penstock.protocol.limits import check_id

SCHEME: Final = "penstock://"


class Party(StrEnum):
    """The role of a process towards the others; `auth.ACCESS` lists the methods that each may call."""

    ACTOR = "actor"
    """Generates experience: rollout worker, policy server, evaluation actor."""
    CLIENT = "client"
    """Plays by a policy server."""
    OPERATOR = "operator"
    """Looks at a run and steers it."""
    LEARNER = "learner"
    """Reads the log in Redis; calls no broker."""
    BROKER = "broker"
    """Serves actors; calls no broker."""


class Unidentified(ValueError):
    """The caller showed no valid proof of identity; the message names what is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The proved identity of a caller. `name` is "" where several share a certificate or token."""

    run: str
    party: Party
    name: str = ""

    def __str__(self) -> str:
        return f"{SCHEME}{self.run}/{self.party}" + (f"/{self.name}" if self.name else "")

    def may_act_as(self, actor_id: str) -> bool:
        return not self.name or actor_id == self.name or actor_id.startswith(f"{self.name}-")


CALLER: Final[ContextVar[Identity | None]] = ContextVar("caller", default=None)
"""The identity of the caller that is served; None on a server that requires none (plaintext)."""


def parse(uri: str) -> Identity:
    parts = uri.removeprefix(SCHEME).split("/")
    if not uri.startswith(SCHEME) or len(parts) not in (2, 3):
        raise Unidentified(f"{uri[:120]!r} is not {SCHEME}RUN/PARTY[/NAME]")
    try:
        name = check_id("name", parts[2]) if len(parts) == 3 else ""
        return Identity(run=check_id("run", parts[0]), party=Party(parts[1]), name=name)
    except ValueError as error:
        raise Unidentified(f"{uri[:120]!r}: {error}") from error


def from_alternative_names(names: Iterable[bytes]) -> Identity:
    """The identity in a certificate's subject alternative names; raises Unidentified unless there is one."""
    texts = [name.decode(errors="replace") for name in names]
    ours = [text for text in texts if text.startswith(SCHEME)]
    if len(ours) != 1:
        raise Unidentified(
            f"the certificate holds {len(ours)} alternative names {SCHEME}RUN/PARTY, one is needed; "
            "`penstock certificates` makes one"
        )
    return parse(ours[0])


def stamp_of(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of a process's certificate chain and key, and of the authority of its peers."""

    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Return what differs when a file was replaced or written; raises OSError when one is gone."""
        return tuple(stamp_of(one) for one in (self.certificate, self.key, self.authority) if one is not None)

    def check_pair(self) -> None:
        if self.certificate is None or self.key is None:
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
        except ssl.SSLError as error:
            raise ValueError(
                f"tls_certificate={self.certificate} tls_key={self.key}: {error.reason or error}; "
                "give a PEM certificate and its own key"
            ) from error
