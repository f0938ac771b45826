"""Promote, roll back, retire, and traffic: the operator's decisions, written to the registry.

A rollback is at once: the standby is active when this returns. Its content then gets a number of its own:
from the learner of the run where one lives, which alone draws numbers; here where none does (the lock in
`policies/` tells), LEAP above every number registered, so that none that the run has used is used again.
"""

import contextlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.config.settings import ConfigurationError
from penstock.launch.policy.policy_commands import Wish
from penstock.launch.policy.policy_view import (
    RegistryPolicy,
    opened,
    operator,
    say,
    traffic_json,
    traffic_line,
    version_json,
    version_line,
)
from penstock.protocol.limits import MAX_NUMBER
from penstock.registry.records import PolicyVersion, Status, Traffic
from penstock.registry.registry import Registry
from penstock.registry.weight_files import forget_kept, hold, read_kept, write_kept
from penstock.runtime.exit import EXIT_OK

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
    _tell(version_json(done), version_line(done), as_json=as_json)
    return EXIT_OK


def retire(place: RegistryPolicy, version: int, *, reason: str, as_json: bool) -> int:
    """Release a version's weights."""
    with opened(place, to_write=True) as registry:
        done = registry.retire(place.policy, version, reason, by=operator())
    _forget(place, done)
    _tell(version_json(done), version_line(done), as_json=as_json)
    return EXIT_OK


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """What a rollback came to: as JSON values, and in lines for people."""

    content: dict[str, Any]
    lines: tuple[str, ...]


def rollback(place: RegistryPolicy, version: int | None, *, reason: str, as_json: bool) -> int:
    done = rolled_back(place, version, reason, by=operator())
    _tell(done.content, "\n".join(done.lines), as_json=as_json)
    return EXIT_OK


def rolled_back(place: RegistryPolicy, version: int | None, reason: str, *, by: str) -> RolledBack:
    """Withdraw the canary or the active version. by: for the audit."""
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
    return RolledBack(content=content, lines=tuple(lines))


def traffic(place: RegistryPolicy, wish: Wish, *, reason: str, as_json: bool) -> int:
    with opened(place, to_write=wish != Wish()) as registry:
        now = registry.traffic(place.policy)
        if wish != Wish():
            now = registry.set_traffic(wished(now, wish), reason, by=operator())
    _tell(traffic_json(now), traffic_line(now), as_json=as_json)
    return EXIT_OK


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


def _forget(place: RegistryPolicy, retired: PolicyVersion) -> None:
    """Remove the weights of a retired version; where a learner of the run lives, it removes them."""
    folder = _folder(place, retired)
    lock = None if folder is None else hold(folder)
    if folder is None or lock is None:
        return
    with lock, contextlib.suppress(ValueError):
        read_kept(folder, retired.version, retired.sha256)  # raises for what is not this version's
        forget_kept(folder, retired.version)


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
    for client, version in map(_pin, wish.pins):
        if client in wish.unpins:
            raise ConfigurationError(f"--pin {client}={version}: --unpin {client} unties it; name one")
        if pins.setdefault(client, version) != version:
            raise ConfigurationError(
                f"--pin {client}={version}: --pin {client}={pins[client]} ties it already; name one version"
            )
    return pins


def _pin(text: str) -> tuple[str, int]:
    client, _, version = text.rpartition("=")
    is_number = re.fullmatch(r"[0-9]{1,16}", version) and 0 < int(version) <= MAX_NUMBER
    if not client or not is_number:
        raise ConfigurationError(f"--pin {text!r}: write CLIENT=VERSION, such as robot-7=12")
    return client, int(version)


def _tell(content: dict[str, Any], text: str, *, as_json: bool) -> None:
    say([json.dumps(content, indent=2) if as_json else text])
