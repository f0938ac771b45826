"""`penstock policy`: the versions that a run has registered, and the traffic between them.

Works on the registry of a run's folder, whether the run is running or not, or on any registry by its URL. The
learner and the policy servers of the run follow a decision within seconds; training is not affected.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from penstock.config.configuration_error import ConfigurationError
from penstock.launch.policy.policy_versions import (
    RegistryPolicy,
    Wish,
    find_place,
    opened,
    operator,
    retired,
    rolled_back,
    to_onnx,
    traffic_json,
    traffic_line,
    version_json,
    version_line,
    wished,
)
from penstock.protocol.limits import MAX_NUMBER
from penstock.registry.records import MAX_EVENTS, Event, PolicyVersion, Status
from penstock.registry.weight_files import read_kept
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.foreground import AsJson, Trust, command, finite
from penstock.runtime.output_file import check_output, output_file

policy_commands = typer.Typer(
    help="Versions that were registered: look, promote, roll back, export.", no_args_is_help=True
)

Version = Annotated[
    int, typer.Argument(metavar="VERSION", min=1, max=MAX_NUMBER, help="Number of a version.")
]
Reason = Annotated[str, typer.Option("--reason", help="Why, for the audit.")]
_HEADINGS = ("version", "status", "origin", "update", "evaluation", "parent", "registered", "reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Options that name a policy of a registry."""

    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run, or URL of a registry.")]
    registry: Annotated[
        str | None,
        typer.Option(
            "--registry",
            metavar="URL",
            help="sqlite:///FILE or postgresql://USER@HOST/DATABASE; default: what the run says.",
        ),
    ] = None
    policy: Annotated[
        str | None, typer.Option("--policy", help="Name of the policy; default: what the run says.")
    ] = None

    def found(self) -> RegistryPolicy:
        return find_place(self.run, self.registry, self.policy)


@command(policy_commands, "list")
def list_versions(place: Place, as_json: AsJson = False) -> int:
    """List the versions that were registered, oldest first."""
    found = place.found()
    with opened(found) as registry:
        versions, traffic = registry.list(found.policy), registry.traffic(found.policy)
    content = {"versions": [version_json(one) for one in versions], "traffic": traffic_json(traffic)}
    return _print(content, *_table([_HEADINGS, *map(_row, versions)]), traffic_line(traffic), as_json=as_json)


@command(policy_commands)
def show(version: Version, place: Place, as_json: AsJson = False) -> int:
    """Show one version, and what was decided about it."""
    where = place.found()
    with opened(where) as registry:
        found = registry.get(where.policy, version)
        events = [one for one in registry.events(where.policy, MAX_EVENTS) if one.version == version][::-1]
    weights = _weights(where, found)
    content = version_json(found) | {"weights": weights, "events": [_event_json(one) for one in events]}
    fields = [(name, _text(value)) for name, value in version_json(found).items()]
    lines = [
        f"{one.time:%Y-%m-%d %H:%M:%S}  {one.action.value}  {one.by}  {_one_line(one.reason)}"
        for one in events
    ]
    return _print(content, *_table([*fields, ("weights", weights)]), *lines, as_json=as_json)


@command(policy_commands)
def promote(
    version: Version,
    reason: Reason,
    to: Annotated[Literal["active", "canary"], typer.Option(help="What the version becomes.")] = "active",
    canary_share: Annotated[
        float | None,
        typer.Option(min=0, max=1, callback=finite, help="With --to canary: share of clients that get it."),
    ] = None,
    *,
    place: Place,
    as_json: AsJson = False,
) -> int:
    """Make a version active, or the canary."""
    found = place.found()
    with opened(found, to_write=True) as registry:
        share = registry.traffic(found.policy).canary_share if canary_share is None else canary_share
        if to == "canary" and not share:
            raise ConfigurationError(
                "--to canary: no client would get it; give its share of the clients, --canary-share 0.1"
            )
        done = registry.promote(
            found.policy, version, reason, by=operator(), to=Status(to), canary_share=canary_share
        )
    return _print(version_json(done), version_line(done), as_json=as_json)


@command(policy_commands)
def rollback(
    reason: Reason,
    version: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_NUMBER,
            help="Version to withdraw; default: the canary if there is one, else the active one.",
        ),
    ] = None,
    *,
    place: Place,
    as_json: AsJson = False,
) -> int:
    """Withdraw the canary, or the active version for the one before it."""
    content, lines = rolled_back(place.found(), version, reason, by=operator())
    return _print(content, *lines, as_json=as_json)


@command(policy_commands)
def retire(version: Version, reason: Reason, place: Place, as_json: AsJson = False) -> int:
    """Release a version's weights: no client can be served it any more."""
    done = retired(place.found(), version, reason, by=operator())
    return _print(version_json(done), version_line(done), as_json=as_json)


@command(policy_commands)
def traffic(
    wish: Wish,
    reason: Annotated[str, typer.Option("--reason", help="Why, for the audit; needed for a change.")] = "",
    *,
    place: Place,
    as_json: AsJson = False,
) -> int:
    """Show which clients get which version, or change it."""
    found = place.found()
    with opened(found, to_write=wish != Wish()) as registry:
        now = registry.traffic(found.policy)
        if wish != Wish():
            now = registry.set_traffic(wished(now, wish), reason, by=operator())
    return _print(traffic_json(now), traffic_line(now), as_json=as_json)


@command(policy_commands)
def export(
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    version: Annotated[
        int | None,
        typer.Argument(
            metavar="[VERSION]", min=1, max=MAX_NUMBER, help="Number; default: the active version."
        ),
    ] = None,
    kind: Annotated[
        Literal["safetensors", "onnx"], typer.Option("--format", help="onnx: with the network.")
    ] = "safetensors",
    *,
    place: Place,
    trust: Trust = False,
) -> int:
    """Write a version's weights, or the whole network, to a file."""
    found = place.found()
    if found.folder is None:
        raise ConfigurationError(
            f"{found.url}: a registry holds no weights; name the run's folder, the registry with --registry"
        )
    check_output(output)
    with opened(found) as registry:
        chosen = registry.active(found.policy) if version is None else registry.get(found.policy, version)
    if chosen is None:
        raise ConfigurationError(f"policy={found.policy!r} has no active version: name the one to export")
    try:
        blob = read_kept(found.folder, chosen.version, chosen.sha256)
        data = blob if kind == "safetensors" else to_onnx(found.folder, chosen, blob, trust=trust)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    with output_file(output, "wb") as file:
        file.write(data)
    sys.stdout.write(f"{output}: version {chosen.version} of {chosen.policy}, {len(data)} bytes\n")
    return EXIT_OK


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _print(content: dict[str, Any], *lines: str, as_json: bool) -> int:
    sys.stdout.write((json.dumps(content, indent=2) if as_json else "\n".join(lines)) + "\n")
    return EXIT_OK


def _row(version: PolicyVersion) -> tuple[str, ...]:
    return (
        str(version.version),
        f"{version.status.value} (standby)" if version.standby else version.status.value,
        version.origin.value,
        str(version.update),
        _text(None if version.evaluation is None else asdict(version.evaluation)),
        _text(version.parent),
        f"{version.created:%Y-%m-%d %H:%M:%S}",
        _one_line(version.reason),
    )


def _one_line(reason: str) -> str:
    """Return a reason without line breaks, so that it cannot look like further lines of the audit."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in reason)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['mean']:.4g} ± {value['std']:.3g} over {value['episodes']}"
    return "-" if value in (None, "") else _one_line(str(value))


def _weights(place: RegistryPolicy, version: PolicyVersion) -> str:
    folder = Path(version.place) if version.place else place.folder
    if folder is None or not version.pinned:
        return "not held" if not version.pinned else "in the folder of the run"
    try:
        read_kept(folder, version.version, version.sha256)
    except ValueError as error:
        return str(error)
    return "held, undamaged"


def _event_json(event: Event) -> dict[str, Any]:
    content = {"action": event.action.value, "time": event.time.isoformat(), "detail": dict(event.detail)}
    return {"number": event.number, "by": event.by, "reason": event.reason} | content
