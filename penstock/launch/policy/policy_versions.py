"""Versions, events and traffic of a registry: on the screen, as plain columns or JSON, steered and exported.

A rollback is at once: the standby is active when this returns. Its content then gets a number of its own:
from the learner of the run where one lives, which alone draws numbers; here where none does (the lock in
`policies/` tells), LEAP above every number registered, so that none that the run has used is used again.
"""

import contextlib
import getpass
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.config.configuration_error import how_to_install
from penstock.config.credentials import registry_with_password
from penstock.config.run_folder import CONFIG_FILE
from penstock.config.service_settings import local_settings
from penstock.config.settings import ConfigurationError, Settings, load, parse_toml
from penstock.config.trusted import check_places
from penstock.launch.policy.policy_commands import Wish
from penstock.protocol.limits import MAX_NUMBER
from penstock.registry.records import (
    MAX_EVENTS,
    Conflict,
    Event,
    PolicyVersion,
    RegistryError,
    Status,
    Traffic,
    Unavailable,
)
from penstock.registry.registry import Registry
from penstock.registry.weight_files import (
    forget_kept,
    hold,
    read_kept,
    read_specification,
    registry_url,
    write_kept,
)
from penstock.runtime.exit import EXIT_OK, Fatal, NoAnswer
from penstock.runtime.output_file import check_output, output_file

# ---- Find the registry that a command of `penstock policy` means, and map its errors to exit codes.


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryPolicy:
    """A policy in a registry. folder: of the run, None where only a URL was given."""

    url: str
    policy: str
    folder: Path | None


def find_place(run: str, registry: str | None, policy: str | None) -> RegistryPolicy:
    """Return the policy of a registry that is meant.

    run: folder of a run, or URL of a registry. registry, policy: None: the run's own; its registry only where
    the folder was made here. Raises ConfigurationError for a folder that holds no run.
    """
    if "://" in run:
        return RegistryPolicy(url=registry or run, policy=policy or Settings().serving.policy, folder=None)
    folder, config = Path(run), Path(run) / CONFIG_FILE
    if not folder.is_dir():
        raise ConfigurationError(
            f"{run}: no such folder; name a run's folder (`ls runs`) or a registry's URL"
        )
    settings = load([parse_toml(config)]) if os.path.lexists(config) else Settings()
    if registry is None:
        check_places(folder, settings, "name the registry with --registry")
    return RegistryPolicy(
        url=registry or registry_url(folder, registry_with_password(settings.registry)),
        policy=policy or settings.serving.policy,
        folder=folder,
    )


@contextmanager
def opened(place: RegistryPolicy, *, to_write: bool = False) -> Iterator[Registry]:
    """Open the registry. Its errors become ConfigurationError, Fatal or, while it is away, NoAnswer."""
    file = place.url.removeprefix("sqlite:///")
    if file != place.url and not Path(file).exists():
        raise ConfigurationError(
            f"{file}: not there: no version is registered yet; a learner registers its best and its last"
        )
    try:
        with Registry.open(place.url, migrate=True) if to_write else Registry.read(place.url) as registry:
            yield registry
    except Unavailable as error:
        raise NoAnswer(str(error)) from error
    except Conflict as error:
        raise Fatal(str(error)) from error
    except (RegistryError, ValueError) as error:
        raise ConfigurationError(str(error)) from error


def operator() -> str:
    try:
        return f"operator/{getpass.getuser()}"
    except (KeyError, OSError):
        return "operator"


_HEADINGS = ("version", "status", "origin", "update", "evaluation", "parent", "registered", "reason")


def show_versions(place: RegistryPolicy, *, as_json: bool) -> int:
    with opened(place) as registry:
        versions, traffic = registry.list(place.policy), registry.traffic(place.policy)
    content = {"versions": [version_json(one) for one in versions], "traffic": traffic_json(traffic)}
    return _told(content, *table([_HEADINGS, *map(_row, versions)]), traffic_line(traffic), as_json=as_json)


def show_version(place: RegistryPolicy, version: int, *, as_json: bool) -> int:
    """Print a version, whether its weights are here, and its events, oldest first."""
    with opened(place) as registry:
        found = registry.get(place.policy, version)
        events = [one for one in registry.events(place.policy, MAX_EVENTS) if one.version == version][::-1]
    weights = _weights(place, found)
    content = version_json(found) | {"weights": weights, "events": [_event_json(one) for one in events]}
    fields = [(name, _text(value)) for name, value in version_json(found).items()]
    lines = [
        f"{one.time:%Y-%m-%d %H:%M:%S}  {one.action.value}  {one.by}  {_one_line(one.reason)}"
        for one in events
    ]
    return _told(content, *table([*fields, ("weights", weights)]), *lines, as_json=as_json)


def version_line(version: PolicyVersion) -> str:
    standby = ", standby" if version.standby else ""
    return f"version {version.version} of {version.policy}: {version.status.value}{standby}"


def traffic_line(traffic: Traffic) -> str:
    rest = 1.0 - traffic.canary_share - traffic.latest_share
    parts = [
        f"canary {traffic.canary_share:g}, latest {traffic.latest_share:g}, active {rest:g} of the clients"
    ]
    parts += [f"shadow {traffic.shadow}"] if traffic.shadow is not None else []
    parts += [f"{client} → {version}" for client, version in sorted(traffic.pins.items())]
    parts += [f"experiment {traffic.experiment}, revision {traffic.revision}"]
    return "traffic: " + "; ".join(parts)


def version_json(version: PolicyVersion) -> dict[str, Any]:
    return asdict(version) | {
        "origin": version.origin.value,
        "status": version.status.value,
        "created": version.created.isoformat(),
        "changed": version.changed.isoformat(),
        "pinned": version.pinned,
    }


def traffic_json(traffic: Traffic) -> dict[str, Any]:
    names = ("policy", "revision", "experiment", "canary_share", "latest_share", "shadow")
    changed = None if traffic.changed is None else traffic.changed.isoformat()
    return {name: getattr(traffic, name) for name in names} | {"pins": dict(traffic.pins), "changed": changed}


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _told(content: dict[str, Any], *lines: str, as_json: bool) -> int:
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


# ---- The operator's decisions, written to the registry.

LEAP: Final = 2**20
"""Distance above every registered number, as when a log is opened again.

A run publishes fewer versions behind its newest registered one.
"""


def promote(
    place: RegistryPolicy, version: int, *, to: str, canary_share: float | None, reason: str, as_json: bool
) -> int:
    if to not in ("active", "canary"):
        raise ConfigurationError(f"--to {to!r}: use active or canary")
    with opened(place, to_write=True) as registry:
        share = registry.traffic(place.policy).canary_share if canary_share is None else canary_share
        if to == "canary" and not share:
            raise ConfigurationError(
                "--to canary: no client would get it; name the share of those that do, --canary-share 0.1"
            )
        done = registry.promote(
            place.policy, version, reason, by=operator(), to=Status(to), canary_share=canary_share
        )
    return _told(version_json(done), version_line(done), as_json=as_json)


def retire(place: RegistryPolicy, version: int, *, reason: str, as_json: bool) -> int:
    with opened(place, to_write=True) as registry:
        done = registry.retire(place.policy, version, reason, by=operator())
    folder = _folder(place, done)
    lock = None if folder is None else hold(folder)
    if folder is not None and lock is not None:  # a learner of the run that lives removes them itself
        with lock, contextlib.suppress(ValueError):
            read_kept(folder, done.version, done.sha256)  # raises for what is not this version's
            forget_kept(folder, done.version)
    return _told(version_json(done), version_line(done), as_json=as_json)


def rollback(place: RegistryPolicy, version: int | None, *, reason: str, as_json: bool) -> int:
    content, lines = rolled_back(place, version, reason, by=operator())
    return _told(content, *lines, as_json=as_json)


def rolled_back(
    place: RegistryPolicy, version: int | None, reason: str, *, by: str
) -> tuple[dict[str, Any], list[str]]:
    """Withdraw the canary or the active version. by: for the audit.

    Returns what it came to as JSON values, and in lines for people.
    """
    with opened(place, to_write=True) as registry:
        done = registry.rollback(place.policy, reason, by=by, version=version)
        note = ""
        try:
            active = _renumbered(registry, place, by) or done.active
        except (OSError, ValueError) as error:
            active, note = done.active, f"its content has no number of its own yet: {error}"
        awaiting = registry.awaiting_number(place.policy) is not None
    content = {
        "withdrawn": version_json(done.withdrawn),
        "active": None if active is None else version_json(active),
        "awaits_number": awaiting,
    }
    lines = [version_line(done.withdrawn), "nothing is active" if active is None else version_line(active)]
    if awaiting:
        lines.append(note or "the learner of the run gives its content a number of its own")
    return content, lines


def traffic(place: RegistryPolicy, wish: Wish, *, reason: str, as_json: bool) -> int:
    with opened(place, to_write=wish != Wish()) as registry:
        now = registry.traffic(place.policy)
        if wish != Wish():
            now = registry.set_traffic(wished(now, wish), reason, by=operator())
    return _told(traffic_json(now), traffic_line(now), as_json=as_json)


def _renumbered(registry: Registry, place: RegistryPolicy, by: str) -> PolicyVersion | None:
    """Return the copy under a new number; None where there is nothing to copy, or a learner will do it."""
    original = registry.awaiting_number(place.policy)
    folder = None if original is None else _folder(place, original)
    if original is None or folder is None:
        return None
    lock = hold(folder)
    if lock is None:
        return None
    with lock:
        blob = read_kept(folder, original.version, original.sha256)
        known = registry.list(place.policy)
        same = [one.version for one in known if not original.place or one.run == original.run]
        version = max(same) + LEAP
        write_kept(folder, version, blob)
        reason = f"content of version {original.version}, which a rollback made active again"
        return registry.record_rollback(
            place.policy, version=version, restores=original.version, reason=reason, by=by
        )


def _folder(place: RegistryPolicy, version: PolicyVersion) -> Path | None:
    """Return the folder in which the weights of a version lie, None where it is not known or not here."""
    if not version.place:
        return place.folder
    return Path(version.place) if Path(version.place).is_dir() else None


def wished(now: Traffic, wish: Wish) -> Traffic:
    names = ("canary_share", "latest_share", "experiment")
    changed = {name: value for name in names if (value := getattr(wish, name)) is not None}
    shadow = now.shadow if wish.shadow is None else wish.shadow or None
    pins = {client: version for client, version in now.pins.items() if client not in wish.unpins}
    return replace(now, **changed, shadow=shadow, pins=pins | _pins(wish))


def _pins(wish: Wish) -> dict[str, int]:
    """Return the wished pins by client; raises ConfigurationError for a client with two wishes."""
    pins = dict[str, int]()
    for text in wish.pins:
        client, _, number = text.rpartition("=")
        version = int(number) if re.fullmatch(r"[0-9]{1,16}", number) else 0
        if not client or not 0 < version <= MAX_NUMBER:
            raise ConfigurationError(f"--pin {text!r}: write CLIENT=VERSION, such as robot-7=12")
        if client in wish.unpins:
            raise ConfigurationError(f"--pin {client}={version}: --unpin {client} unties it; name one")
        if pins.setdefault(client, version) != version:
            raise ConfigurationError(
                f"--pin {client}={version}: --pin {client}={pins[client]} ties it already; name one version"
            )
    return pins


def export(
    place: RegistryPolicy, version: int | None, *, kind: str, output: Path, trust: bool = False
) -> int:
    """Write a version, or the active one; raises ConfigurationError where its weights are not here."""
    if kind not in ("safetensors", "onnx"):
        raise ConfigurationError(f"--format {kind!r}: use safetensors or onnx")
    if place.folder is None:
        raise ConfigurationError(
            f"{place.url}: a registry holds no weights; name the run's folder, with --registry beside it"
        )
    check_output(output)
    with opened(place) as registry:
        chosen = registry.active(place.policy) if version is None else registry.get(place.policy, version)
    if chosen is None:
        raise ConfigurationError(f"policy={place.policy!r} has no active version: name the one to export")
    try:
        blob = read_kept(place.folder, chosen.version, chosen.sha256)
        data = blob if kind == "safetensors" else _onnx(place.folder, chosen, blob, trust=trust)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    with output_file(output, "wb") as file:
        file.write(data)
    sys.stdout.write(f"{output}: version {chosen.version} of {chosen.policy}, {len(data)} bytes\n")
    return EXIT_OK


def _onnx(folder: Path, version: PolicyVersion, blob: bytes, *, trust: bool) -> bytes:
    from penstock.actor.specification import policy_maker
    from penstock.policy.weights import load_into

    try:
        from penstock.policy.onnx_export import to_onnx
    except ImportError as error:
        raise Fatal(f"{error}; {how_to_install('onnx')}") from error
    specification = read_specification(folder)
    # No environment is made: this machine need not have it.
    policy = policy_maker(specification, local_settings(folder, trust=trust).actor)()
    load_into(policy, blob)
    content = {
        "run": version.run,
        "policy": version.policy,
        "version": version.version,
        "sha256": version.sha256,
    }
    masks = [rule.name for rule in specification.schema.tensors if rule.name.startswith("mask/")]
    return to_onnx(policy, {name: str(value) for name, value in content.items()}, masks=masks)
