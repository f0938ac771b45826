"""`penstock audit RUN`: reads the records, balances the accounts, prints the verdict.

Exit 1 when anything is wrong.
"""

import fcntl
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from penstock.actor.link.ack_journal import Run, SampledLine, read_samples, sample_files
from penstock.broker.log.audit_log import HeldLog, read_log
from penstock.config.credentials import redis_password, tls_files
from penstock.config.run_folder import CONFIG_FILE
from penstock.config.service_settings import service_settings
from penstock.config.settings import ConfigurationError, Settings, load, parse_toml
from penstock.config.trusted import check_places
from penstock.launch.audit import findings
from penstock.launch.audit.books import Books, Journals, Lineage, damaged, read_journals, read_lineage
from penstock.launch.audit.findings import AuditResult, Kind, Problem, problem_at
from penstock.launch.run.redis_service import ask, newest
from penstock.learner.ledger import DIGEST_BYTES
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK, Fatal
from penstock.runtime.foreground import AsJson, Assignments

# ---- Find the records of a run, and start a private server for the log of a run that has ended.

LINEAGE_FILE: Final = "lineage.jsonl"
JOURNALS: Final = "journals"
_START_S: Final = 120.0
_LOCK_FILE: Final = "server.lock"
_APPEND_ONLY: Final = ("appendonly.aof", "appendonlydir")
_WHERE_ONE_READS: Final = ("CONFIG", "ACL", "EVAL", "EVALSHA", "SCRIPT", "SHUTDOWN")
"""Commands that are closed as well on a server that is only read."""


def find(
    folder: Path, redis: str | None, journals: tuple[Path, ...], assignments: tuple[str, ...]
) -> tuple[Settings, str, tuple[Path, ...]]:
    """Return the run's settings, the URL of its Redis, "" for the run's own, and the folders of its journals.

    Those are given by the user; else the run's folder `journals`, else those of the configuration.
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
    return settings, redis or settings.broker.redis, journals or tuple(own[:1])


def held_log(folder: Path, settings: Settings, url: str) -> tuple[HeldLog | None, str]:
    """Return what Redis holds, None for nothing, and which Redis that is.

    Raises Fatal for a Redis that should answer and does not, ConfigurationError for that of another run.
    """
    own, section = folder / "redis", settings.security
    address = None if url else _live_address(folder)
    with ExitStack() as stack:
        copy = None if url or address else stack.enter_context(_copied_server(own))
        if url:
            log = read_log(url, redis_password(section), tls_files(section))
            text = f"Redis at {url}"
        elif address is not None:
            log, text = read_log(address), f"the run's own Redis at {address}"
        elif copy is not None:
            log, text = read_log(copy), f"a copy of {own}: the run has ended"
        else:
            return None, f"none: {own} holds no append-only file, and no --redis was given"
    if log is None:
        return None, f"{text} (it holds no run)"
    if log.closed and copy is None:
        text += "; it was restarted and no learner has opened it since, so what it lost is not on record yet"
    if settings.run not in ("", log.run):
        raise ConfigurationError(f"audit: {text} holds run {log.run!r}, the folder is of {settings.run!r}")
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
    """Yield the URL of a server on a copy of the append-only file in `folder`; None without such a file."""
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


# ---- Tokens of agents' conversations: sampled by servers, sent, and trained.


@dataclass(slots=True)
class Samples:
    """All records of what servers sampled.

    actors: servers with a record. answers, sent, trained: numbers of runs of tokens. torn: number of lines
    that a crash cut.
    """

    actors: set[str] = field(default_factory=set)
    files: int = 0
    torn: int = 0
    answers: int = 0
    sent: int = 0
    trained: int = 0
    problems: list[Problem] = field(default_factory=list)
    newest: int = 0
    """Newest version of weights that sampled tokens."""
    _drawn: Counter[tuple[str, Run]] = field(default_factory=Counter)
    _sent: dict[bytes, list[int]] = field(default_factory=dict)
    """First bytes of a payload's digest → runs in each fragment of that payload."""

    def note(self, line: SampledLine) -> None:
        """Count sampled runs of tokens, or compare a sent fragment with them."""
        self.actors.add(line.actor)
        if not line.sha256:
            self.answers += len(line.runs)
            self._drawn.update((line.conversation, run) for run in line.runs)
            return
        self.sent += len(line.runs)
        self._sent.setdefault(bytes.fromhex(line.sha256)[:DIGEST_BYTES], []).append(len(line.runs))
        for run in line.runs:
            self.newest = max(self.newest, run.version)
            if self._drawn[line.conversation, run] < 1:
                what = f"conversation {line.conversation}: tokens of version {run.version} were not sampled"
                self.problems.append(Problem(Kind.CHANGED, f"{what}, or were sent twice"))
            self._drawn[line.conversation, run] -= 1

    def take(self, digest: bytes) -> bool:
        """Count a trained fragment; False where it was not sent, or fewer times than trained."""
        found = self._sent.get(digest)
        if not found:
            return False
        self.trained += found.pop()
        return True

    def counts(self) -> dict[str, int]:
        """Return the runs of tokens by their outcome; none without a record."""
        counts = {"answers": self.answers, "sent": self.sent, "trained": self.trained}
        return counts if self.files else {}


def read_samples_of(folders: Sequence[Path], run: str) -> Samples:
    """Read every line of `run` in the folders; "": of any run."""
    samples = Samples()
    for path in sample_files(folders):
        samples.files += 1
        numbers: list[int] = []
        for line in read_samples(path, numbers):
            if line is None:
                samples.torn += 1
            elif run in ("", line.run):
                samples.note(line)
        samples.problems += [damaged(path, number) for number in numbers]
    return samples


def check_samples(
    samples: Samples, journals: Journals, lineage: Lineage, log: HeldLog | None
) -> Iterator[Problem]:
    """Yield a problem for trained tokens that were not sampled, and for versions that were not published."""
    yield from samples.problems
    published = max([line.version for line in (*lineage.lines, *lineage.others)], default=0)
    published = max(published, 0 if log is None else log.counters["version"])
    if samples.newest > published:
        what = f"tokens are of weight version {samples.newest}, the newest published is {published}"
        yield Problem(Kind.UNACCOUNTED, what)
    actors = {session: one.actor for session, one in journals.sessions.items()}
    actors |= {} if log is None else {entry.session: entry.actor for entry in log.entries if entry.actor}
    for line in lineage.lines:
        for session, digests in line.digests.items():
            whole, is_recorded = bytes.fromhex(digests), actors.get(int(session)) in samples.actors
            if len(whole) != DIGEST_BYTES * findings.count(line.sessions[session]):
                continue  # a problem of the lineage
            for index, sequence in enumerate(findings.numbers(line.sessions[session])):
                digest = whole[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
                if not samples.take(digest) and is_recorded:
                    what = "trained, and not what its server has sent"
                    yield problem_at(Kind.CHANGED, int(session), sequence, what)


SHOWN: Final = 50
"""Number of problems that are listed; `--json` has all of them."""


def audit_run(
    run: Annotated[Path, typer.Argument(help="Folder of a run, running or ended.")],
    journals: Annotated[
        list[Path] | None,
        typer.Option(
            "--journal",
            metavar="DIR",
            help=(
                "Folder of the actors' records (actor.ack_journal); may be repeated. Default: the run's own."
            ),
        ),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            "--redis", metavar="URL", help="Redis of the run; default: the one it started or was given."
        ),
    ] = None,
    as_json: AsJson = False,
    assignments: Assignments = None,
) -> int:
    """Say for every acknowledged fragment where it went.

    Exit 1 with a list when one is lost, doubled or unaccounted.
    """
    verdict = audit(run, redis=redis, journals=tuple(journals or ()), assignments=tuple(assignments or ()))
    if as_json:
        sys.stdout.write(json.dumps(verdict.to_json(), indent=2) + "\n")
    else:
        show(verdict, Console(soft_wrap=True, highlight=False))
    if verdict.clean:
        return EXIT_OK
    found = ", ".join(f"{count} {kind}" for kind, count in verdict.tally().items() if count)
    sys.stderr.write(f"audit of {verdict.run}: the books do not balance: {found}\n")
    return EXIT_FAILED


def audit(
    run_dir: Path,
    *,
    redis: str | None = None,
    journals: tuple[Path, ...] = (),
    assignments: tuple[str, ...] = (),
) -> AuditResult:
    """Return the verdict on a run.

    redis: URL of its Redis, journals: folders of its actors' records; default: the run's own. assignments:
    `SECTION.KEY=VALUE` over the run's configuration.

    Journals are read first: a fragment that is acknowledged while the audit reads is no loss. The records of
    what servers sampled are read last: what was trained by then was sampled before.
    """
    settings, url, folders = find(run_dir, redis, journals, assignments)
    recorded = read_journals(folders, settings.run)
    log, log_text = held_log(run_dir, settings, url)
    if log is not None:
        head = log.commits[-1].checkpoint_id if log.commits else ""
    else:  # the newest on disk: only Redis knows if it was committed
        names = (path.parent.name for path in run_dir.glob("checkpoints/[!.]*/manifest.json"))
        head = max(names, default="")
    lineage = read_lineage(run_dir / LINEAGE_FILE, head)
    books = Books(recorded, lineage, log)
    order = list(Kind)
    samples = read_samples_of(folders, settings.run)
    found = (*books.check(), *check_samples(samples, recorded, lineage, log))
    problems = tuple(sorted(found, key=lambda one: order.index(one.kind)))
    return AuditResult(
        run=settings.run or (log.run if log is not None else run_dir.name),
        sources=_sources(recorded, lineage, log, log_text)
        | ({"samples": _samples_text(samples)} if samples.files else {}),
        fragments=dict(+books.fragments),
        journalled=dict(+books.journalled),
        sampled=samples.counts(),
        counters={} if log is None else dict(log.counters),
        problems=problems,
    )


def show(verdict: AuditResult, console: Console) -> None:
    table = Table(show_header=False, box=None)
    table.add_row("run", verdict.run)
    for name, text in verdict.sources.items():
        table.add_row(name, text)
    table.add_row("fragments", _account(verdict.fragments))
    if verdict.journalled:
        table.add_row("of those in journals", _account(verdict.journalled))
    table.add_row(
        "books", "balance: nothing lost, doubled or unaccounted" if verdict.clean else "DO NOT BALANCE"
    )
    console.print(table)
    for problem in verdict.problems[:SHOWN]:
        console.print(f"  {problem}", markup=False)
    if len(verdict.problems) > SHOWN:
        console.print(f"  and {len(verdict.problems) - SHOWN:,} more; --json lists them all")


def _account(places: dict[str, int]) -> str:
    each = ", ".join(f"{count:,} {place}" for place, count in places.items())
    return f"{sum(places.values()):,}: {each}" if places else "none"


def _sources(journals: Journals, lineage: Lineage, log: HeldLog | None, log_text: str) -> dict[str, str]:
    found = {
        "journals": f"{journals.files} files, {journals.lines:,} acknowledgements" + _torn(journals.torn)
        if journals.files
        else "none: actor.ack_journal was off, or give the folder with --journal",
        "lineage": f"{len(lineage.lines)} checkpoints through entry {lineage.position:,}"
        + (f", {len(lineage.others)} lines next to them" if lineage.others else "")
        + _torn(lineage.torn),
        "log": log_text,
        "ledger": "none: only Redis knows what was acknowledged and committed"
        if log is None
        else _ledger(log),
    }
    if not lineage.names_fragments:
        found["lineage"] += "; written by an older version, so fragments are followed by number only"
    return found


def _samples_text(samples: Samples) -> str:
    text = f"{samples.files} files, {samples.answers:,} answers, of which {samples.sent:,} were sent"
    return f"{text} and {samples.trained:,} trained{_torn(samples.torn)}"


def _ledger(log: HeldLog) -> str:
    counters = log.counters
    text = f"{counters['acked']:,} acknowledged, {counters['log_lost']:,} lost before they were an entry"
    if counters["reopened"]:
        text += f", Redis came back {counters['reopened']} times"
    if not log.lost_is_whole:
        text += "; its record of losses is full, the oldest are gone"
    return text


def _torn(count: int) -> str:
    return f", {count} lines torn by a crash" if count else ""
