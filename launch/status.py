"""`penstock status`: what a run's broker says of it, as a table or JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from launch.plan import CONFIG_FILE, service_settings
from penstock.runtime.credentials import credentials
from penstock.runtime.exit import EXIT_OK, Fatal
from penstock.runtime.settings import ConfigurationError
from penstock.v1 import control_pb2, control_pb2_grpc
from penstock.wire.auth import Credentials
from penstock.wire.channel import open_channel
from penstock.wire.limits import CALL_DEADLINE_S
from penstock.wire.messages import RunState

_MIB = 1024 * 1024


def main(
    run: Path | None, broker: str | None, *, config: Path | None, assignments: tuple[str, ...], as_json: bool
) -> int:
    """Ask the broker at `broker`, or the one that the run's `endpoints.json` names.

    config: with the TLS files of section `security`; default: that of the run asked for in its folder.
    """
    if broker is None:
        folder = run or _newest_run()
        broker = broker_of(folder)
        config = config or folder / CONFIG_FILE
    reply = ask(broker, credentials(service_settings(config, assignments).security))
    if as_json:
        content = MessageToDict(
            reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        content["learner"] = json.loads(reply.learner_json or "null")
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    else:
        show(reply, Console())
    return EXIT_OK


def ask(address: str, credentials: Credentials) -> control_pb2.StatusReply:
    """The broker's reply; raises Fatal when it does not answer, ConfigurationError for a bad address."""
    try:
        with open_channel(address, credentials) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            return stub.Status(control_pb2.StatusRequest(), timeout=CALL_DEADLINE_S)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    except grpc.RpcError as error:
        raise Fatal(
            f"broker at {address} does not answer: {error.details()}; is the run still going?"
        ) from error


def broker_of(folder: Path) -> str:
    """The broker's address in the `endpoints.json` of a run."""
    file = folder / "endpoints.json"
    try:
        address = json.loads(file.read_text())["broker"]["address"]
    except (FileNotFoundError, KeyError) as error:
        raise ConfigurationError(f"{file}: names no broker; give --broker ADDRESS") from error
    return str(address)


def show(reply: control_pb2.StatusReply, console: Console) -> None:
    """Two tables: the run, its sessions."""
    table = Table(show_header=False, box=None)
    for name, value in _facts(reply):
        table.add_row(name, value)
    console.print(table)
    sessions = Table("session", "actor", "role", "sequence", "leave to", "version", "idle s", box=None)
    for row in reply.sessions:
        numbers = (row.sequence, row.begin_through, row.applied_version, round(row.idle_ms / 1000, 1))
        sessions.add_row(str(row.session), row.actor_id, row.role, *map(str, numbers))
    console.print(sessions)


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


def _newest_run() -> Path:
    files = sorted(Path("runs").glob("*/endpoints.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ConfigurationError("status: no run in ./runs; name a run's folder or give --broker ADDRESS")
    return files[-1].parent
