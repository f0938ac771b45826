"""Versions, events and traffic on the screen: plain columns, or JSON."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.launch.policy.registry_place import RegistryPolicy, opened
from penstock.registry.records import MAX_EVENTS, Event, PolicyVersion, Traffic
from penstock.registry.weight_files import read_kept
from penstock.runtime.exit import EXIT_OK

_HEADINGS = ("version", "status", "origin", "update", "evaluation", "parent", "registered", "reason")


def show_versions(place: RegistryPolicy, *, as_json: bool) -> int:
    """Print every version of the policy, and its traffic; returns the exit code."""
    with opened(place) as registry:
        versions, traffic = registry.list(place.policy), registry.traffic(place.policy)
    if as_json:
        content = {"versions": [version_json(one) for one in versions], "traffic": traffic_json(traffic)}
        say([json.dumps(content, indent=2)])
    else:
        say([*table([_HEADINGS, *map(_row, versions)]), traffic_line(traffic)])
    return EXIT_OK


def show_version(place: RegistryPolicy, version: int, *, as_json: bool) -> int:
    """Print a version, whether its weights are here, and its events, oldest first; returns the exit code."""
    with opened(place) as registry:
        found = registry.get(place.policy, version)
        events = [one for one in registry.events(place.policy, MAX_EVENTS) if one.version == version][::-1]
    weights = _weights(place, found)
    if as_json:
        content = version_json(found) | {"weights": weights, "events": [_event_json(one) for one in events]}
        say([json.dumps(content, indent=2)])
    else:
        fields = [(name, _text(value)) for name, value in version_json(found).items()]
        lines = [
            f"{one.time:%Y-%m-%d %H:%M:%S}  {one.action.value}  {one.by}  {_one_line(one.reason)}"
            for one in events
        ]
        say([*table([*fields, ("weights", weights)]), *lines])
    return EXIT_OK


def version_line(version: PolicyVersion) -> str:
    """Return one line on a version."""
    standby = ", standby" if version.standby else ""
    return f"version {version.version} of {version.policy}: {version.status.value}{standby}"


def traffic_line(traffic: Traffic) -> str:
    """Return one line on the traffic."""
    rest = 1.0 - traffic.canary_share - traffic.latest_share
    parts = [
        f"canary {traffic.canary_share:g}, latest {traffic.latest_share:g}, active {rest:g} of the clients"
    ]
    parts += [f"shadow {traffic.shadow}"] if traffic.shadow is not None else []
    parts += [f"{client} → {version}" for client, version in sorted(traffic.pins.items())]
    parts += [f"experiment {traffic.experiment}, revision {traffic.revision}"]
    return "traffic: " + "; ".join(parts)


def version_json(version: PolicyVersion) -> dict[str, Any]:
    """Return a version as a JSON object."""
    return asdict(version) | {
        "origin": version.origin.value,
        "status": version.status.value,
        "created": version.created.isoformat(),
        "changed": version.changed.isoformat(),
        "pinned": version.pinned,
    }


def traffic_json(traffic: Traffic) -> dict[str, Any]:
    """Return the traffic as a JSON object."""
    names = ("policy", "revision", "experiment", "canary_share", "latest_share", "shadow")
    changed = None if traffic.changed is None else traffic.changed.isoformat()
    return {name: getattr(traffic, name) for name in names} | {"pins": dict(traffic.pins), "changed": changed}


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def say(lines: Sequence[str]) -> None:
    """Print lines."""
    sys.stdout.write("\n".join(lines) + "\n")


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
    """Return what an operator wrote as a part of a line: it cannot look like further lines of the audit."""
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
