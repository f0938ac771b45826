"""Find the records of a run, and start a private server for the log of a run that has ended.

A live Redis is read where it runs: at the URL given, by the run's own configuration, or the embedded server
of a live run. The embedded server of an ended run is started again on a copy of its files; the originals are
only read.
"""

import fcntl
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.broker.log.audit_log import HeldLog, read_log
from penstock.config.credentials import redis_password, tls_files
from penstock.config.run_folder import CONFIG_FILE
from penstock.config.run_seal import check_places
from penstock.config.service_settings import service_settings
from penstock.config.settings import ConfigurationError, Settings, load, parse_toml
from penstock.launch.run.redis_binary import newest
from penstock.launch.run.redis_service import ask
from penstock.runtime.exit import Fatal

LINEAGE_FILE: Final = "lineage.jsonl"
JOURNALS: Final = "journals"
_START_S: Final = 120.0
_LOCK_FILE: Final = "server.lock"
_APPEND_ONLY: Final = ("appendonly.aof", "appendonlydir")
_WHERE_ONE_READS: Final = ("CONFIG", "ACL", "EVAL", "EVALSHA", "SCRIPT", "SHUTDOWN")
"""Commands that are closed as well on a server that is only read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The places of a run's records. url: of Redis, "" for the run's own."""

    folder: Path
    settings: Settings
    url: str
    journals: tuple[Path, ...]

    @property
    def lineage(self) -> Path:
        """Return the path of the learner's record."""
        return self.folder / LINEAGE_FILE


def find(folder: Path, redis: str | None, journals: tuple[Path, ...], assignments: tuple[str, ...]) -> Where:
    """Return the places given by the user; else the run's folder `journals`, else those of the configuration.

    Raises ConfigurationError for a folder without a run, or one that was not made here and names a password
    for a Redis elsewhere.
    """
    config = folder / CONFIG_FILE
    if not config.exists() and not (folder / LINEAGE_FILE).exists():
        raise ConfigurationError(f"audit {folder}: holds neither {CONFIG_FILE} nor {LINEAGE_FILE}, so no run")
    settings = service_settings(config if config.exists() else None, assignments)
    if redis is None and settings.broker.redis and settings.security.redis_password_file and config.exists():
        check_places(folder, load([parse_toml(config)]), "name its Redis with --redis")
    for journal in journals:
        if not journal.is_dir():
            raise ConfigurationError(f"--journal {journal}: no such folder")
    own = [one for one in (folder / JOURNALS, settings.actor.ack_journal) if one is not None and one.is_dir()]
    return Where(
        folder=folder,
        settings=settings,
        url=redis or settings.broker.redis,
        journals=journals or tuple(own[:1]),
    )


def newest_checkpoint(folder: Path) -> str:
    """Return the id of the newest checkpoint on disk, "" without one.

    Only Redis knows whether it was committed.
    """
    checkpoints = folder / "checkpoints"
    manifests = checkpoints.glob("*/manifest.json") if checkpoints.is_dir() else ()
    names = (path.parent.name for path in manifests)
    return max((name for name in names if not name.startswith(".")), default="")


# ---------------------------------------------------------------- the log


def held_log(where: Where) -> tuple[HeldLog | None, str]:
    """Return what Redis holds, None for nothing, and which Redis that is.

    Raises Fatal for a Redis that should answer and does not, ConfigurationError for that of another run.
    """
    log, text = _read(where)
    if log is not None and where.settings.run not in ("", log.run):
        raise ConfigurationError(
            f"audit: {text} holds run {log.run!r}, the folder is of {where.settings.run!r}"
        )
    return log, text


def _read(where: Where) -> tuple[HeldLog | None, str]:
    if where.url:
        section = where.settings.security
        return _said(
            read_log(where.url, redis_password(section), tls_files(section)), f"Redis at {where.url}"
        )
    address = _live_address(where.folder)
    if address is not None:
        return _said(read_log(address), f"the run's own Redis at {address}")
    with _copied_server(where.folder / "redis") as copy:
        if copy is None:
            return None, f"none: {where.folder / 'redis'} holds no append-only file, and no --redis was given"
        return _said(read_log(copy), f"a copy of {where.folder / 'redis'}: the run has ended", is_copy=True)


def _said(log: HeldLog | None, text: str, *, is_copy: bool = False) -> tuple[HeldLog | None, str]:
    if log is None:
        return None, f"{text} (it holds no run)"
    if log.closed and not is_copy:
        text += "; it was restarted and no learner has opened it since, so what it lost is not on record yet"
    return log, text


def _live_address(run_dir: Path) -> str | None:
    """Return the URL of the embedded server when it answers."""
    try:
        content = json.loads((run_dir / "endpoints.json").read_text())
        address = str(content["redis"]["address"])
    except (FileNotFoundError, KeyError, ValueError):
        return None
    path = address.removeprefix("unix://")
    return address if path != address and ask(Path(path), b"PING").startswith(b"+PONG") else None


@contextmanager
def _copied_server(folder: Path) -> Iterator[str | None]:
    """Yield the URL of a server on a copy of the append-only file in `folder`; None when there is none."""
    if not any((folder / name).exists() for name in _APPEND_ONLY):
        yield None
        return
    with ExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-audit-")))
        with _held(folder):
            for name in _APPEND_ONLY:
                source = folder / name
                if source.is_dir():
                    shutil.copytree(source, private / name)
                elif source.exists():
                    shutil.copy2(source, private / name)
        yield stack.enter_context(_server(private))


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock the folder against writers inside the block; raises Fatal when a server has it."""
    lock = folder / _LOCK_FILE
    if not lock.exists():
        yield
        return
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Fatal(
                f"audit: a redis-server holds {folder} and does not answer; give its URL with --redis"
            ) from None
        yield


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    """Yield the URL of a private server on the files in `folder`."""
    socket = folder / "audit.sock"
    options = ("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700", "--dir", str(folder))
    durability = ("--save", "", "--appendonly", "yes", "--appendfsync", "no", "--maxmemory", "0")
    log = folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*newest().start_without(*_WHERE_ONE_READS), *options, *durability],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + _START_S
        while not ask(socket, b"PING").startswith(b"+PONG"):
            if server.poll() is not None or time.monotonic() > deadline:
                last = log.read_text(errors="replace").strip().splitlines()[-1:]
                raise Fatal(f"audit: no redis-server on a copy of the run's files: {''.join(last)}")
            time.sleep(0.01)
        yield f"unix://{socket}"
    finally:
        server.kill()
        server.wait()
