"""`penstock status`: the state of a run and its bottleneck, as a live table, once, or as JSON.

In a run's folder every process is examined; by a broker's address alone only the broker's reply is shown.
"""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.config.credentials import credentials
from penstock.config.service_settings import service_settings
from penstock.config.settings import ConfigurationError
from penstock.launch.control.control_calls import message_json
from penstock.launch.inspection.flow import RunSnapshot, Watch, ask
from penstock.launch.inspection.processes import ENDPOINTS_FILE, is_going_on
from penstock.protocol.messages import RunState
from penstock.runtime.exit import EXIT_OK, Fatal
from penstock.runtime.foreground import AsJson, Configured, finite
from penstock.v1 import control_pb2

_MIB: Final = 1024 * 1024
_WINDOW_S: Final = 1.0
"""Seconds between the two looks of `--once`."""
_PIPE_COLUMNS: Final = 200
_REFRESHES_PER_SECOND: Final = 4


def status(
    run: Annotated[Path | None, typer.Argument(help="Folder of a run on this machine.")] = None,
    broker: Annotated[
        str | None, typer.Option("--broker", metavar="ADDRESS", help="Ask this broker.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and stop.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.5, max=3600, callback=finite, help="Seconds between two looks.")
    ] = 1.0,
    as_json: AsJson = False,
    *,
    configured: Configured,
) -> int:
    """Show what a run is doing and what sets its pace, until Ctrl-C on a terminal, else once.

    Section `security` of the configuration names the files for TLS.
    """
    if broker is not None:
        reply = ask(broker, credentials(service_settings(configured.config, configured.assigned).security))
        _print_json(_reply_json(reply)) if as_json else _print(_reply_parts(reply))
        return EXIT_OK
    folder = run or _newest_run()
    if not (folder / ENDPOINTS_FILE).exists():
        raise ConfigurationError(f"{folder / ENDPOINTS_FILE}: names no broker; give --broker ADDRESS")
    if not is_going_on(folder):
        raise Fatal(f"{folder}: the run has ended; its summary.json says how")
    watch = Watch(folder, configured.config, configured.assigned)
    console = Console()
    if as_json or once or not console.is_terminal:
        watch.look()  # rates need two observations
        time.sleep(_WINDOW_S)
        look = watch.look()
        known = _reply_json(look.now.status) if look.now.status else {"broker_problem": look.now.silence}
        _print_json(known | look.as_json()) if as_json else _print(look_parts(look))
        return EXIT_OK
    with Live(console=console, refresh_per_second=_REFRESHES_PER_SECOND, transient=False) as live:
        try:
            while is_going_on(folder):
                live.update(Group(*look_parts(watch.look())))
                time.sleep(interval)
        except KeyboardInterrupt:
            return EXIT_OK
    console.print("the run has ended")
    return EXIT_OK


def look_parts(look: RunSnapshot) -> list[RenderableType]:
    """Return the bottleneck in one line, a table per role, and the broker's reply."""
    table = Table(
        "role", "well", "rate", "lag", "version", "restarts", "health", box=None, header_style="dim"
    )
    for row in look.rows:
        health = Text("; ".join(row.problems) or "ok", style="red" if row.problems else "green")
        count = f"{row.healthy} of {row.of}"
        table.add_row(row.role, count, row.rate, row.lag, row.version, str(row.restarts), health)
    line = Text(look.verdict.line, style="bold red" if look.verdict.stands_still else "bold")
    status = look.now.status
    return [line, Text(), table, Text(), *(_reply_parts(status) if status else [Text(look.now.silence)])]


def _reply_json(reply: control_pb2.StatusReply) -> dict[str, Any]:
    return message_json(reply) | {"learner": json.loads(reply.learner_json or "null")}


def _reply_parts(reply: control_pb2.StatusReply) -> list[RenderableType]:
    table = Table(show_header=False, box=None)
    for name, value in _facts(reply):
        table.add_row(name, value)
    sessions = Table("session", "actor", "role", "sequence", "credit to", "version", "idle s", box=None)
    for row in reply.sessions:
        numbers = (row.sequence, row.begin_through, row.applied_version, round(row.idle_ms / 1000, 1))
        sessions.add_row(str(row.session), row.actor_id, row.role, *map(str, numbers))
    return [table, sessions]


def _facts(reply: control_pb2.StatusReply) -> list[tuple[str, str]]:
    state = RunState(reply.desired).label if reply.desired else "not started"
    return [
        ("run", reply.run or "none yet: no learner has taken the lease"),
        ("wanted", f"{state} (revision {reply.revision})" + (", log closed" if reply.closed else "")),
        ("weights", f"version {reply.latest.version}, update {reply.latest.update}"),
        ("log", f"{reply.log_entries:,} entries, {reply.log_bytes / _MIB:.1f} MiB, head {reply.log_head:,}"),
        ("settled", f"{reply.settled:,} of {reply.acked:,} acknowledged fragments"),
        ("outstanding", f"{reply.outstanding_steps:,} of {reply.budget_steps:,} steps"),
        ("epoch", str(reply.epoch)),
        *((f"learner {key}", _text(value)) for key, value in json.loads(reply.learner_json or "{}").items()),
    ]


def _text(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _print(parts: list[RenderableType]) -> None:
    """Print the parts; a pipe has no width, so there no column is broken."""
    console = Console()
    width = console.width if console.is_terminal else _PIPE_COLUMNS
    Console(width=width).print(*parts, sep="\n")


def _print_json(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content, indent=2) + "\n")


def _newest_run() -> Path:
    files = sorted(Path("runs").glob(f"*/{ENDPOINTS_FILE}"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ConfigurationError("status: no run in ./runs; name a run's folder or give --broker ADDRESS")
    return files[-1].parent
