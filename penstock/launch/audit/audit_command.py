"""`penstock audit RUN`: reads the records, balances the accounts, prints the verdict.

Exit 1 when anything is wrong.
"""

import json
import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from penstock.broker.log.audit_log import HeldLog
from penstock.launch.audit import sources
from penstock.launch.audit.books import Books
from penstock.launch.audit.findings import AuditResult, Kind
from penstock.launch.audit.journals import Journals, read_journals
from penstock.launch.audit.lineage import Lineage, read_lineage
from penstock.launch.audit.samples import Samples, check_samples, read_samples_of
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK

SHOWN: Final = 50
"""Number of problems that are listed; `--json` has all of them."""


def main(
    run_dir: Path,
    *,
    redis: str | None,
    journals: tuple[Path, ...],
    assignments: tuple[str, ...],
    as_json: bool,
) -> int:
    """Audit the run in `run_dir`, print the verdict, and return the exit code.

    It is 0 when every acknowledged fragment is where one record says, and in one place.

    Args:
        run_dir: folder of the run.
        redis: URL of the run's Redis; None: the run's own.
        journals: folders of the actors' records; (): the run's own.
        assignments: `SECTION.KEY=VALUE` over the run's configuration.
        as_json: print JSON instead of a table.
    """
    verdict = audit(run_dir, redis=redis, journals=journals, assignments=assignments)
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
    """Return the verdict; arguments as of `main`.

    Journals are read first: a fragment that is acknowledged while the audit reads is no loss. What servers
    sampled is read last: what was trained by then was sampled before.
    """
    where = sources.find(run_dir, redis, journals, assignments)
    recorded = read_journals(where.journals, where.settings.run)
    log, log_text = sources.held_log(where)
    if log is not None:
        head = log.commits[-1].checkpoint_id if log.commits else ""
    else:
        head = sources.newest_checkpoint(run_dir)
    lineage = read_lineage(where.lineage, head)
    books = Books(recorded, lineage, log)
    order = list(Kind)
    samples = read_samples_of(where.journals, where.settings.run)
    found = (*books.check(), *check_samples(samples, recorded, lineage, log))
    problems = tuple(sorted(found, key=lambda one: order.index(one.kind)))
    return AuditResult(
        run=where.settings.run or (log.run if log is not None else run_dir.name),
        sources=_sources(recorded, lineage, log, log_text)
        | ({"samples": _said(samples)} if samples.files else {}),
        fragments=dict(+books.fragments),
        journalled=dict(+books.journalled),
        sampled=samples.counts(),
        counters={} if log is None else dict(log.counters),
        problems=problems,
    )


def show(verdict: AuditResult, console: Console) -> None:
    """Print the account as a table, then the list of problems."""
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
        + (f", {len(lineage.others)} lines beside them" if lineage.others else "")
        + _torn(lineage.torn),
        "log": log_text,
        "ledger": "none: only Redis knows what was acknowledged and committed"
        if log is None
        else _ledger(log),
    }
    if not lineage.names_fragments:
        found["lineage"] += "; written by an older version, so fragments are followed by number only"
    return found


def _said(samples: Samples) -> str:
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
