"""Versions and traffic of a registry: found by a run's folder, as lines and JSON, changed and exported.

A rollback is at once: the standby is active when this returns. Its content then gets a number of its own:
from the learner of the run where one lives, which alone draws numbers; here where none does (the lock in
`policies/` tells), LEAP above every number registered, so that none that the run has used is used again.
"""

import contextlib
import getpass
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from penstock.config.configuration_error import how_to_install
from penstock.config.credentials import registry_with_password
from penstock.config.run_folder import CONFIG_FILE
from penstock.config.service_settings import local_settings
from penstock.config.settings import ConfigurationError, Settings, load, parse_toml
from penstock.config.trusted import check_places
from penstock.protocol.limits import MAX_NUMBER
from penstock.registry.records import (
    Conflict,
    PolicyVersion,
    RegistryError,
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
from penstock.runtime.exit import Fatal, NoAnswer
from penstock.runtime.foreground import finite

# ---- Find the registry that a command of `penstock policy` means, and map its errors to exit codes.


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryPolicy:
    """A policy in a registry. folder: of the run, None where only a URL was given."""

    url: str
    policy: str
    folder: Path | None


def find_place(run: str, registry: str | None, policy: str | None) -> RegistryPolicy:
    """Find the policy that a command names.

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
    """Open the registry; its errors become ConfigurationError, Fatal or, while it is away, NoAnswer."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The changes of the traffic; None: unchanged."""

    canary_share: Annotated[
        float | None, typer.Option(callback=finite, help="Share of clients that get the canary.")
    ] = None
    latest_share: Annotated[
        float | None, typer.Option(callback=finite, help="Share that follows the learner's newest weights.")
    ] = None
    shadow: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_NUMBER, help="Version that also computes each answer; 0: none."),
    ] = None
    pins: Annotated[
        tuple[str, ...],
        typer.Option("--pin", metavar="CLIENT=VERSION", help="Tie a client to a version; may be repeated."),
    ] = ()
    unpins: Annotated[
        tuple[str, ...], typer.Option("--unpin", metavar="CLIENT", help="Untie a client; may be repeated.")
    ] = ()
    experiment: Annotated[str | None, typer.Option(help="A new name deals the clients anew.")] = None


LEAP: Final = 2**20
"""Distance above every registered number, as when a log is opened again.

A run publishes fewer versions behind its newest registered one.
"""


def retired(place: RegistryPolicy, version: int, reason: str, *, by: str) -> PolicyVersion:
    """Retire a version, and remove its weights where no learner of the run lives, which removes them itself.

    by: for the audit.
    """
    with opened(place, to_write=True) as registry:
        done = registry.retire(place.policy, version, reason, by=by)
    folder = _folder(place, done)
    lock = None if folder is None else hold(folder)
    if folder is not None and lock is not None:
        with lock, contextlib.suppress(ValueError):
            read_kept(folder, done.version, done.sha256)  # raises for what is not this version's
            forget_kept(folder, done.version)
    return done


def rolled_back(
    place: RegistryPolicy, version: int | None, reason: str, *, by: str
) -> tuple[dict[str, Any], list[str]]:
    """Withdraw the canary or the active version. by: for the audit.

    Returns the result as JSON values, and as lines for people.
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


def _renumbered(registry: Registry, place: RegistryPolicy, by: str) -> PolicyVersion | None:
    """Copy the content of a rollback under a new number; None without one, or where a learner will do it."""
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
    """Return the folder of the weights of a version, None where it is unknown or not on this machine."""
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
            raise ConfigurationError(
                f"--pin {client}={version}: --unpin {client} says the opposite; give one of them"
            )
        if pins.setdefault(client, version) != version:
            raise ConfigurationError(
                f"--pin {client}={version}: --pin {client}={pins[client]} names another version; "
                "give one of them"
            )
    return pins


def to_onnx(folder: Path, version: PolicyVersion, blob: bytes, *, trust: bool) -> bytes:
    """Return the network of a version with its weights, as a file of ONNX.

    folder: of its run. trust: import what the folder names although it was not made here. Raises Fatal where
    the package for ONNX is absent.
    """
    from penstock.actor.specification import policy_maker
    from penstock.policy.weights import load_into

    try:
        from penstock.policy.onnx_export import to_onnx as exported
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
    return exported(policy, {name: str(value) for name, value in content.items()}, masks=masks)
